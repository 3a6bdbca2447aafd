"""Run as a program: KServe's gRPC client against the server whose address is given."""

import asyncio
import sys

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest

ROW = np.arange(16, dtype=np.int32).reshape(1, 16)


async def main(address: str) -> None:
    """Ask everything, with raw tensors and with typed ones."""
    async with InferenceGRPCClient(address, timeout=60) as client:
        assert await client.is_server_live() and await client.is_server_ready()
        assert await client.is_model_ready("simple")
        raw = [InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        typed = [InferInput(name, [1, 16], "INT32", data=ROW.ravel().tolist()) for name in ("INPUT0", "INPUT1")]
        for tensor in raw:
            tensor.set_data_from_numpy(ROW, binary_data=True)
        for tensors in (raw, typed):
            response = await client.infer(InferRequest(model_name="simple", request_id="7", infer_inputs=tensors))
            assert (response.id, response.model_name) == ("7", "simple")
            assert (response.outputs[0].as_numpy() == 2 * ROW).all(), response.outputs[0].as_numpy()
        try:
            await client.infer(InferRequest(model_name="nope", infer_inputs=raw))
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND
        else:
            raise AssertionError("it was not refused")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
