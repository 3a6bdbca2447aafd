"""Build the ONNX graph of a recipe from a checkpoint's weights.

The graph ends at the highest layer that the recipe reads, and includes the pooling. Values that are the same in every run are computed here.

Inputs, all [batch, length], with padding on the right:

- `ids`, int32: token ids;
- `mask`, int32: 1 for a token, 0 for padding;
- `types`, int32, only if the model has token types: 1 for a token of the second text of a pair;
- `pool`, float32, only if the pooling weighs tokens: the weight of a token.

The output is `vectors`, float32 [batch, dimensions], or [batch, length, dimensions] for Pooling.NONE.

The choice of operators for CPUs follows measurements (`make bench PART=graphs`). Everything but attention is computed without padding (PackedRows). Sum
and LayerNormalization are faster than onnxruntime's SkipLayerNormalization; with Add instead of Sum, onnxruntime would fuse them to just that. On GPUs
the fused operators are faster.

Run as a program, this module builds one graph and writes it to files, so that the memory that this takes is returned with the process.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weir.embedding.graph.assembly import FUSED, Assembly, Graph, Numbers
from weir.embedding.recipe import OF_LAST_LAYER, Pooling, Precision, Recipe, dense_layers, dimensions_of, used_layers

if TYPE_CHECKING:
    from weir.embedding.checkpoint.config import Architecture
    from weir.embedding.checkpoint.reading import Checkpoint


Array = NDArray[Any]
PARTS = ("query", "key", "value")
_INT64 = 7  # onnx.TensorProto's number
MAX_DISTANCE = 128  # greater distances share the last bucket, as in T5


def distance_table(bias: NDArray[np.floating], max_length: int) -> NDArray[np.float32]:
    """Return the bias that each head of MPNet's attention adds for a key at distance d from its query, for all d from 1 - max_length to max_length - 1.

    The first half of the buckets is for keys before the query and at its place, the second half for keys after it. In each half, the first half of
    the buckets stands for one distance each, and the other buckets for ranges of distances that grow logarithmically. Source: Raffel et al. 2020
    (T5), section 2.1.

    Args:
        bias: [buckets, heads].
        max_length: the most tokens of a text.

    Returns:
        [2 · max_length - 1, heads]; the row d + max_length - 1 is for the distance d.
    """
    distance = np.arange(1 - max_length, max_length)
    later = len(bias) // 2
    exact = later // 2
    size = np.abs(distance).astype(np.float32)
    # In float32, as in the original, so that rounding puts distances at the edge of a bucket into the same bucket.
    grown = (
        np.log(np.maximum(size, 1) / np.float32(exact))
        / np.float32(np.log(MAX_DISTANCE / exact))
        * np.float32(later - exact)
    )
    far = np.minimum(exact + grown.astype(np.int64), later - 1)
    bucket = np.where(size < exact, np.abs(distance), far) + later * (distance > 0)
    table: NDArray[np.float32] = np.asarray(bias, dtype=np.float32)[bucket]
    return table


class PaddedRows:
    """The layout [batch, length, size] with padding, for GPUs: a GPU would have to wait for the number of tokens to leave out padding.

    A row is the values of one token, or of padding.
    """

    def __init__(self, assembly: Assembly, ids: str) -> None:
        self._assembly = assembly
        self._length = assembly.add("Shape", ids, start=1, end=2)

    def select(self, each: str) -> str:
        """Return the value of an input [batch, length] for each row."""
        return each

    def by_position(self, table: str) -> str:
        """Return the row of `table` [positions, size] for the position of each row in its text."""
        zero = self._assembly.constant([0], "int64")
        return self._assembly.add("Slice", table, zero, self._length, zero)

    def unpack(self, rows: str) -> str:
        """Return `rows` as [batch, length, size]."""
        return rows


class PackedRows:
    """The layout [tokens, size] without padding, one text after the other, for CPUs. There must be at least one token.

    Everything but attention treats each token by itself, so padding is not computed there. The few copies in each layer cost a CPU little.
    """

    def __init__(self, assembly: Assembly, ids: str, mask: str) -> None:
        self._assembly = assembly
        found = assembly.add("NonZero", mask)
        self._cells = assembly.add("Transpose", found, perm=[1, 0])
        self._columns = assembly.add("Gather", found, self._long(1))
        # For each cell of [batch, length] the index of its row. A cell of padding gets the row of another token, which attention masks.
        flat = assembly.add("Reshape", mask, self._long([-1]))
        number = assembly.add("Sub", assembly.add("CumSum", flat, self._long(0)), self._int(1))
        number = assembly.add("Max", number, self._int(0))
        self._numbers = assembly.add("Reshape", number, assembly.add("Shape", ids))
        self._parts: dict[int, list[str]] = {}

    def select(self, each: str) -> str:
        """Return the value of an input [batch, length] for each row."""
        return self._assembly.add("GatherND", each, self._cells)

    def by_position(self, table: str) -> str:
        """Return the row of `table` [positions, size] for the position of each row in its text."""
        return self._assembly.add("Gather", table, self._columns)

    def first(self, rows: str) -> str:
        """Return the first row of each text: [batch, 1, size]."""
        zero, one = self._long([0]), self._long([1])
        return self._assembly.add("Gather", rows, self._assembly.add("Slice", self._numbers, zero, one, one))

    def unpack(self, rows: str) -> str:
        """Return `rows` as [batch, length, size]; padding has the values of any token."""
        return self._assembly.add("Gather", rows, self._numbers)

    def split(self, rows: str, count: int, size: int) -> list[str]:
        """Split `rows` [tokens, count · size] into `count` values [batch, length, size], each unpacked with one copy."""
        parts = self._assembly.add("Reshape", rows, self._long([-1, size]))
        if count not in self._parts:
            begin = self._assembly.add("Mul", self._numbers, self._int(count))
            self._parts[count] = [self._assembly.add("Add", begin, self._int(part)) for part in range(count)]
        return [self._assembly.add("Gather", parts, place) for place in self._parts[count]]

    def pack(self, value: str) -> str:
        """Return `value` [batch, length, size] as rows [tokens, size]."""
        return self._assembly.add("GatherND", value, self._cells)

    def _int(self, value: int) -> str:
        return self._assembly.constant(value, "int32")

    def _long(self, value: int | list[int]) -> str:
        return self._assembly.constant(value, "int64")


class EncoderLayers:
    """Adds an encoder to a graph: the embeddings at once, then layer by layer in order.

    `value` is the output of the last part added, in the layout `rows` with the hidden size. Without `positions` no position embeddings are
    added. `device` is "cpu" or "cuda".
    """

    def __init__(
        self, assembly: Assembly, numbers: Numbers, architecture: "Architecture", weights: Mapping[str, Array], *,
        device: str, positions: bool,
    ) -> None:  # fmt: skip
        self._assembly = assembly
        self._numbers = numbers
        self._architecture = architecture
        self._weights = weights
        self._fused = device == "cuda"
        self._positions = positions
        self._ids = assembly.input("ids", "int32", ("batch", "length"))
        self._mask = assembly.input("mask", "int32", ("batch", "length"))
        self.rows = PaddedRows(assembly, self._ids) if self._fused else PackedRows(assembly, self._ids, self._mask)
        self.value = self._embed()
        self._distances = self._distance_bias() if positions and architecture.relative_buckets else ""

    def _embed(self) -> str:
        """Add the embeddings of words, positions and types. If there is only one type, its embedding is added to those of the positions."""
        architecture, weights, numbers = self._architecture, self._weights, self._numbers
        terms = [numbers.look_up("words", weights["embeddings.word"], self.rows.select(self._ids))]
        table = np.zeros((architecture.max_length, architecture.hidden_size), dtype=np.float32)
        counted = self._positions and architecture.position_offset > 0
        if self._positions:
            table += weights["embeddings.position"][architecture.position_offset :][: architecture.max_length]
        if counted:  # the last row is the position embedding of padding
            table = np.concatenate([table, weights["embeddings.position"][architecture.position_offset - 1 :][:1]])
        if architecture.type_vocab_size == 1:
            table += weights["embeddings.type"][0]
        if table.any():
            rows = self._assembly.weight("positions", table.astype(numbers.dtype))
            terms.append(self._counted_positions(rows) if counted else self.rows.by_position(rows))
        if architecture.type_vocab_size > 1:
            types = self.rows.select(self._assembly.input("types", "int32", ("batch", "length")))
            rows = self._assembly.weight("types-table", weights["embeddings.type"].astype(numbers.dtype))
            terms.append(self._assembly.add("Gather", rows, types))
        return self._norm(self._assembly.add("Sum", *terms), "embeddings.norm")

    def _counted_positions(self, table: str) -> str:
        """Return the row of `table` for each row's position, in the families whose positions have an offset: they do not count padding.

        Padding, also a padding token that the text contains, has the last row of the table.
        """
        assembly, architecture = self._assembly, self._architecture
        padding = assembly.add("Equal", self._ids, assembly.constant(architecture.position_offset - 1, "int32"))
        tokens = assembly.add("Cast", assembly.add("Not", padding), to=_INT64)
        one = assembly.constant(1, "int64")
        positions = assembly.add("Sub", assembly.add("CumSum", tokens, one), one)
        positions = assembly.add("Where", padding, assembly.constant(architecture.max_length, "int64"), positions)
        return assembly.add("Gather", table, self.rows.select(positions))

    def _distance_bias(self) -> str:
        """Return the bias [1, heads, length, length] that attention adds for the distance of two tokens. All layers use it."""
        assembly, longest = self._assembly, self._architecture.max_length
        table = distance_table(self._weights["relative_bias"], longest)
        zero, one = assembly.constant(0, "int64"), assembly.constant(1, "int64")
        first, second = assembly.constant([0], "int64"), assembly.constant([1], "int64")
        length = assembly.add("Squeeze", assembly.add("Shape", self._ids, start=1, end=2), first)
        places = assembly.add("Range", zero, length, one)
        distances = assembly.add(
            "Sub", assembly.add("Unsqueeze", places, first), assembly.add("Unsqueeze", places, second)
        )
        rows = assembly.add("Add", distances, assembly.constant(longest - 1, "int64"))
        found = assembly.add("Gather", assembly.weight("distances", table.astype(self._numbers.dtype)), rows)
        return assembly.add("Unsqueeze", assembly.add("Transpose", found, perm=[2, 0, 1]), first)

    def add_layer(self, index: int) -> str:
        """Add the layer with this index, from 0, and return its output."""
        name = f"layer.{index}."
        return self._finish_layer(name, self._attend(name))

    def add_layer_for_first_token(self, index: int) -> str:
        """Add the layer with this index for the first token of each text alone, and return its output [batch, 1, hidden size]. For CPUs.

        It is the last layer of a recipe that reads no other tokens.
        """
        name = f"layer.{index}."
        return self._finish_layer(name, self._attend_from_first(name))

    def _finish_layer(self, name: str, attended: str) -> str:
        self._add_and_normalize(attended, name + "output", name + "attention_norm")
        weight, bias = self._weights[f"{name}up.weight"], self._weights[f"{name}up.bias"]
        activation = self._architecture.activation
        wide = self._numbers.dense(self.value, name + "up", weight, bias, activation, self._input_ranges())
        self._add_and_normalize(wide, name + "down", name + "norm")
        return self.value

    def _attend(self, name: str) -> str:
        """Add the attention of all heads, without the dense layer after it. The matrices of query, key and value are multiplied as one."""
        weight, bias = self._concatenated(name, PARTS)
        if isinstance(self.rows, PackedRows):
            three, missing = self._numbers.product(self.value, name + "qkv", weight, bias, self._input_ranges())
            query, key, value = self.rows.split(three, 3, self._architecture.hidden_size)
            return self.rows.pack(self._multi_head_attention(query, key, value, self._distances, missing))
        matrix = self._numbers.matrix(name + "qkv.weight", weight)
        inputs = [self.value, matrix, self._numbers.vector(name + "qkv.bias", bias), self._mask]
        distances = ["", self._distances] if self._distances else []
        return self._assembly.add("Attention", *inputs, *distances, domain=FUSED, num_heads=self._architecture.heads)

    def _attend_from_first(self, name: str) -> str:
        """Add the attention of the first token of each text to all. From here on, `value` is [batch, 1, hidden size]: of the first tokens alone."""
        assert isinstance(self.rows, PackedRows)
        ranges = self._input_ranges()
        key_value = self._numbers.dense(
            self.value, name + "kv", *self._concatenated(name, PARTS[1:]), "identity", ranges
        )
        key, value = self.rows.split(key_value, 2, self._architecture.hidden_size)
        self.value = self.rows.first(self.value)
        query = self._numbers.dense(self.value, name + "q", *self._concatenated(name, PARTS[:1]), "identity", ranges)
        zero, one, two = (self._assembly.constant([number], "int64") for number in range(3))
        distances = self._distances and self._assembly.add("Slice", self._distances, zero, one, two)
        return self._multi_head_attention(query, key, value, distances)

    def _multi_head_attention(self, query: str, key: str, value: str, distances: str, bias: str = "") -> str:
        inputs = [query, key, value, bias, self._mask, *([distances] if distances else [])]
        return self._assembly.add("MultiHeadAttention", *inputs, domain=FUSED, num_heads=self._architecture.heads)

    def _concatenated(self, name: str, parts: Sequence[str]) -> tuple[Array, Array]:
        """Return the weight and the bias of several dense layers, concatenated along the outputs."""
        weight, bias = ([self._weights[f"{name}{part}.{kind}"] for part in parts] for kind in ("weight", "bias"))
        return np.concatenate(weight), np.concatenate(bias)

    def _input_ranges(self) -> Array:
        """Return the greatest absolute value expected of each number of `value`, after a layer normalization: three standard deviations."""
        scale, mean = (self._weights[f"{self._last_norm}.{part}"] for part in ("weight", "bias"))
        ranges: Array = np.abs(mean) + 3 * np.abs(scale)
        return ranges

    def _add_and_normalize(self, value: str, dense: str, norm: str) -> None:
        """Apply a dense layer to `value`, add the residual `self.value`, and normalize the sum."""
        weight, bias = self._weights[f"{dense}.weight"], self._weights[f"{dense}.bias"]
        out, missing = self._numbers.product(value, dense, weight, bias)
        bias_left = [missing] if missing else []
        if self._fused:
            attributes: dict[str, Any] = {"domain": FUSED, "epsilon": self._architecture.epsilon}
            self.value = self._assembly.add(
                "SkipLayerNormalization", out, self.value, *self._scales(norm), *bias_left, **attributes
            )
        else:
            self.value = self._norm(self._assembly.add("Sum", out, *bias_left, self.value), norm)

    def _norm(self, value: str, name: str) -> str:
        return self._assembly.add(
            "LayerNormalization", value, *self._scales(name), axis=-1, epsilon=self._architecture.epsilon
        )

    def _scales(self, name: str) -> list[str]:
        self._last_norm = name
        return [self._numbers.vector(f"{name}.{part}", self._weights[f"{name}.{part}"]) for part in ("weight", "bias")]


WEIGHTS = "weights.bin"  # the file beside the graph
GRAPH = "graph.onnx"
ALLOW_PICKLE = "allow-pickle"
VERSION = 5  # of the graphs that this module builds. Raise it with each change of a graph, so that cached graphs are built again
_LEAST = 1e-9  # the least divisor of a mean, so that a text without any counted token becomes zeros
_LEAST_LENGTH = 1e-12  # the least divisor in normalization, as in torch.nn.functional.normalize
_LOWEST = -3e38  # less than any value
_OF_FIRST = (Pooling.CLS, *OF_LAST_LAYER)  # poolings that read the first token only


class OutputLayers:
    """Adds the layers after the pooling: the model's pooler or classifier, dense layers, cutting and normalization.

    They compute in float32 in every precision, as they have one row for a whole text.
    """

    def __init__(self, assembly: Assembly, numbers: Numbers, weights: Mapping[str, Array]) -> None:
        self._assembly = assembly
        self._numbers = numbers
        self._weights = weights

    def pooler(self, first: str) -> str:
        """Return the output of the model's pooler for the first tokens, both [batch, hidden size]."""
        return self._model_layer(first, "pooler", "tanh")

    def classifier(self, first: str, pooling: Pooling) -> str:
        """Return the probability of each label, for Pooling.REGRESSION the sigmoid of each output, or for LOGITS the outputs, [batch, labels].

        They are computed from the first tokens.

        The classifier follows the pooler (BERT), a dense layer with ReLU (DistilBERT), or a dense layer with tanh (RoBERTa, MPNet).
        """
        if "classifier.out_proj.weight" in self._weights:
            out = self._model_layer(self._model_layer(first, "classifier.dense", "tanh"), "classifier.out_proj")
        elif "pre_classifier.weight" in self._weights:
            out = self._model_layer(self._model_layer(first, "pre_classifier", "relu"), "classifier")
        else:
            out = self._model_layer(self.pooler(first), "classifier")
        if pooling is Pooling.LOGITS:
            return out
        if pooling is Pooling.REGRESSION:
            return self._assembly.add("Sigmoid", out)
        return self._assembly.add("Softmax", out, axis=-1)

    def dense(self, value: str, layers: Sequence[Any]) -> str:
        """Return `value` after dense layers in order, see checkpoint.reading.Dense."""
        for place, layer in enumerate(layers):
            value = self._layer(value, f"dense.{place}", layer.weight, layer.bias, layer.activation)
        return value

    def cut(self, value: str, dimensions: int) -> str:
        """Return the first `dimensions` numbers of each vector."""
        zero, end, last = (self._assembly.constant([number], "int64") for number in (0, dimensions, -1))
        return self._assembly.add("Slice", value, zero, end, last)

    def normalize(self, value: str) -> str:
        """Return the vectors scaled to length 1; a vector of zeros stays zeros."""
        length = self._assembly.add("ReduceL2", value, self._assembly.constant([-1], "int64"), keepdims=1)
        return self._assembly.add(
            "Div", value, self._assembly.add("Max", length, self._assembly.constant(_LEAST_LENGTH, "float32"))
        )

    def _model_layer(self, value: str, name: str, activation: str = "identity") -> str:
        return self._layer(value, name, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], activation)

    def _layer(self, value: str, name: str, weight: Array, bias: Array | None, activation: str) -> str:
        out = self._assembly.add("MatMul", value, self._assembly.weight(f"{name}.weight", weight.T.astype("float32")))
        if bias is not None:
            out = self._assembly.add("Add", out, self._assembly.weight(f"{name}.bias", bias.astype("float32")))
        return self._numbers.activate(out, activation)


