"""`@weir.ray.batch` in a deployment of Ray Serve: `serve run examples.ray.batched:app` (needs `pip install "ray[serve]"`)."""

from typing import Any

from ray import serve

import weir.ray


@serve.deployment(max_ongoing_requests=128)
class Lengths:
    """Answers each text with its length; up to 32 texts share a call."""

    @weir.ray.batch(max_batch_size=32, policy="auto")
    async def lengths(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]

    async def __call__(self, request: Any) -> int:
        text = await request.json() if hasattr(request, "json") else request
        length: int = await self.lengths(text)
        return length


app = Lengths.bind()  # type: ignore[attr-defined]  # where Ray is not installed, its decorator has no types
