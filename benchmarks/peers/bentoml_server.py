"""BentoML 1.4.40: square; one worker process, batches of up to 64, all else by its defaults. Run by `bentoml serve --quiet`."""

import bentoml


@bentoml.service(workers=1)
class Square:
    @bentoml.api(batchable=True, max_batch_size=64)
    def square(self, numbers: list[int]) -> list[int]:
        return [x * x for x in numbers]
