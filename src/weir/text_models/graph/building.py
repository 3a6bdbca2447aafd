"""Build the ONNX graph of a recipe from a checkpoint's weights.

The graph ends at the highest layer that the recipe reads, and includes the pooling. Values that are the same in every run are computed here.

Inputs, all [batch, length], with padding on the right:

- `ids`, int32: token ids;
- `mask`, int32: 1 for a token, 0 for padding;
- `types`, int32, only if the model has token types: 1 for a token of the second text of a pair;
- `pool`, float32, only if the pooling weighs tokens: the weight of a token.

The output is `vectors`, float32 [batch, dimensions], or [batch, length, dimensions] for the poolings OF_TOKENS; for SPARSE [batch, words of the vocabulary], or the
weight of each token [batch, length, 1]. Each further pooling of the recipe is an output of its own, called by its name; that called `none` is not zero for
padding. Where they would make `vectors` slower, because only the first token of the last layer is computed for it, they are in a second graph, WHOLE.

The graph of a recipe of images has one input, `pixels`, float32 [batch, 3, height, width], and the same output.

Run as a program, this module builds one graph and writes it to files, so that the memory that this takes is returned with the process.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from numpy.typing import NDArray

from weir.text_models import OF_LAST_LAYER, OF_TOKENS, WITH_HEAD, Pooling, Recipe
from weir.text_models.graph import Assembly, Graph, Numbers, Output
from weir.text_models.graph.layers import EncoderLayers, GeneralLayers, VisionLayers
from weir.text_models.recipe import dense_layers, dimensions_of, quantizes, used_layers

if TYPE_CHECKING:
    from weir.text_models.checkpoint.heads import Dense, TokenHead, WordHead
    from weir.text_models.checkpoint.reading import Checkpoint


Array = NDArray[Any]
_FLOAT, _INT32, _INT64 = 1, 6, 7  # onnx.TensorProto's numbers

WEIGHTS = "weights.bin"  # the file next to the graph
GRAPH = "graph.onnx"
WHOLE = "whole.onnx"  # a second graph with the same weights, which makes all outputs; only where GRAPH does not
VECTORS = "vectors"
ALLOW_PICKLE = "allow-pickle"
VERSION = 11  # of the graphs that this module builds. Raise it with each change of a graph, so that cached graphs are built again
_NAME = "sentence-encoder"
_LEAST = 1e-9  # the least divisor of a mean, so that a text without any counted token becomes zeros
_LEAST_LENGTH = 1e-12  # the least divisor in normalization, as in torch.nn.functional.normalize
_LOWEST = -3e38  # less than any value
_OF_FIRST = (Pooling.CLS, *OF_LAST_LAYER)  # poolings that read the first token only, in networks like BERT


# The dense layer that belongs to the classifier, and its activation.
_OWN_LAYERS = {
    "roberta": ("classifier.dense", "tanh"),
    "xlm-roberta": ("classifier.dense", "tanh"),
    "mpnet": ("classifier.dense", "tanh"),
    "electra": ("classifier.dense", "gelu"),
    "deberta-v2": ("pooler.dense", "gelu"),
    "distilbert": ("pre_classifier", "relu"),
    "modernbert": ("head.dense", "gelu"),
    "eurobert": ("dense", "gelu"),
}
_ON_POOLER = ("bert", "albert", "nomic-bert", "nomic-plain", "gte", "jina-bert", "jina-code")
_CLASSIFIERS = {
    **dict.fromkeys(("roberta", "xlm-roberta", "mpnet", "electra"), "classifier.out_proj"),
    **dict.fromkeys(("qwen2", "qwen3", "gemma3", "llama", "mistral"), "score"),
}


class OutputLayers:
    """Adds the layers after the pooling: the model's pooler or classifier, dense layers, cutting and normalization.

    They compute in float32 in every precision, as they have one row for a whole text.
    """

    def __init__(self, assembly: Assembly, numbers: Numbers, weights: Mapping[str, Array], epsilon: float) -> None:
        self._assembly = assembly
        self._numbers = numbers
        self._weights = weights
        self._epsilon = epsilon

    def pooler(self, first: str) -> str:
        """Return the output of the model's pooler for the first tokens, both [batch, hidden size]."""
        return self._model_layer(first, "pooler", "tanh")

    def projected(self, read: str) -> str:
        """Return vectors [batch, hidden size] in the space that texts and images share; SigLIP's images are in it."""
        return self._model_layer(read, "projection") if "projection.weight" in self._weights else read

    def own_layer(self, read: str, family: str) -> str:
        """Return the output of the dense layer that belongs to the classifier, if there is one."""
        return self._model_layer(read, *_OWN_LAYERS[family]) if family in _OWN_LAYERS else read

    def classifier(self, read: str, pooling: Pooling, family: str, *, own: bool = True) -> str:
        """Return the probability of each label, for Pooling.REGRESSION the sigmoid of each output, or for LOGITS the outputs, [batch, labels].

        `read` is the value of the tokens that the classifier reads, [batch, hidden size].

        The classifier follows the pooler (BERT), a dense layer of its own with tanh (RoBERTa, MPNet), gelu (ELECTRA, DeBERTa) or ReLU (DistilBERT), a dense
        layer, gelu and a normalization (ModernBERT), or nothing (decoders, and where `own` is False, as that layer has been added).
        """
        out = self.own_layer(read, family) if own else read
        if family == "modernbert":
            out = self._norm_by(out, "head.norm", self._weights, "head.norm")
        elif family in _ON_POOLER:
            out = self.pooler(read)
        out = self._model_layer(out, _CLASSIFIERS.get(family, "classifier"))
        if pooling is Pooling.LOGITS:
            return out
        if pooling is Pooling.REGRESSION:
            return self._assembly.add("Sigmoid", out)
        return self._assembly.add("Softmax", out, axis=-1)

    def _norm_by(self, value: str, name: str, weights: Mapping[str, Array], stored: str) -> str:
        """Return `value` after a layer normalization with the weights called `stored`."""
        scales = [
            self._assembly.weight(f"{name}.{part}", weights[f"{stored}.{part}"].astype("float32"))
            for part in ("weight", "bias")
            if f"{stored}.{part}" in weights
        ]
        return self._assembly.add("LayerNormalization", value, *scales, axis=-1, epsilon=self._epsilon)

    def words(self, rows: str, head: "WordHead") -> str:
        """Return the language model's number for each word of the vocabulary, of each row: [rows, words]."""
        weights = head.weights
        out = self._numbers.stored_dense(rows, "words.dense", weights, "dense", head.activation)
        out = self._norm_by(out, "words.norm", weights, "norm")
        return self._numbers.stored_dense(out, "words.decoder", weights, "decoder")

    def on_tokens(self, rows: str, head: "TokenHead", name: str = "tokens") -> str:
        """Return a dense layer of each row, [rows, out], whose weights have names that begin with `name`."""
        if head.before is not None:
            rows = self._numbers.stored_dense(rows, f"{name}.dense", head.before, "dense", "gelu")
            rows = self._norm_by(rows, f"{name}.norm", head.before, "norm")
        return self.dense(rows, head.layers, name)

    def dense(self, value: str, layers: "Sequence[Dense]", name: str = "dense") -> str:
        """Return `value` after dense layers in order, whose weights have names that begin with `name`."""
        for index, layer in enumerate(layers):
            own = f"{name}.{index}"
            out = self._layer(value, own, layer.weight, layer.bias, layer.activation)
            if layer.residual is not None:
                added = self._layer(value, f"{own}.residual", layer.residual, None, "identity")
                out = self._assembly.add("Add", out, added)
            value = out
        return value

    def cut(self, value: str, dimensions: int) -> str:
        """Return the first `dimensions` numbers of each vector."""
        return self._assembly.add("Slice", value, [0], [dimensions], [-1])

    def finished(self, value: str, recipe: Recipe, dimensions: int) -> str:
        """Return the vectors with that many `dimensions`, normalized, if the recipe states that."""
        value = value if recipe.dimensions is None else self.cut(value, dimensions)
        return self.normalize(value) if recipe.normalize else value

    def normalize(self, value: str) -> str:
        """Return the vectors scaled to length 1; a vector of zeros stays zeros."""
        length = self._assembly.add("ReduceL2", value, [-1], keepdims=1)
        return self._assembly.add("Div", value, self._assembly.add("Max", length, _LEAST_LENGTH))

    def _model_layer(self, value: str, name: str, activation: str = "identity") -> str:
        return self._layer(value, name, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"), activation)

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
        self.value = value
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
            return self._assembly.add("Mul", self.value, self._column(weights))
        if pooling is Pooling.MAX:
            return self._highest(weights)
        if pooling is Pooling.MEAN_MAX:
            return self._assembly.add("Concat", self._mean(weights), self._highest(weights), axis=-1)
        if pooling is Pooling.HIERARCHICAL:
            return self._hierarchical(weights)
        if pooling is Pooling.WEIGHTED_MEAN:
            numbers = self._assembly.add("CumSum", weights, 1)  # 1, 2, 3 ... for the tokens that count
            return self._mean(self._assembly.add("Mul", weights, numbers))
        return self._mean(weights, root=pooling is Pooling.MEAN_SQRT)

    def counted(self) -> str:
        """Return the value of each token that counts, and zeros for others: [batch, length, size]."""
        return self.add(Pooling.NONE)

    def terms(self, head: "WordHead") -> str:
        """Return the weight of each word of the vocabulary, [batch, words], of the numbers for each token: SPLADE.

        It is the largest, or the sum over the tokens, of log(1 + number), 0 for numbers below 0. Source: Formal et al. 2021, equations 1 and 6.
        """
        add = self._assembly.add
        if not head.sums:  # the logarithm of the largest is the largest logarithm
            self._weights = self._weights or self._assembly.input("pool", "float32", ("batch", "length"))
            self.value = self._highest(self._weights)
        value = add("Relu", self.value)
        for _ in range(1 + head.twice):
            value = add("Log", add("Add", value, 1.0))
        if not head.sums:
            return value
        self.value = value
        return add("ReduceSum", self.counted(), [1], keepdims=0)

    def mean_of(self, value: str) -> str:
        """Return the mean of another value [batch, length, size] over the tokens of each text."""
        return self._mean(self._assembly.add("Cast", "mask", to=_FLOAT), value=value)

    def first(self) -> str:
        """Return the value of each text's first token, [batch, size]."""
        return self._assembly.add("Gather", self.value, 0, axis=1)

    def _last(self) -> str:
        """Return the value of each text's last token, [batch, size]."""
        count = self._assembly.add("ReduceSum", self._assembly.add("Cast", "mask", to=_INT64), [1], keepdims=1)
        index = self._assembly.add("Sub", count, [1])
        return self._assembly.add("GatherND", self.value, index, batch_dims=1)

    def last_but(self, passed_over: int) -> str:
        """Return the value of each text's last token other than `passed_over`, [batch, size]; of a text of nothing else that of its first."""
        add = self._assembly.add
        mask = add("Cast", "mask", to=_INT64)
        other = add("Not", add("Equal", "ids", self._assembly.constant(passed_over, "int32")))
        counted = add(
            "Mul",
            add("CumSum", mask, 1),
            add("Mul", mask, add("Cast", other, to=_INT64)),
        )
        last = add("Max", add("ReduceMax", counted, [1], keepdims=1), [1])
        return add("GatherND", self.value, add("Sub", last, [1]), batch_dims=1)

    def at_end(self, end_id: int) -> str:
        """Return the value of each text's first token `end_id`, of its first token without one; -1: of its first token with the highest id. [batch, size]."""
        add = self._assembly.add
        ids = add("Mul", "ids", "mask") if end_id < 0 else add("Equal", "ids", self._assembly.constant(end_id, "int32"))
        index = add("ArgMax", add("Cast", ids, to=_FLOAT), axis=1, keepdims=1)
        return add("GatherND", self.value, index, batch_dims=1)

    def _mean(self, weights: str, root: bool = False, value: str = "") -> str:
        row = self._assembly.add("Unsqueeze", weights, [1])
        total = self._assembly.add("Squeeze", self._assembly.add("MatMul", row, value or self.value), [1])
        count = self._assembly.add("ReduceSum", weights, [1], keepdims=1)
        count = self._assembly.add("Max", count, _LEAST)
        return self._assembly.add("Div", total, self._assembly.add("Sqrt", count) if root else count)

    def _hierarchical(self, weights: str) -> str:
        """Return the maximum, number by number, of the means over each window of consecutive tokens.

        A window counts if it is full, or if it holds all tokens of a text that is shorter than a window.
        """
        column = self._column(weights)
        sums = self._in_windows(self._assembly.add("Mul", self.value, column))
        counts = self._in_windows(column)
        means = self._assembly.add("Div", sums, self._assembly.add("Max", counts, _LEAST))
        total = self._assembly.add("ReduceSum", column, [1], keepdims=1)
        full = float(self._window)
        share = self._assembly.add("Div", self._assembly.add("Min", total, full), full)
        enough = self._assembly.add("Sub", share, 0.5 / self._window)
        wanted = self._assembly.add("Greater", counts, self._assembly.add("Max", enough, _LEAST))
        return self._highest_of(means, wanted)

    def _in_windows(self, value: str) -> str:
        """Return the mean of `value` over the window that begins at each position, with zeros after the end: [batch, length, size]."""
        image = self._assembly.add("Unsqueeze", value, [1])
        pooled = self._assembly.add(
            "AveragePool", image, kernel_shape=[self._window, 1], pads=[0, 0, self._window - 1, 0], count_include_pad=1
        )
        return self._assembly.add("Squeeze", pooled, [1])

    def _highest(self, weights: str) -> str:
        counts = self._assembly.add("Greater", self._column(weights), 0.0)
        return self._highest_of(self.value, counts)

    def _highest_of(self, value: str, counts: str) -> str:
        seen = self._assembly.add("Where", counts, value, _LOWEST)
        highest = self._assembly.add("ReduceMax", seen, [1], keepdims=0)
        any_counts = self._assembly.add("Greater", highest, _LOWEST)
        return self._assembly.add("Where", any_counts, highest, 0.0)

    def _column(self, weights: str) -> str:
        return self._assembly.add("Unsqueeze", weights, [-1])


def build(checkpoint: "Checkpoint", recipe: Recipe, device: str = "cpu") -> Graph:
    """Return the graph of `recipe` for a device, "cpu" or "cuda". Its large weights belong into a file called WEIGHTS next to it.

    Raises SettingsError naming the part of the recipe that the checkpoint cannot do, and the rule.
    """
    dimensions = dimensions_of(checkpoint, recipe, device)
    assembly = Assembly(WEIGHTS)
    numbers = Numbers(assembly, recipe.precision, device)
    if recipe.images:
        return _build_vision(assembly, numbers, checkpoint, recipe, device, dimensions)
    weights = checkpoint.weights()
    kind = EncoderLayers if checkpoint.architecture.like_bert else GeneralLayers
    encoder = kind(
        assembly,
        numbers,
        checkpoint.architecture,
        weights,
        device=device,
        positions=recipe.positions,
        computed=_computed(assembly, checkpoint, recipe),
    )
    finisher = OutputLayers(assembly, numbers, weights, checkpoint.architecture.epsilon)
    layers = used_layers(checkpoint.architecture, recipe)
    values = {layer: encoder.add_layer(layer) for layer in range(max(layers))}
    parts = _Parts(assembly, numbers, encoder, finisher, checkpoint, recipe)
    # If only the first token of one layer is read, a CPU computes that layer for the first token alone; on a GPU the fused operator is faster.
    of_first = all(pooling in _OF_FIRST for pooling in recipe.poolings) and recipe.pooling not in WITH_HEAD
    first_alone = of_first and len(layers) == 1 and device == "cpu" and checkpoint.architecture.like_bert
    if not (first_alone and set(recipe.further) <= {Pooling.NONE}):
        return assembly.finish(_NAME, parts.outputs(parts.read(values, layers), dimensions))
    whole, first = encoder.add_last_layer_both_ways(max(layers))
    vectors = {VECTORS: parts.vectors(parts.single(first), dimensions, first_alone=True)}
    return assembly.finish(_NAME, vectors, parts.outputs(parts.single(whole), dimensions) if recipe.further else None)


def _build_vision(
    assembly: Assembly, numbers: Numbers, checkpoint: "Checkpoint", recipe: Recipe, device: str, dimensions: int
) -> Graph:
    assert checkpoint.vision is not None
    tower, weights = checkpoint.vision, checkpoint.vision_weights()
    encoder = VisionLayers(assembly, numbers, tower.architecture, weights, device=device, image_size=tower.image_size)
    for layer in range(tower.architecture.layers - 1):
        encoder.add_layer(layer)
    value = encoder.pooled()
    value = value if numbers.dtype == "float32" else numbers.cast(value, "float32")
    finisher = OutputLayers(assembly, numbers, weights, tower.architecture.epsilon)
    value = finisher.finished(finisher.projected(value), recipe, dimensions)
    return assembly.finish(_NAME, {VECTORS: Output(value, ("batch", dimensions))})


def _computed(assembly: Assembly, checkpoint: "Checkpoint", recipe: Recipe) -> str:
    """Return which tokens are computed; "" for those that others attend to. Tokens that fill up a query of late interaction have vectors, too."""
    late = checkpoint.layout.late
    if recipe.pooling is not Pooling.TOKENS or late is None or not late.expands_to or late.attends:
        return ""
    pool = assembly.input("pool", "float32", ("batch", "length"))
    return assembly.add("Cast", assembly.add("Greater", pool, 0.0), to=_INT32)


class _Parts(NamedTuple):
    """Adds the outputs of a recipe to a graph whose layers are there."""

    assembly: Assembly
    numbers: Numbers
    encoder: EncoderLayers
    finisher: OutputLayers
    checkpoint: "Checkpoint"
    recipe: Recipe

    def read(self, values: dict[int, str], layers: Sequence[int]) -> str:
        """Add the highest of `layers`, and return what the recipe reads of them all; `values` are the outputs of those below it."""
        values[max(layers)] = self.encoder.add_layer(max(layers))
        read = [values[layer] for layer in layers]
        return self.single(read[0] if len(read) == 1 else self.assembly.add("Concat", *read, axis=-1))

    def single(self, value: str) -> str:
        """Return the output of a layer in float32."""
        return value if self.numbers.dtype == "float32" else self.numbers.cast(value, "float32")

    def outputs(self, rows: str, dimensions: int) -> dict[str, Output]:
        """Return all outputs by name, given the value of all tokens."""
        found = {VECTORS: self.vectors(rows, dimensions)}
        for pooling in self.recipe.further:
            if pooling is Pooling.NONE:
                size = self.checkpoint.architecture.hidden_size * len(self.recipe.layers)
                found[pooling.value] = Output(self.encoder.rows.unpack(rows), ("batch", "length", size))
            else:
                found[pooling.value] = self._of_head(rows, replace(self.recipe, pooling=pooling, dimensions=None))
        return found

    def vectors(self, rows: str, dimensions: int, *, first_alone: bool = False) -> Output:
        """Return the recipe's own output, given the value of all tokens, or of the first ones alone."""
        recipe, finisher = self.recipe, self.finisher
        if recipe.pooling in WITH_HEAD:
            return self._of_head(rows, recipe)
        value = rows if first_alone else self.encoder.rows.unpack(rows)
        value = self._pooled(PoolingLayers(self.assembly, value, recipe.window))
        value = finisher.dense(value, dense_layers(self.checkpoint, recipe))
        if quantizes(self.checkpoint, recipe):
            value = self.assembly.add("Round", self.assembly.add("Mul", self.assembly.add("Tanh", value), 127.0))
        value = finisher.finished(value, recipe, dimensions)
        return Output(value, (*(("batch", "length") if recipe.pooling in OF_TOKENS else ("batch",)), dimensions))

    def _of_head(self, rows: str, recipe: Recipe) -> Output:
        """Return what a head makes of the network's output: [batch, words] for SPLADE, a number for yes or no, else [batch, length, size]."""
        assembly, finisher, unpack = self.assembly, self.finisher, self.encoder.rows.unpack
        heads, pooling = self.checkpoint.heads, recipe.pooling
        if pooling is Pooling.YES_NO:
            last = PoolingLayers(assembly, unpack(rows), recipe.window).add(Pooling.SEP)
            return Output(finisher.on_tokens(last, self.checkpoint.answers), ("batch", 1))
        if pooling is Pooling.SPARSE and heads.weights is None:
            assert heads.words is not None
            numbers = PoolingLayers(assembly, unpack(finisher.words(rows, heads.words)), recipe.window)
            return Output(numbers.terms(heads.words), ("batch", self.checkpoint.architecture.vocab_size))
        head = {Pooling.SPARSE: heads.weights, Pooling.TOKENS: heads.tokens, Pooling.TOKEN_LOGITS: heads.labels}[
            pooling
        ]
        assert head is not None
        value, size = finisher.on_tokens(rows, head, pooling.value), len(head.weight)
        if pooling is Pooling.SPARSE:
            value = assembly.add("Relu", value)
        if pooling is Pooling.TOKENS:
            size = recipe.dimensions or size
            value = finisher.normalize(finisher.cut(value, size))
        counted = PoolingLayers(assembly, unpack(value), recipe.window).counted()
        return Output(counted, ("batch", "length", size))

    def _pooled(self, pooler: PoolingLayers) -> str:
        """Return the result of the recipe's poolings, or of the model's own pooler or classifier."""
        recipe, finisher, architecture = self.recipe, self.finisher, self.checkpoint.architecture
        if recipe.pooling not in OF_LAST_LAYER:
            return pooler.add_all(recipe.poolings)
        if recipe.pooling is Pooling.POOLER:
            return finisher.pooler(pooler.first())
        if recipe.pooling is Pooling.PROJECTION:
            clip = architecture.family == "clip"
            return finisher.projected(pooler.at_end(architecture.end_id) if clip else pooler.add(Pooling.SEP))
        family = architecture.family
        # The layer after the dense one is linear, so the mean of its outputs is that of the mean.
        if architecture.classifier_reads is Pooling.NONE:
            read = pooler.mean_of(finisher.own_layer(pooler.value, family))
            return finisher.classifier(read, recipe.pooling, family, own=False)
        passed_over = architecture.passed_over
        read = pooler.add(architecture.classifier_reads) if passed_over < 0 else pooler.last_but(passed_over)
        return finisher.classifier(read, recipe.pooling, family)


def write(graph: Graph, folder: Path) -> Path:
    """Write `graph` into `folder`, wait until it is on the disk, and return the path that onnxruntime opens. Raises OSError."""
    with open(folder / WEIGHTS, "wb") as file:
        for offset, weight in graph.weights:
            file.seek(offset)
            weight.tofile(file)
        _sync(file)
    for name, model in ((WHOLE, graph.whole), (GRAPH, graph.model)):
        if model is not None:
            with open(folder / name, "wb") as file:
                file.write(model)
                _sync(file)
    return folder / GRAPH


def recipe_as_json(recipe: Recipe) -> str:
    """Return a recipe as JSON. Equal recipes have equal JSON."""
    return json.dumps(msgspec.to_builtins(recipe), sort_keys=True)


def recipe_from_json(recipe: str) -> Recipe:
    """Return the recipe whose JSON `recipe_as_json` returned."""
    return msgspec.json.decode(recipe, type=Recipe)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def main(directory: str, recipe: str, device: str, folder: str, weights: str = "", router: str = "") -> None:
    """Build the graph of the checkpoint in `directory`, for a recipe as JSON and a device, and write it into `folder`, which must exist.

    `weights` is ALLOW_PICKLE to read pickled weights too, and `router` the route of a Router, "" for its default.
    """
    from weir.text_models.checkpoint.reading import read_checkpoint

    checkpoint = read_checkpoint(Path(directory), allow_pickle=weights == ALLOW_PICKLE, router=router or None)
    write(build(checkpoint, recipe_from_json(recipe), device), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
