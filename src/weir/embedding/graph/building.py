"""Build the ONNX graph of a recipe from a checkpoint's weights.

It goes up to the highest layer that the recipe asks for, pools within, and holds nothing that a run need compute again. Inputs, all [batch, length]:
`ids` int32; `mask` int32, 1 for a token; `types` int32, only if the model tells a second text from the first; `pool` float32, how much a token
counts, only if the pooling weighs tokens. Texts are filled up from the right. Output: `vectors` float32, [batch, dimensions], or [batch, length, dimensions] for Pooling.NONE.

Which operators are used was measured on CPUs (`make bench PART=graphs`): there all but attention is computed of tokens alone (Packed), and Sum and
LayerNormalization are faster than onnxruntime's SkipLayerNormalization. Sum, not Add, for onnxruntime fuses Add with what follows into just that. On GPUs
the fused forms are the fast ones.

Run as a program, this module makes a graph and its weights in a process of its own, whose memory goes with it.
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
FARTHEST = 128  # distances from here on share the last bucket, as in T5


def distance_table(bias: NDArray[np.floating], max_length: int) -> NDArray[np.float32]:
    """Return what each head of MPNet's attention adds for a key at the distance d from its query, in the row d + max_length - 1.

    `bias` is [buckets, heads]; the answer is [2 · max_length - 1, heads]. Source: Raffel et al. 2020 (T5), section 2.1, in both
    directions: half of the buckets are for keys that come later; half of each half are for one distance each, the rest grow with the logarithm.
    """
    distance = np.arange(1 - max_length, max_length)
    later = len(bias) // 2
    exact = later // 2
    size = np.abs(distance).astype(np.float32)
    # In float32, as in the original: what falls on the edge of a bucket must fall on the same side.
    grown = (
        np.log(np.maximum(size, 1) / np.float32(exact))
        / np.float32(np.log(FARTHEST / exact))
        * np.float32(later - exact)
    )
    far = np.minimum(exact + grown.astype(np.int64), later - 1)
    bucket = np.where(size < exact, np.abs(distance), far) + later * (distance > 0)
    table: NDArray[np.float32] = np.asarray(bias, dtype=np.float32)[bucket]
    return table


class Rectangle:
    """Computes all rows, padding among them: [batch, length, size]. A GPU would have to wait until it is known how many tokens there are."""

    def __init__(self, assembly: Assembly, ids: str) -> None:
        self._assembly = assembly
        self._length = assembly.add("Shape", ids, start=1, end=2)

    def pick(self, each: str) -> str:
        """Return what an input [batch, length] has for each row."""
        return each

    def places(self, table: str) -> str:
        """Return what a table has for each row's place in its text."""
        zero = self._assembly.constant([0], "int64")
        return self._assembly.add("Slice", table, zero, self._length, zero)

    def spread(self, rows: str) -> str:
        """Return rows as [batch, length, size]."""
        return rows


class Packed:
    """Computes the rows of tokens alone, one text's after the other's: [tokens, size]. There must be at least one token.

    In all but attention a token is computed by itself, so that texts of unlike lengths cost no more than like ones. It takes a few copies in each
    layer, which a CPU hardly notices.
    """

    def __init__(self, assembly: Assembly, ids: str, mask: str) -> None:
        self._assembly = assembly
        found = assembly.add("NonZero", mask)
        self._cells = assembly.add("Transpose", found, perm=[1, 0])
        self._columns = assembly.add("Gather", found, self._long(1))
        # Where in the rectangle there is no token, any will do: nobody looks at it.
        flat = assembly.add("Reshape", mask, self._long([-1]))
        number = assembly.add("Sub", assembly.add("CumSum", flat, self._long(0)), self._int(1))
        number = assembly.add("Max", number, self._int(0))
        self._numbers = assembly.add("Reshape", number, assembly.add("Shape", ids))
        self._parts: dict[int, list[str]] = {}

    def pick(self, each: str) -> str:
        """Return what an input [batch, length] has for each row."""
        return self._assembly.add("GatherND", each, self._cells)

    def places(self, table: str) -> str:
        """Return what a table has for each row's place in its text."""
        return self._assembly.add("Gather", table, self._columns)

    def first(self, rows: str) -> str:
        """Return the first row of each text: [batch, 1, size]."""
        zero, one = self._long([0]), self._long([1])
        return self._assembly.add("Gather", rows, self._assembly.add("Slice", self._numbers, zero, one, one))

    def spread(self, rows: str) -> str:
        """Return rows as [batch, length, size]; where there is no token stands that of another."""
        return self._assembly.add("Gather", rows, self._numbers)

    def split(self, rows: str, count: int, size: int) -> list[str]:
        """Return `count` parts of each row, each of `size` numbers, spread. Each is copied once."""
        parts = self._assembly.add("Reshape", rows, self._long([-1, size]))
        if count not in self._parts:
            begin = self._assembly.add("Mul", self._numbers, self._int(count))
            self._parts[count] = [self._assembly.add("Add", begin, self._int(part)) for part in range(count)]
        return [self._assembly.add("Gather", parts, place) for place in self._parts[count]]

    def pack(self, value: str) -> str:
        """Return [batch, length, size] as rows again."""
        return self._assembly.add("GatherND", value, self._cells)

    def _int(self, value: int) -> str:
        return self._assembly.constant(value, "int32")

    def _long(self, value: int | list[int]) -> str:
        return self._assembly.constant(value, "int64")


