"""What comes in goes out: a BYTES tensor of any width."""

from typing import Any

from numpy.typing import NDArray

import weir

Arrays = dict[str, NDArray[Any]]


class SimpleIdentity(weir.Model):
    """OUTPUT0 = INPUT0."""

    inputs = (weir.Tensor("INPUT0", "BYTES", (-1, -1)),)
    outputs = (weir.Tensor("OUTPUT0", "BYTES", (-1, -1)),)
    examples = ({"INPUT0": [["hello", "world"]]},)

    def predict(self, batch: Arrays) -> Arrays:
        return {"OUTPUT0": batch["INPUT0"]}
