"""How a graph makes one vector of those of a text's tokens. All in float32, whatever the layers compute in."""

from collections.abc import Sequence

from weir.embedding.graph.assembling import Assembly
from weir.embedding.recipe import Pooling

_INT64 = 7  # onnx.TensorProto's number
_LEAST = 1e-9  # what is divided by is at least that: a text of which no token counts becomes zeros
_LOWEST = -3e38  # less than any value


class Pooler:
    """Adds poolings of `value` [batch, length, size] to a graph. What `pool` is 0 for does not count, nor what `mask` is 0 for. The hierarchical
    one takes means over `window` tokens."""

    def __init__(self, assembly: Assembly, value: str, window: int) -> None:
        self._assembly = assembly
        self._value = value
        self._window = window
        self._weights = ""

    def add_all(self, poolings: Sequence[Pooling]) -> str:
        """Return what all of these make, one after the other in each vector."""
        pooled = [self.add(pooling) for pooling in poolings]
        return pooled[0] if len(pooled) == 1 else self._assembly.add("Concat", *pooled, axis=-1)

    def add(self, pooling: Pooling) -> str:
        """Return the pooled value, [batch, size], or twice the size for MEAN_MAX; [batch, length, size] for NONE."""
        if pooling is Pooling.CLS:
            return self.first()
        if pooling is Pooling.SEP:
            return self._last()
        weights = self._weights = self._weights or self._assembly.input("pool", "float32", ("batch", "length"))
        if pooling is Pooling.NONE:
            return self._assembly.add("Mul", self._value, self._column(weights))
        if pooling is Pooling.MAX:
            return self._highest(weights)
        if pooling is Pooling.MEAN_MAX:
            return self._assembly.add("Concat", self._mean(weights), self._highest(weights), axis=-1)
        if pooling is Pooling.HIERARCHICAL:
            return self._hierarchical(weights)
        if pooling is Pooling.WEIGHTED_MEAN:
            return self._mean(self._assembly.add("Mul", weights, self._places(weights)))
        return self._mean(weights, root=pooling is Pooling.MEAN_SQRT)

    def first(self) -> str:
        """Return the value of the first token."""
        return self._assembly.add("Gather", self._value, self._assembly.constant(0, "int64"), axis=1)

    def _last(self) -> str:
        """Return the value of the last token that is one."""
        one = self._assembly.constant([1], "int64")
        count = self._assembly.add("ReduceSum", self._assembly.add("Cast", "mask", to=_INT64), one, keepdims=1)
        place = self._assembly.add("Sub", count, one)
        return self._assembly.add("GatherND", self._value, place, batch_dims=1)

    def _mean(self, weights: str, root: bool = False) -> str:
        row = self._assembly.add("Unsqueeze", weights, self._assembly.constant([1], "int64"))
        total = self._assembly.add(
            "Squeeze", self._assembly.add("MatMul", row, self._value), self._assembly.constant([1], "int64")
        )
        count = self._assembly.add("ReduceSum", weights, self._assembly.constant([1], "int64"), keepdims=1)
        count = self._assembly.add("Max", count, self._assembly.constant(_LEAST, "float32"))
        return self._assembly.add("Div", total, self._assembly.add("Sqrt", count) if root else count)

    def _hierarchical(self, weights: str) -> str:
        """Of the means over so many tokens in a row, return the highest of each number. A window counts if it is full, or has all there are."""
        column = self._column(weights)
        sums = self._in_windows(self._assembly.add("Mul", self._value, column))
        counts = self._in_windows(column)
        least = self._assembly.constant(_LEAST, "float32")
        means = self._assembly.add("Div", sums, self._assembly.add("Max", counts, least))
        total = self._assembly.add("ReduceSum", column, self._assembly.constant([1], "int64"), keepdims=1)
        full = self._assembly.constant(self._window, "float32")
        share = self._assembly.add("Div", self._assembly.add("Min", total, full), full)
        enough = self._assembly.add("Sub", share, self._assembly.constant(0.5 / self._window, "float32"))
        wanted = self._assembly.add("Greater", counts, self._assembly.add("Max", enough, least))
        return self._highest_of(means, wanted)

    def _in_windows(self, value: str) -> str:
        """Return the mean of `value` over each place and those behind it, zeros behind the end: [batch, length, size]."""
        one = self._assembly.constant([1], "int64")
        image = self._assembly.add("Unsqueeze", value, one)
        pooled = self._assembly.add(
            "AveragePool", image, kernel_shape=[self._window, 1], pads=[0, 0, self._window - 1, 0], count_include_pad=1
        )
        return self._assembly.add("Squeeze", pooled, one)

    def _highest(self, weights: str) -> str:
        counts = self._assembly.add("Greater", self._column(weights), self._assembly.constant(0, "float32"))
        return self._highest_of(self._value, counts)

    def _highest_of(self, value: str, counts: str) -> str:
        zero = self._assembly.constant(0, "float32")
        seen = self._assembly.add("Where", counts, value, self._assembly.constant(_LOWEST, "float32"))
        highest = self._assembly.add("ReduceMax", seen, self._assembly.constant([1], "int64"), keepdims=0)
        any_counts = self._assembly.add("Greater", highest, self._assembly.constant(_LOWEST, "float32"))
        return self._assembly.add("Where", any_counts, highest, zero)

    def _column(self, weights: str) -> str:
        return self._assembly.add("Unsqueeze", weights, self._assembly.constant([-1], "int64"))

    def _places(self, weights: str) -> str:
        """Return 1, 2, 3 … for the tokens that count."""
        return self._assembly.add("CumSum", weights, self._assembly.constant(1, "int64"))
