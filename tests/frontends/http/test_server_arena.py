"""Large bodies and answers between real sockets and a real worker process."""

import asyncio
import os
import zlib

import pytest
from tests.frontends.http.fast.kit import post
from tests.frontends.http.sockets import Client, Run, serving, until

from weir.model import Model
from weir.serving.service import Service

pytestmark = pytest.mark.usefixtures("nothing_is_left")


class Checksum(Model):
    """Sums up bytes, so that a test sees whether they arrived as they were."""

    Output = int

    def predict(self, batch: list[bytes]) -> list[int]:
        return [zlib.crc32(item) for item in batch]


class Repeat(Model):
    """Answers a number with as many bytes."""

    Output = bytes

    def predict(self, batch: list[int]) -> list[bytes]:
        return [bytes([item % 251]) * item for item in batch]


def arena(service: Service) -> tuple[int, int]:
    """Return how many bytes the arena of `service` has, and how many are free."""
    gauges = service.state()["gauges"]
    return gauges["arena_bytes"], gauges["arena_free_bytes"]


class TestWorkerProcesses:
    """The real arena, and a process that reads it."""

    def test_large_bodies_arrive_as_they_were_sent(self, run: Run) -> None:
        async def test() -> None:
            service = Service(Checksum, name="square", arena_bytes=16 << 20)
            async with serving(service=service) as server:
                bodies = [os.urandom(600_000 + 1000 * number) for number in range(16)]
                headers = ("Content-Type: application/octet-stream",)

                async def one(body: bytes) -> None:
                    client = await Client.connect(server)
                    for _ in range(10):
                        assert await client.ask(post(body, *headers)) == (200, str(zlib.crc32(body)).encode())
                    client.close()

                await asyncio.gather(*map(one, bodies))
                assert arena(service) == (16 << 20, 16 << 20)

        run(test)

    def test_large_answers_to_slow_readers(self, run: Run) -> None:
        async def test() -> None:
            service = Service(Repeat, name="square", arena_bytes=64 << 20)
            async with serving(service=service) as server:
                sizes = [1_000_000 + number for number in range(8)]
                clients = [await Client.connect(server, limit=1000) for _ in sizes]
                for client, size in zip(clients, sizes, strict=True):
                    client.writer.write(post(b"%d" % size, "Accept: application/octet-stream") * 2)
                for client, size in zip(clients, sizes, strict=True):
                    for _ in range(2):
                        assert await client.answer() == (200, bytes([size % 251]) * size)
                    client.close()
                await until(lambda: arena(service) == (64 << 20, 64 << 20))

        run(test)
