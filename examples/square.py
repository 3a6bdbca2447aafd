"""The smallest model: `weir serve examples.square:Square`, then `curl -d 3 localhost:8000/infer/square`."""

import weir


class Square(weir.Model):
    """Squares numbers."""

    examples = (weir.Example(3, 9),)

    def predict(self, batch: list[float]) -> list[float]:
        return [x * x for x in batch]
