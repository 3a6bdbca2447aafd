"""What comes after the layers: the model's own pooler and classifier, further dense layers, cutting and scaling."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from weir.embedding.graph.assembling import Assembly
from weir.embedding.graph.dense import Numbers
from weir.embedding.recipe import Pooling

Array = NDArray[Any]
_LEAST_LENGTH = 1e-12  # as in torch.nn.functional.normalize


class Finisher:
    """Adds the end of a graph. Its few numbers are computed in float32: a matrix for a whole text costs little."""

    def __init__(self, assembly: Assembly, numbers: Numbers, weights: Mapping[str, Array]) -> None:
        self._assembly = assembly
        self._numbers = numbers
        self._weights = weights

    def pooler(self, first: str) -> str:
        """Return what the model's pooler makes of the first token."""
        return self._own(first, "pooler", "tanh")

    def classifier(self, first: str, pooling: Pooling) -> str:
        """Return the classifier's probabilities of each label, or its value between 0 and 1, from the first token.

        There are three kinds: after the pooler (BERT), after a layer with ReLU (DistilBERT), with a dense layer of its own (RoBERTa, MPNet).
        """
        if "classifier.out_proj.weight" in self._weights:
            out = self._own(self._own(first, "classifier.dense", "tanh"), "classifier.out_proj")
        elif "pre_classifier.weight" in self._weights:
            out = self._own(self._own(first, "pre_classifier", "relu"), "classifier")
        else:
            out = self._own(self.pooler(first), "classifier")
        if pooling is Pooling.REGRESSION:
            return self._assembly.add("Sigmoid", out)
        return self._assembly.add("Softmax", out, axis=-1)

    def dense(self, value: str, layers: Sequence[Any]) -> str:
        """Return `value` after further dense layers, each with `weight` [out, in], `bias` and `activation`."""
        for place, layer in enumerate(layers):
            value = self._layer(value, f"dense.{place}", layer.weight, layer.bias, layer.activation)
        return value

    def cut(self, value: str, dimensions: int) -> str:
        """Return the first numbers of each vector."""
        zero, end, last = (self._assembly.constant([number], "int64") for number in (0, dimensions, -1))
        return self._assembly.add("Slice", value, zero, end, last)

    def normalize(self, value: str) -> str:
        """Return vectors of length 1; zeros stay what they are."""
        length = self._assembly.add("ReduceL2", value, self._assembly.constant([-1], "int64"), keepdims=1)
        return self._assembly.add(
            "Div", value, self._assembly.add("Max", length, self._assembly.constant(_LEAST_LENGTH, "float32"))
        )

    def _own(self, value: str, name: str, activation: str = "identity") -> str:
        return self._layer(value, name, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], activation)

    def _layer(self, value: str, name: str, weight: Array, bias: Array | None, activation: str) -> str:
        out = self._assembly.add("MatMul", value, self._assembly.weight(f"{name}.weight", weight.T.astype("float32")))
        if bias is not None:
            out = self._assembly.add("Add", out, self._assembly.weight(f"{name}.bias", bias.astype("float32")))
        return self._numbers.bend(out, activation)