class PoolingLayers:
    """Adds poolings of `value`, float32 [batch, length, size]. Tokens with the weight 0 in the input `pool` are left out.

    The hierarchical pooling takes means over `window` tokens.
    """

    def __init__(self, assembly: Assembly, value: str, window: int) -> None:
        self._assembly = assembly
        self._value = value
        self._window = window
        self._weights = ""

    def add_all(self, poolings: Sequence[Pooling]) -> str:
        """Return the results of all these poolings, concatenated in each vector."""
        pooled = [self.add(pooling) for pooling in poolings]
        return pooled[0] if len(pooled) == 1 else self._assembly.add("Concat", *pooled, axis=-1)

    def add(self, pooling: Pooling) -> str:
        """Return the result of one pooling: [batch, size], [batch, 2 · size] for MEAN_MAX, or [batch, length, size] for NONE."""
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
        """Return the value of each text's first token, [batch, size]."""
        return self._assembly.add("Gather", self._value, self._assembly.constant(0, "int64"), axis=1)

    def _last(self) -> str:
        """Return the value of each text's last token, [batch, size]."""
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
        """Return the maximum, number by number, of the means over each window of consecutive tokens.

        A window counts if it is full, or if it holds all tokens of a text that is shorter than a window.
        """
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
        """Return the mean of `value` over the window that begins at each place, with zeros after the end: [batch, length, size]."""
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
        """Return 1, 2, 3 ... for the tokens that count, [batch, length]."""
        return self._assembly.add("CumSum", weights, self._assembly.constant(1, "int64"))


