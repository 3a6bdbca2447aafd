"""A model to try the manifests with."""

import weir


class Square(weir.Model):
    """Squares numbers."""

    examples = (weir.Example(3, 9),)

    def predict(self, batch: list[float]) -> list[float]:
        return [x * x for x in batch]