class EncoderLayers:
    """Adds an encoder to a graph, layer by layer: `value` is what the last one left, the rows of `rows` by hidden size."""

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
        self.rows = Rectangle(assembly, self._ids) if self._fused else Packed(assembly, self._ids, self._mask)
        self.value = self._embed()
        self._distances = self._distance_bias() if positions and architecture.relative_buckets else ""

    def _embed(self) -> str:
        """Add the embeddings of words, positions and types. Where all tokens are of one type, that is in the positions already."""
        architecture, weights, numbers = self._architecture, self._weights, self._numbers
        terms = [numbers.look_up("words", weights["embeddings.word"], self.rows.pick(self._ids))]
        table = np.zeros((architecture.max_length, architecture.hidden_size), dtype=np.float32)
        counted = self._positions and architecture.position_offset > 0
        if self._positions:
            table += weights["embeddings.position"][architecture.position_offset :][: architecture.max_length]
        if counted:  # behind all others, that of tokens that have no place
            table = np.concatenate([table, weights["embeddings.position"][architecture.position_offset - 1 :][:1]])
        if architecture.type_vocab_size == 1:
            table += weights["embeddings.type"][0]
        if table.any():
            rows = self._assembly.weight("positions", table.astype(numbers.dtype))
            terms.append(self._counted_places(rows) if counted else self.rows.places(rows))
        if architecture.type_vocab_size > 1:
            types = self.rows.pick(self._assembly.input("types", "int32", ("batch", "length")))
            rows = self._assembly.weight("types-table", weights["embeddings.type"].astype(numbers.dtype))
            terms.append(self._assembly.add("Gather", rows, types))
        return self._norm(self._assembly.add("Sum", *terms), "embeddings.norm")

    def _counted_places(self, table: str) -> str:
        """Return what a table has for each row's place, where padding is not counted: it has the last row of the table, wherever it stands,
        and so has a text's own token for padding. The families whose positions have an offset count so."""
        assembly, architecture = self._assembly, self._architecture
        padding = assembly.add("Equal", self._ids, assembly.constant(architecture.position_offset - 1, "int32"))
        tokens = assembly.add("Cast", assembly.add("Not", padding), to=_INT64)
        one = assembly.constant(1, "int64")
        places = assembly.add("Sub", assembly.add("CumSum", tokens, one), one)
        places = assembly.add("Where", padding, assembly.constant(architecture.max_length, "int64"), places)
        return assembly.add("Gather", table, self.rows.pick(places))

    def _distance_bias(self) -> str:
        """Return what attention adds for the distance of two tokens, [1, heads, length, length]; it is the same in all layers."""
        assembly, longest = self._assembly, self._architecture.max_length
        table = distance_table(self._weights["relative_bias"], longest)
        zero, one = assembly.constant(0, "int64"), assembly.constant(1, "int64")
        first, second = assembly.constant([0], "int64"), assembly.constant([1], "int64")
        length = assembly.add("Squeeze", assembly.add("Shape", self._ids, start=1, end=2), first)
        places = assembly.add("Range", zero, length, one)
        apart = assembly.add("Sub", assembly.add("Unsqueeze", places, first), assembly.add("Unsqueeze", places, second))
        rows = assembly.add("Add", apart, assembly.constant(longest - 1, "int64"))
        found = assembly.add("Gather", assembly.weight("distances", table.astype(self._numbers.dtype)), rows)
        return assembly.add("Unsqueeze", assembly.add("Transpose", found, perm=[2, 0, 1]), first)

    def add_layer(self, index: int) -> str:
        """Add the layer of this number, from 0, and return its result."""
        name = f"layer.{index}."
        return self._finish_layer(name, self._attend(name))

    def add_layer_of_first(self, index: int) -> str:
        """Add the layer of this number, on a CPU, for the first token alone: nobody reads the others of the last layer. [batch, 1, hidden size]"""
        name = f"layer.{index}."
        return self._finish_layer(name, self._attend_from_first(name))

    def _finish_layer(self, name: str, seen: str) -> str:
        self._join(seen, name + "output", name + "attention_norm")
        wide = self._widen(name + "up")
        self._join(wide, name + "down", name + "norm")
        return self.value

    def _attend(self, name: str) -> str:
        """Add the attention of all heads, without the layer that mixes them. The three matrices are one."""
        weight, bias = self._joined(name, PARTS)
        if isinstance(self.rows, Packed):
            three, missing = self._numbers.product(self.value, name + "qkv", weight, bias, self._reach())
            query, key, value = self.rows.split(three, 3, self._architecture.hidden_size)
            return self.rows.pack(self._heads(query, key, value, self._distances, missing))
        matrix = self._numbers.matrix(name + "qkv.weight", weight)
        inputs = [self.value, matrix, self._numbers.vector(name + "qkv.bias", bias), self._mask]
        distances = ["", self._distances] if self._distances else []
        return self._assembly.add("Attention", *inputs, *distances, domain=FUSED, num_heads=self._architecture.heads)

    def _attend_from_first(self, name: str) -> str:
        """Add the attention of the first token to all; `value` is the first token's from here on, [batch, 1, hidden size]."""
        assert isinstance(self.rows, Packed)
        reach = self._reach()
        both = self._numbers.dense(self.value, name + "kv", *self._joined(name, PARTS[1:]), "identity", reach)
        key, value = self.rows.split(both, 2, self._architecture.hidden_size)
        self.value = self.rows.first(self.value)
        query = self._numbers.dense(self.value, name + "q", *self._joined(name, PARTS[:1]), "identity", reach)
        zero, one, two = (self._assembly.constant([number], "int64") for number in range(3))
        distances = self._distances and self._assembly.add("Slice", self._distances, zero, one, two)
        return self._heads(query, key, value, distances)

    def _heads(self, query: str, key: str, value: str, distances: str, bias: str = "") -> str:
        inputs = [query, key, value, bias, self._mask, *([distances] if distances else [])]
        return self._assembly.add("MultiHeadAttention", *inputs, domain=FUSED, num_heads=self._architecture.heads)

    def _joined(self, name: str, parts: Sequence[str]) -> tuple[Array, Array]:
        """Return the weight and the bias of several dense layers as one."""
        weight, bias = ([self._weights[f"{name}{part}.{kind}"] for part in parts] for kind in ("weight", "bias"))
        return np.concatenate(weight), np.concatenate(bias)

    def _widen(self, name: str) -> str:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return self._numbers.dense(self.value, name, weight, bias, self._architecture.activation, self._reach())

    def _reach(self) -> Array:
        """Return how far each number of `value` goes, which has just been normalised: three deviations."""
        scale, middle = (self._weights[f"{self._last_norm}.{part}"] for part in ("weight", "bias"))
        reach: Array = np.abs(middle) + 3 * np.abs(scale)
        return reach

    def _join(self, value: str, dense: str, norm: str) -> None:
        """Multiply, add the bias and what came before, normalise."""
        weight, bias = self._weights[f"{dense}.weight"], self._weights[f"{dense}.bias"]
        out, missing = self._numbers.product(value, dense, weight, bias)
        missing_too = [missing] if missing else []
        if self._fused:
            attributes: dict[str, Any] = {"domain": FUSED, "epsilon": self._architecture.epsilon}
            self.value = self._assembly.add(
                "SkipLayerNormalization", out, self.value, *self._scales(norm), *missing_too, **attributes
            )
        else:
            self.value = self._norm(self._assembly.add("Sum", out, *missing_too, self.value), norm)

    def _norm(self, value: str, name: str) -> str:
        return self._assembly.add(
            "LayerNormalization", value, *self._scales(name), axis=-1, epsilon=self._architecture.epsilon
        )

    def _scales(self, name: str) -> list[str]:
        self._last_norm = name
        return [self._numbers.vector(f"{name}.{part}", self._weights[f"{name}.{part}"]) for part in ("weight", "bias")]


WEIGHTS = "weights.bin"  # the file beside the graph
GRAPH = "graph.onnx"
VERSION = 5  # of the graphs that this makes; higher with each change, for cached ones are made again then
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


def recipe_as_json(recipe: Recipe) -> str:
    """Return a recipe as JSON."""
    plain = {name: getattr(value, "value", value) for name, value in asdict(recipe).items()}
    plain["joined"] = [pooling.value for pooling in recipe.joined]
    return json.dumps(plain, sort_keys=True)


def understood(recipe: str) -> Recipe:
    """Return the recipe of which `recipe_as_json` made this JSON."""
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
