"""A model whose workers run on Ray, from a program: `python examples/ray/sentiment.py`, or `... HEAD:6379` for a cluster.

It prints where each worker is, classifies some texts, and shows what becomes of a worker that is killed.
"""

import asyncio
import os
import signal
import sys
from typing import Any

import weir

GOOD = {"good", "great", "lovely"}
BAD = {"bad", "awful", "boring"}


class Sentiment(weir.Model):
    """Counts good and bad words. It is defined in a script, so it travels to the workers by value."""

    examples = ("a lovely day",)

    def predict(self, batch: list[str]) -> list[int]:
        return [sum((word in GOOD) - (word in BAD) for word in text.split()) for text in batch]


async def main(address: str | None) -> None:
    executor = weir.Ray(workers=2, address=address, num_cpus=0.5, placement="spread")
    async with weir.Service(Sentiment, executor=executor, max_batch_size=16) as service:
        show(service)
        texts = ["a great film", "boring and bad", "lovely , great , awful"]
        print(await asyncio.gather(*map(service.infer, texts)))
        if address is None:  # then the workers are processes of this machine
            os.kill(workers(service)[0]["pid"], signal.SIGKILL)
            print(await asyncio.gather(*map(service.infer, texts)), "after a worker was killed")


def workers(service: weir.Service) -> list[dict[str, Any]]:
    """Return the state of each worker."""
    states: list[dict[str, Any]] = service.state()["workers"]
    return states


def show(service: weir.Service) -> None:
    """Print where each worker is."""
    for worker in workers(service):
        print(f"worker {worker['index']} is {worker['state']} on {worker['address']}, node {worker['node'][:8]}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
