"""BentoML 1.4.40: square; one worker process, batches of up to 64, all else by its defaults; or by SETTINGS (JSON), with an async method. Run by `bentoml serve --quiet`."""

import json
import os

import bentoml

SETTINGS = json.loads(os.environ.get("SETTINGS", "{}"))


if SETTINGS:

    async def square(self, numbers: list[int]) -> list[int]:
        return [x * x for x in numbers]

else:

    def square(self, numbers: list[int]) -> list[int]:
        return [x * x for x in numbers]


@bentoml.service(**{"workers": 1, **SETTINGS})
class Square:
    square = bentoml.api(batchable=True, max_batch_size=64)(square)
