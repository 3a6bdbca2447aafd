"""Run as a program: Triton's asyncio gRPC client against the server whose address is given."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton

ROW = np.arange(16, dtype=np.int32).reshape(1, 16)


def inputs() -> list[Any]:
    """Return both inputs of `simple`."""
    made = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in made:
        tensor.set_data_from_numpy(ROW)
    return made


async def requests() -> AsyncIterator[dict[str, Any]]:
    """Yield what a stream asks."""
    for number in range(5):
        yield {"model_name": "simple", "inputs": inputs(), "request_id": str(number)}


async def main(address: str) -> None:
    """Ask everything."""
    async with triton.InferenceServerClient(address) as client:
        assert await client.is_server_live() and await client.is_model_ready("simple")
        assert (await client.get_server_metadata()).name == "weir"
        results = await asyncio.gather(*[client.infer("simple", inputs()) for _ in range(20)])
        assert all((result.as_numpy("OUTPUT0") == 2 * ROW).all() for result in results)
        found = [answer async for answer in client.stream_infer(requests())]
        assert {result.get_response().id for result, error in found if error is None} == set("01234")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
