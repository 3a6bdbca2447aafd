"""Unary gRPC calls from a process of its own: `python -m benchmarks.grpc_load PORT METHOD BODY_FILE CONNECTIONS SECONDS`.

Bodies are bytes on the way out and on the way in: what is measured is the server, and not how Python reads protobuf. Prints
one line of JSON.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import grpc.aio
import numpy


async def _measure(port: str, method: str, body: bytes, calls: int, seconds: float) -> dict[str, float]:
    took: list[float] = []
    failed = 0
    end = time.perf_counter() + seconds

    async def caller() -> None:
        nonlocal failed
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            call = channel.unary_unary(method, request_serializer=None, response_deserializer=None)
            while (began := time.perf_counter()) < end:
                try:
                    await call(body)
                except grpc.aio.AioRpcError:
                    failed += 1
                took.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*[caller() for _ in range(calls)])
    p50, p99 = numpy.percentile(took, [50, 99])
    return {
        "requests": len(took), "seconds": time.perf_counter() - began, "p50": float(p50), "p99": float(p99),
        "refused": failed, "broken": 0,
    }  # fmt: skip


def main() -> None:
    """Do what the command line says."""
    port, method, path, calls, seconds = sys.argv[1:]
    print(json.dumps(asyncio.run(_measure(port, method, Path(path).read_bytes(), int(calls), float(seconds)))))


if __name__ == "__main__":
    main()
