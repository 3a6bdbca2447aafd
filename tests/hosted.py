"""What the tests of hosting let real ASGI servers serve."""

from typing import Any

from tests.workers.models import Square as Square

import weir


class Broken(weir.Model):
    """Cannot be loaded."""

    def load(self) -> None:
        raise OSError("the weights are gone")

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


app = weir.asgi(Square, max_batch_size=16)
inline = weir.asgi(Square, executor="inline")
broken = weir.asgi(Broken)
