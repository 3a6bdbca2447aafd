"""Build the ONNX graph of a recipe from a checkpoint's weights.

It goes up to the highest layer that the recipe asks for, pools within, and holds nothing that a run need compute again. Inputs, all [batch, length]:
`ids` int32; `mask` int32, 1 for a token; `types` int32, only if the model tells a second text from the first; `pool` float32, how much a token
counts, only if the pooling weighs tokens. Texts are filled up from the right. Output: `vectors` float32, [batch, dimensions], or [batch, length, dimensions] for Pooling.NONE.

Run as a program, this module makes a graph and its weights in a process of its own, whose memory goes with it.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from weir.embedding.graph.assembly import Assembly, Graph, Numbers
from weir.embedding.graph.encoding import EncoderLayers
from weir.embedding.recipe import OF_LAST_LAYER, Pooling, Precision, Recipe, dense_layers, dimensions_of, used_layers

if TYPE_CHECKING:
    from weir.embedding.checkpoint.reading import Checkpoint


Array = NDArray[Any]

WEIGHTS = "weights.bin"  # the file beside the graph
GRAPH = "graph.onnx"
VERSION = 5  # of the graphs that this makes; higher with each change, for cached ones are made again then
_INT64 = 7  # onnx.TensorProto's number
_LEAST = 1e-9  # what is divided by is at least that: a text of which no token counts becomes zeros
_LEAST_LENGTH = 1e-12  # as in torch.nn.functional.normalize
_LOWEST = -3e38  # less than any value
_OF_FIRST = (Pooling.CLS, *OF_LAST_LAYER)  # poolings that read the first token only


class Finisher:
    """Adds what comes after the pooling: the model's own pooler and classifier, further dense layers, cutting and scaling. The few numbers are computed in float32: a matrix for a whole text costs little."""

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


class Pooler:
    """Adds poolings of `value` [batch, length, size] to a graph, in float32 whatever the layers compute in. What `pool` is 0 for does not count, nor what `mask` is 0 for. The hierarchical
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


def build(checkpoint: "Checkpoint", recipe: Recipe, device: str = "cpu") -> Graph:
    """Return the graph for a device, cpu or cuda. Its weights belong into a file `WEIGHTS` beside it.

    Raises SettingsError naming what of the recipe the checkpoint cannot do, and the rule.
    """
    dimensions = dimensions_of(checkpoint, recipe, device)
    assembly = Assembly(WEIGHTS)
    numbers = Numbers(assembly, recipe.precision, device)
    weights = checkpoint.weights()
    encoder = EncoderLayers(
        assembly, numbers, checkpoint.architecture, weights, device=device, positions=recipe.positions
    )  # fmt: skip
    layers = used_layers(checkpoint.architecture, recipe)
    values = {layer: encoder.add_layer(layer) for layer in range(max(layers))}
    # Where only the first token of one layer is read, that layer is computed for it alone; on GPUs one fused operator is faster than that.
    of_first = all(pooling in _OF_FIRST for pooling in recipe.poolings)
    first_alone = of_first and len(layers) == 1 and device == "cpu"
    values[max(layers)] = (encoder.add_layer_of_first if first_alone else encoder.add_layer)(max(layers))
    wanted = [values[layer] for layer in layers]
    value = wanted[0] if len(wanted) == 1 else assembly.add("Concat", *wanted, axis=-1)
    if not first_alone:
        value = encoder.rows.spread(value)
    if numbers.dtype != "float32":
        value = numbers.cast(value, "float32")
    finisher, pooler = Finisher(assembly, numbers, weights), Pooler(assembly, value, recipe.window)
    value = _pooled(finisher, pooler, recipe)
    value = finisher.dense(value, dense_layers(checkpoint, recipe))
    if recipe.dimensions is not None:
        value = finisher.cut(value, dimensions)
    if recipe.normalize:
        value = finisher.normalize(value)
    assembly.add("Identity", value, result="vectors")
    each = ("batch", "length") if recipe.pooling is Pooling.NONE else ("batch",)
    return assembly.finish("sentence-encoder", "vectors", (*each, dimensions))


def _pooled(finisher: Finisher, pooler: Pooler, recipe: Recipe) -> str:
    if recipe.pooling not in OF_LAST_LAYER:
        return pooler.add_all(recipe.poolings)
    if recipe.pooling is Pooling.POOLER:
        return finisher.pooler(pooler.first())
    return finisher.classifier(pooler.first(), recipe.pooling)


def write(graph: Graph, folder: Path) -> Path:
    """Write `graph` into `folder`, and return the file that a session opens. All of it is on the disk then."""
    with open(folder / WEIGHTS, "wb") as file:
        for offset, weight in graph.weights:
            file.seek(offset)
            weight.tofile(file)
        _sync(file)
    with open(folder / GRAPH, "wb") as file:
        file.write(graph.model)
        _sync(file)
    return folder / GRAPH


def told(recipe: Recipe) -> str:
    """Return a recipe as JSON."""
    plain = {name: getattr(value, "value", value) for name, value in asdict(recipe).items()}
    plain["joined"] = [pooling.value for pooling in recipe.joined]
    return json.dumps(plain, sort_keys=True)


def understood(recipe: str) -> Recipe:
    """Return the recipe of which `told` made this JSON."""
    plain: dict[str, Any] = json.loads(recipe)
    layers, pooling, precision = tuple(plain["layers"]), Pooling(plain["pooling"]), Precision(plain["precision"])
    joined = tuple(map(Pooling, plain["joined"]))
    return Recipe(**plain | {"layers": layers, "pooling": pooling, "precision": precision, "joined": joined})


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def main(directory: str, recipe: str, device: str, folder: str) -> None:
    """Make the graph of a checkpoint in a folder that is there."""
    from weir.embedding.checkpoint.reading import read_checkpoint

    write(build(read_checkpoint(Path(directory)), understood(recipe), device), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
