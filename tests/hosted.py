"""What the tests of hosting let real ASGI servers serve."""

from typing import Any

import weir


class Square(weir.Model):
    """Squares numbers."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return [x * x for x in batch]


class Broken(weir.Model):
    """Cannot be loaded."""

    def load(self) -> None:
        raise OSError("the weights are gone")

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


app = weir.asgi(Square, max_batch_size=16)
inline = weir.asgi(Square, executor="inline")
broken = weir.asgi(Broken)
