"""Two rows of sixteen integers in, their sums and differences out: the model that Triton's example clients ask."""

from typing import Any

from numpy.typing import NDArray

import weir

Arrays = dict[str, NDArray[Any]]


class Simple(weir.Model):
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1."""

    inputs = (weir.Tensor("INPUT0", "INT32", (-1, 16)), weir.Tensor("INPUT1", "INT32", (-1, 16)))
    outputs = (weir.Tensor("OUTPUT0", "INT32", (-1, 16)), weir.Tensor("OUTPUT1", "INT32", (-1, 16)))
    examples = ({"INPUT0": [list(range(16))], "INPUT1": [[1] * 16]},)

    def predict(self, batch: Arrays) -> Arrays:
        first, second = batch["INPUT0"], batch["INPUT1"]
        return {"OUTPUT0": first + second, "OUTPUT1": first - second}