def build(checkpoint: "Checkpoint", recipe: Recipe, device: str = "cpu") -> Graph:
    """Return the graph of `recipe` for a device, "cpu" or "cuda". Its large weights belong into a file called WEIGHTS beside it.

    Raises SettingsError naming the part of the recipe that the checkpoint cannot do, and the rule.
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
    # If only the first token of one layer is read, a CPU computes that layer for the first token alone; on a GPU the fused operator is faster.
    of_first = all(pooling in _OF_FIRST for pooling in recipe.poolings)
    first_alone = of_first and len(layers) == 1 and device == "cpu"
    values[max(layers)] = (encoder.add_layer_for_first_token if first_alone else encoder.add_layer)(max(layers))
    read = [values[layer] for layer in layers]
    value = read[0] if len(read) == 1 else assembly.add("Concat", *read, axis=-1)
    if not first_alone:
        value = encoder.rows.unpack(value)
    if numbers.dtype != "float32":
        value = numbers.cast(value, "float32")
    finisher, pooler = OutputLayers(assembly, numbers, weights), PoolingLayers(assembly, value, recipe.window)
    value = _pooled(finisher, pooler, recipe)
    value = finisher.dense(value, dense_layers(checkpoint, recipe))
    if recipe.dimensions is not None:
        value = finisher.cut(value, dimensions)
    if recipe.normalize:
        value = finisher.normalize(value)
    assembly.add("Identity", value, result="vectors")
    each = ("batch", "length") if recipe.pooling is Pooling.NONE else ("batch",)
    return assembly.finish("sentence-encoder", "vectors", (*each, dimensions))


def _pooled(finisher: OutputLayers, pooler: PoolingLayers, recipe: Recipe) -> str:
    if recipe.pooling not in OF_LAST_LAYER:
        return pooler.add_all(recipe.poolings)
    if recipe.pooling is Pooling.POOLER:
        return finisher.pooler(pooler.first())
    return finisher.classifier(pooler.first(), recipe.pooling)


def write(graph: Graph, folder: Path) -> Path:
    """Write `graph` into `folder`, wait until it is on the disk, and return the path that onnxruntime opens. Raises OSError."""
    with open(folder / WEIGHTS, "wb") as file:
        for offset, weight in graph.weights:
            file.seek(offset)
            weight.tofile(file)
        _sync(file)
    with open(folder / GRAPH, "wb") as file:
        file.write(graph.model)
        _sync(file)
    return folder / GRAPH


def recipe_as_json(recipe: Recipe) -> str:
    """Return a recipe as JSON. Equal recipes have equal JSON."""
    plain = {name: getattr(value, "value", value) for name, value in asdict(recipe).items()}
    plain["joined"] = [pooling.value for pooling in recipe.joined]
    return json.dumps(plain, sort_keys=True)


def recipe_from_json(recipe: str) -> Recipe:
    """Return the recipe whose JSON `recipe_as_json` returned."""
    plain: dict[str, Any] = json.loads(recipe)
    layers, pooling, precision = tuple(plain["layers"]), Pooling(plain["pooling"]), Precision(plain["precision"])
    joined = tuple(map(Pooling, plain["joined"]))
    return Recipe(**plain | {"layers": layers, "pooling": pooling, "precision": precision, "joined": joined})


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def main(directory: str, recipe: str, device: str, folder: str, weights: str = "") -> None:
    """Build the graph of the checkpoint in `directory`, for a recipe as JSON and a device, and write it into `folder`, which must exist.

    `weights` is ALLOW_PICKLE to read pickled weights too.
    """
    from weir.embedding.checkpoint.reading import read_checkpoint

    checkpoint = read_checkpoint(Path(directory), allow_pickle=weights == ALLOW_PICKLE)
    write(build(checkpoint, recipe_from_json(recipe), device), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
