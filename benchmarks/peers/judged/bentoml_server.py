"""BentoML 1.4.40. Run by `bentoml serve`."""

import bentoml
from computing import compute, judged

KIND, BATCH, WAIT = judged()
SETTINGS = {"max_batch_size": BATCH, "max_latency_ms": max(1, WAIT)} if BATCH else {}


@bentoml.service(workers=1)
class Judged:
    @bentoml.api(batchable=True, **SETTINGS)
    def infer(self, numbers: list[int]) -> list[int]:
        compute(KIND, len(numbers))
        return numbers
