"""The layers of a network as parts of an ONNX graph: embeddings, attention with its positions, feed-forward layers.

The choice of operators for CPUs follows measurements (`make bench PART=graphs`). Everything but attention is computed without padding (PackedRows). Sum
and LayerNormalization are faster than onnxruntime's SkipLayerNormalization; with Add instead of Sum, onnxruntime would fuse them to just that. On GPUs
the fused operators are faster.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weir.text_models.graph import FUSED, Assembly, Numbers

if TYPE_CHECKING:
    from weir.text_models.checkpoint.families import Architecture, Distances, Rotary

Array = NDArray[Any]
PARTS = ("query", "key", "value")
_INT64 = 7  # onnx.TensorProto's number
# Added to a score that must not count. float16 has no lower number that onnxruntime's own mask could be added to.
_HIDDEN = {"float32": -1e30, "float16": -3e4}
MAX_DISTANCE = 128  # greater distances share the last bucket, as in T5


class PaddedRows:
    """The layout [batch, length, size] with padding, for GPUs: a GPU would have to wait for the number of tokens to leave out padding.

    A row is the values of one token, or of padding. `axes` are those before the size.
    """

    axes = 2

    def __init__(self, assembly: Assembly, ids: str) -> None:
        self._assembly = assembly
        self._ids = ids

    def select(self, each: str) -> str:
        """Return the value of an input [batch, length] for each row."""
        return each

    def by_position(self, table: str) -> str:
        """Return the row of `table` [positions, size] for the position of each row in its text."""
        length = self._assembly.add("Shape", self._ids, start=1, end=2)
        return self._assembly.add("Slice", table, [0], length, [0])

    def first(self, rows: str) -> str:
        """Return the first row of each text: [batch, 1, size]."""
        return self._assembly.add("Slice", rows, [0], [1], [1])

    def unpack(self, rows: str) -> str:
        """Return `rows` as [batch, length, size]."""
        return rows

    def pack(self, value: str) -> str:
        """Return `value` [batch, length, size] as rows."""
        return value

    def split(self, rows: str, count: int, size: int) -> list[str]:
        """Split `rows` [batch, length, count · size] into `count` values [batch, length, size]."""
        return self._assembly.add_several("Split", [rows, [size] * count], count, axis=-1)


class PackedRows:
    """The layout [tokens, size] without padding, one text after the other, for CPUs. There must be at least one token.

    Everything but attention treats each token by itself, so padding is not computed there. The few copies in each layer cost a CPU little.
    """

    axes = 1

    def __init__(self, assembly: Assembly, ids: str, mask: str) -> None:
        self._assembly = assembly
        found = assembly.add("NonZero", mask)
        self._cells = assembly.add("Transpose", found, perm=[1, 0])
        self._columns = assembly.add("Gather", found, 1)
        # For each cell of [batch, length] the index of its row. A cell of padding gets the row of another token, which attention masks.
        flat = assembly.add("Reshape", mask, [-1])
        number = assembly.add("Sub", assembly.add("CumSum", flat, 0), self._int(1))
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
        return self._assembly.add("Gather", rows, self._assembly.add("Slice", self._numbers, [0], [1], [1]))

    def unpack(self, rows: str) -> str:
        """Return `rows` as [batch, length, size]; padding has the values of any token."""
        return self._assembly.add("Gather", rows, self._numbers)

    def split(self, rows: str, count: int, size: int) -> list[str]:
        """Split `rows` [tokens, count · size] into `count` values [batch, length, size], each unpacked with one copy."""
        parts = self._assembly.add("Reshape", rows, [-1, size])
        if count not in self._parts:
            begin = self._assembly.add("Mul", self._numbers, self._int(count))
            self._parts[count] = [self._assembly.add("Add", begin, self._int(part)) for part in range(count)]
        return [self._assembly.add("Gather", parts, index) for index in self._parts[count]]

    def pack(self, value: str) -> str:
        """Return `value` [batch, length, size] as rows [tokens, size]."""
        return self._assembly.add("GatherND", value, self._cells)

    def _int(self, value: int) -> str:
        return self._assembly.constant(value, "int32")


class EncoderLayers:
    """Adds an encoder to a graph: the embeddings at once, then layer by layer in order.

    `value` is the output of the last part added, in the layout `rows` with the hidden size. Without `positions` no position embeddings are
    added. `device` is "cpu" or "cuda". `computed` is 1 for each token that has a value, int32 [batch, length]; "": for those that others attend to.
    `embedded` are the tokens [batch, length, hidden size] where they are no words; then none is padding.
    """

    _may_fuse = True  # whether onnxruntime's fused operators compute these layers on a GPU

    def __init__(
        self, assembly: Assembly, numbers: Numbers, architecture: "Architecture", weights: Mapping[str, Array], *,
        device: str, positions: bool, computed: str = "", embedded: str = "",
    ) -> None:  # fmt: skip
        self._assembly = assembly
        self._numbers = numbers
        self._architecture = architecture
        self._weights = weights
        self._fused = self._may_fuse and device == "cuda"
        self._positions = positions
        self._fills_up = bool(computed)  # there are tokens to which no token attends, but which have a value
        self._masks: dict[int, str] = {}
        self._seeing: dict[int, str] = {}
        self._rows_of_distances: list[str] = []
        self._turns: dict[Any, list[str]] = {}
        self._last_norm = ""
        self._ids, self._mask = (
            "" if embedded else assembly.input(name, "int32", ("batch", "length")) for name in ("ids", "mask")
        )
        self.rows = (
            PaddedRows(assembly, self._ids)
            if embedded or device == "cuda"
            else PackedRows(assembly, self._ids, computed or self._mask)
        )
        self.value = embedded or self._embed()
        self._distances = self._distance_bias() if positions and architecture.relative_buckets else ""

    def _embed(self) -> str:
        """Add the embeddings of words, positions and types. If there is only one type, its embedding is added to those of the positions."""
        architecture, weights, numbers = self._architecture, self._weights, self._numbers
        words = numbers.look_up("words", weights["embeddings.word"], self.rows.select(self._ids))
        if architecture.embedding_scale != 1.0:
            words = self._assembly.add(
                "Mul", words, self._assembly.constant(architecture.embedding_scale, numbers.dtype)
            )
        terms = [words]
        has_table = self._positions and architecture.position_table
        if has_table or architecture.type_vocab_size == 1:
            terms += self._positions_and_type(has_table)
        if architecture.type_vocab_size > 1:
            types = self.rows.select(self._assembly.input("types", "int32", ("batch", "length")))
            rows = self._assembly.weight("types-table", weights["embeddings.type"].astype(numbers.dtype))
            terms.append(self._assembly.add("Gather", rows, types))
        value = self._assembly.add("Sum", *terms) if len(terms) > 1 else words
        if architecture.distances is not None:  # DeBERTa makes the hidden size first
            value = self._project(value)
        if "embeddings.norm.weight" in weights:
            value = self._norm(value, "embeddings.norm")
        return value if architecture.distances is not None else self._project(value)

    def _project(self, value: str) -> str:
        """Return embeddings in the hidden size."""
        if not self._architecture.embedding_size:
            return value
        name = "embeddings.projection"
        self._last_norm = ""
        return self._numbers.stored_dense(value, name, self._weights, name)

    def _positions_and_type(self, has_table: bool) -> list[str]:
        """Return the embeddings of positions and of the only type for each row; nothing if they are zeros."""
        architecture, weights = self._architecture, self._weights
        size = architecture.embedding_size or architecture.hidden_size
        counted = has_table and architecture.position_offset > 0
        table = np.zeros((architecture.max_length if has_table else 1, size), dtype=np.float32)
        if has_table:
            table += weights["embeddings.position"][architecture.position_offset :][: architecture.max_length]
        if counted:  # the last row is the position embedding of padding
            table = np.concatenate([table, weights["embeddings.position"][architecture.position_offset - 1 :][:1]])
        if architecture.type_vocab_size == 1:
            table += weights["embeddings.type"][0]
        if not table.any():
            return []
        rows = self._assembly.weight("positions", table.astype(self._numbers.dtype))
        if not has_table:
            return [rows]
        return [self._counted_positions(rows) if counted else self.rows.by_position(rows)]

    def _counted_positions(self, table: str) -> str:
        """Return the row of `table` for each row's position, in the families whose positions have an offset: they do not count padding.

        Padding, also a padding token that the text contains, has the last row of the table.
        """
        assembly, architecture = self._assembly, self._architecture
        padding = assembly.add("Equal", self._ids, assembly.constant(architecture.position_offset - 1, "int32"))
        tokens = assembly.add("Cast", assembly.add("Not", padding), to=_INT64)
        positions = assembly.add("Sub", assembly.add("CumSum", tokens, 1), 1)
        positions = assembly.add("Where", padding, architecture.max_length, positions)
        return assembly.add("Gather", table, self.rows.select(positions))

    def _distance_bias(self) -> str:
        """Return the bias [1, heads, length, length] that attention adds for the distance of two tokens. All layers use it."""
        assembly, longest = self._assembly, self._architecture.max_length
        table = distance_table(self._weights["relative_bias"], longest)
        rows = assembly.add("Add", self._pairs(), longest - 1)
        found = assembly.add("Gather", assembly.weight("distances", table.astype(self._numbers.dtype)), rows)
        return assembly.add("Unsqueeze", assembly.add("Transpose", found, perm=[2, 0, 1]), [0])

    def _pairs(self) -> str:
        """Return the place of the key minus the place of the query for all pairs of tokens, int64 [length, length]."""
        add = self._assembly.add
        length = add("Squeeze", add("Shape", self._ids, start=1, end=2), [0])
        places = add("Range", 0, length, 1)
        return add("Sub", add("Unsqueeze", places, [0]), add("Unsqueeze", places, [1]))

    def add_layer(self, index: int) -> str:
        """Add the layer with this index, from 0, and return its output."""
        name = self._name(index)
        return self._finish_layer(name, self._attend(name))

    def _name(self, index: int) -> str:
        """Return the beginning of the names of a layer's weights."""
        return "layer.0." if self._architecture.shared_layers else f"layer.{index}."

    def add_layer_for_first_token(self, index: int) -> str:
        """Add the layer with this index for the first token of each text alone, and return its output [batch, 1, hidden size]. For CPUs.

        It is the last layer of a recipe that reads no other tokens.
        """
        name = self._name(index)
        return self._finish_layer(name, self._attend_from_first(name))

    def add_last_layer_both_ways(self, index: int) -> tuple[str, str]:
        """Add the layer with this index for all tokens, and for the first token of each text alone; return both outputs. No layer can follow."""
        before = self.value, self._last_norm
        whole = self.add_layer(index)
        self.value, self._last_norm = before
        return whole, self.add_layer_for_first_token(index)

    def _finish_layer(self, name: str, attended: str) -> str:
        self._add_and_normalize(attended, name + "output", name + "attention_norm")
        up, activation = name + "up", self._architecture.activation
        wide = self._numbers.stored_dense(self.value, up, self._weights, up, activation, self._input_ranges())
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
        ranges = self._input_ranges()
        key_value = self._numbers.dense(
            self.value, name + "kv", *self._concatenated(name, PARTS[1:]), "identity", ranges
        )
        key, value = self.rows.split(key_value, 2, self._architecture.hidden_size)
        self.value = self.rows.first(self.value)
        query = self._numbers.dense(self.value, name + "q", *self._concatenated(name, PARTS[:1]), "identity", ranges)
        distances = self._distances and self._assembly.add("Slice", self._distances, [0], [1], [2])
        return self._multi_head_attention(query, key, value, distances)

    def _multi_head_attention(self, query: str, key: str, value: str, distances: str, bias: str = "") -> str:
        inputs = [query, key, value, bias, self._mask, *([distances] if distances else [])]
        return self._assembly.add("MultiHeadAttention", *inputs, domain=FUSED, num_heads=self._architecture.heads)

    def _concatenated(self, name: str, parts: Sequence[str]) -> tuple[Array, Array]:
        """Return the weight and the bias of several dense layers, concatenated along the outputs. A bias that is missing is zeros."""
        weights = [self._weights[f"{name}{part}.weight"] for part in parts]
        found = [self._weights.get(f"{name}{part}.bias") for part in parts]
        biases = [
            np.zeros(len(weight), np.float32) if bias is None else bias
            for weight, bias in zip(weights, found, strict=True)
        ]
        return np.concatenate(weights), np.concatenate(biases)

    def _input_ranges(self) -> Array | None:
        """Return the greatest absolute value expected of each number of `value`, after a layer normalization: three standard deviations."""
        if not self._last_norm:
            return None
        scale, mean = (self._weights.get(f"{self._last_norm}.{part}") for part in ("weight", "bias"))
        assert scale is not None
        ranges: Array = 3 * np.abs(scale + self._architecture.norm_offset) + (0 if mean is None else np.abs(mean))
        return ranges

    def _add_and_normalize(self, value: str, dense: str, norm: str) -> None:
        """Apply a dense layer to `value`, add the residual `self.value`, and normalize the sum."""
        out, missing = self._numbers.product(
            value, dense, self._weights[f"{dense}.weight"], self._weights.get(f"{dense}.bias")
        )
        bias_left = [missing] if missing else []
        if self._fused:
            attributes: dict[str, Any] = {"domain": FUSED, "epsilon": self._architecture.epsilon}
            self.value = self._assembly.add(
                "SkipLayerNormalization", out, self.value, *self._scales(norm), *bias_left, **attributes
            )
        else:
            self.value = self._norm(self._assembly.add("Sum", out, *bias_left, self.value), norm)

    def _norm(self, value: str, name: str) -> str:
        self._last_norm = name
        kind = "SimplifiedLayerNormalization" if self._architecture.rms else "LayerNormalization"
        return self._assembly.add(kind, value, *self._scales(name), axis=-1, epsilon=self._architecture.epsilon)

    def _scales(self, name: str) -> list[str]:
        """Return the factors of a normalization, and what is added if there is anything."""
        self._last_norm = name
        scale, mean = (
            self._weights[f"{name}.weight"] + np.float32(self._architecture.norm_offset),
            self._weights.get(f"{name}.bias"),
        )
        scales = [self._numbers.vector(f"{name}.weight", scale)]
        return scales if mean is None else [*scales, self._numbers.vector(f"{name}.bias", mean)]


class GeneralLayers(EncoderLayers):
    """Adds an encoder whose layers differ from those of BERT: rotary positions, near attention, gated feed-forward layers, normalization before them,
    fewer heads of keys and values, causal attention."""

    _may_fuse = False

    def add_layer(self, index: int) -> str:
        """Add the layer with this index, from 0, and return its output."""
        name, order = self._name(index), self._architecture.order
        if order == "static":  # the embeddings are all that there is
            return self.value
        if order == "post":
            before = self.value
            self._add_and_normalize(self._attend_in(name, index), name + "output", name + "attention_norm")
            if f"{name}attention_post_norm.weight" in self._weights:  # JinaBERT for code adds its input a second time
                self.value = self._norm(self._assembly.add("Sum", before, self.value), name + "attention_post_norm")
            if index in self._architecture.mixed_layers:
                self.value = self._norm(self._assembly.add("Sum", self._feed_experts(name), self.value), name + "norm")
            else:
                self._add_and_normalize(self._feed(name), name + "down", name + "norm")
            return self.value
        self._add_part(
            name + "attention_norm", name + "output", name + "attention_post_norm", lambda: self._attend_in(name, index)
        )
        self._add_part(name + "norm", name + "down", name + "post_norm", lambda: self._feed(name))
        if self._architecture.final_norm and index == self._architecture.layers - 1:
            self.value = self._norm(self.value, "final_norm")
        return self.value

    def _add_part(self, before: str, dense: str, after: str, compute: Callable[[], str]) -> None:
        """Normalize `value`, compute, apply a dense layer, normalize where there is a norm `after`, and add the residual."""
        residual = self.value
        if f"{before}.weight" in self._weights:
            self.value = self._norm(residual, before)
        out = self._numbers.stored_dense(compute(), dense, self._weights, dense)
        if f"{after}.weight" in self._weights:
            out = self._norm(out, after)
        self.value = self._assembly.add("Sum", out, residual)

    def _feed(self, name: str) -> str:
        """Add the feed-forward layers up to the last dense layer."""
        activation, ranges = self._architecture.activation, self._input_ranges()
        if not self._architecture.gated:
            up = f"{name}up"
            return self._numbers.stored_dense(self.value, up, self._weights, up, activation, ranges)
        both = self._numbers.dense(
            self.value, name + "gate-up", *self._matrices(name, ("gate", "up")), "identity", ranges
        )
        size = self._architecture.intermediate_size
        gate, up = self._assembly.add_several("Split", [both, [size, size]], 2, axis=-1)
        return self._assembly.add("Mul", self._numbers.activate(gate, activation), up)

    def _feed_experts(self, name: str) -> str:
        """Add the mean of the experts that the router chooses for each row, weighed by their probabilities, which are not scaled to a sum of 1.

        Rows are sorted by expert, so that each expert computes those rows alone that chose it. Source: Shazeer et al. 2017, section 2.1, and the
        configuration of nomic-embed-text-v2-moe.
        """
        add, several, experts = self._assembly.add, self._assembly.add_several, self._architecture.experts
        assert experts is not None
        size, dtype = self._architecture.hidden_size, self._numbers.dtype
        rows = add("Reshape", self.value, [-1, size])
        router = self._assembly.weight(f"{name}router.weight", self._weights[f"{name}router.weight"].T)
        odds = add("Softmax", add("MatMul", self._numbers.cast(rows, "float32"), router), axis=-1)
        shares, chosen = several("TopK", [odds, [experts.used]], 2, axis=-1)
        chosen = add("Reshape", chosen, [-1])
        count = add("Shape", chosen)
        _, order = several("TopK", [chosen, count], 2, axis=0, largest=0)
        _, back = several("TopK", [order, count], 2, axis=0, largest=0)
        of_each = add("Equal", add("Unsqueeze", chosen, [1]), list(range(experts.total)))
        counts = add("ReduceSum", add("Cast", of_each, to=_INT64), [0], keepdims=0)
        taken = add("Gather", rows, add("Div", order, experts.used))
        made = self._by_expert(name, several("Split", [taken, counts], experts.total, axis=0))
        made = add("Reshape", add("Gather", made, back), [-1, experts.used, size])
        shares = add("Unsqueeze", self._numbers.cast(shares, dtype), [2])
        out = add("ReduceSum", add("Mul", made, shares), [1], keepdims=0)
        if (bias := self._weights.get(f"{name}experts.bias")) is not None:
            out = add("Add", out, self._numbers.vector(f"{name}experts.bias", bias))
        return add("Reshape", out, add("Shape", self.value))

    def _by_expert(self, name: str, parts: Sequence[str]) -> str:
        """Return the rows in `parts`, one part for each expert, after the feed-forward layers of their expert, [rows, hidden size]."""
        ranges, activation = self._input_ranges(), self._architecture.activation
        ups, downs = (
            self._weights[f"{name}experts.{part}"].reshape(len(parts), -1, self._architecture.hidden_size)
            for part in ("up", "down")
        )
        made = []
        for expert, (rows, up, down) in enumerate(zip(parts, ups, downs, strict=True)):
            own = f"{name}experts.{expert}"
            wide = self._numbers.dense(rows, f"{own}.up", up, None, activation, ranges)
            made.append(self._numbers.product(wide, f"{own}.down", down.T, None)[0])
        return self._assembly.add("Concat", *made, axis=0)

    def _matrices(self, name: str, parts: Sequence[str]) -> tuple[Array, Array | None]:
        """Return the weight and the bias of several dense layers, concatenated along the outputs; None if none has a bias."""
        weight, bias = self._concatenated(name, parts)
        return weight, bias if any(f"{name}{part}.bias" in self._weights for part in parts) else None

    def _attend_in(self, name: str, index: int) -> str:
        """Add the attention of all heads, without the dense layer after it."""
        sizes, rows = self._architecture, self.rows
        wide, narrow = sizes.heads * sizes.size_of_head, sizes.attended_heads * sizes.size_of_head
        three = self._numbers.dense(
            self.value, name + "qkv", *self._matrices(name, PARTS), "identity", self._input_ranges()
        )
        if wide == narrow and not sizes.head_norm:
            query, key, value = rows.split(three, 3, wide)
        else:
            parts = self._assembly.add_several("Split", [three, [wide, narrow, narrow]], 3, axis=-1)
            if sizes.head_norm:
                parts[:2] = (
                    self._norm_heads(parts[0], name + "query_norm"),
                    self._norm_heads(parts[1], name + "key_norm"),
                )
            query, key, value = map(rows.unpack, parts)
        query, key = self._turned(query, index), self._turned(key, index)
        key, value = self._repeated(key), self._repeated(value)
        bias = self._attention_bias(name, index, query, key)
        inputs = [query, key, value, "", self._mask, *([bias] if bias else [])]
        distances = sizes.distances
        compared = (
            1 if distances is None or not self._positions else 1 + distances.to_position + distances.from_position
        )
        scale = sizes.scale / compared**0.5
        out = self._assembly.add("MultiHeadAttention", *inputs, domain=FUSED, num_heads=sizes.heads, scale=scale)
        window = sizes.windows[index] if sizes.windows else 0
        return rows.pack(self._assembly.add("Mul", out, self._sees(window)) if window and self._fills_up else out)

    def _sees(self, window: int) -> str:
        """Return 1 for a token with a key in its window that tokens attend to, else 0: what attends to nothing gets zeros. [batch, length, 1]."""
        if window not in self._seeing:
            add, constant = self._assembly.add, self._assembly.constant
            near = add("Less", add("Abs", self._pairs()), window)
            attended = add("Unsqueeze", add("Greater", self._mask, constant(0, "int32")), [1])
            both = self._numbers.cast(add("And", near, attended), self._numbers.dtype)
            self._seeing[window] = add("ReduceMax", both, [2], keepdims=1)
        return self._seeing[window]

    def _norm_heads(self, rows: str, name: str) -> str:
        """Return `rows` with each head normalized by itself, or all of them as one where the normalization has their size."""
        kept, size = [0] * self.rows.axes, len(self._weights[f"{name}.weight"])
        apart = self._assembly.add("Reshape", rows, [*kept, -1, size])
        return self._assembly.add("Reshape", self._norm(apart, name), [*kept, -1])

    def _turned(self, value: str, index: int) -> str:
        """Return queries or keys [batch, length, heads · size] turned by their positions, if the layer has rotary positions."""
        rotary = self._architecture.rotary
        if not (rotary and self._positions):
            return value
        each = rotary[index]
        if each not in self._turns:
            tables = rotary_tables(each, self._architecture.size_of_head, self._architecture.max_length)
            names = (f"{part}-{each}" for part in ("cos", "sin"))
            self._turns[each] = [
                self._assembly.weight(name, table.astype(self._numbers.dtype))
                for name, table in zip(names, tables, strict=True)
            ]
        return self._assembly.add("RotaryEmbedding", value, [0], *self._turns[each], domain=FUSED)

    def _repeated(self, value: str) -> str:
        """Return keys or values with as many heads as queries have."""
        sizes = self._architecture
        times = sizes.heads // sizes.attended_heads
        if times == 1:
            return value
        apart = self._assembly.add("Reshape", value, [0, 0, sizes.attended_heads, 1, sizes.size_of_head])
        more = self._assembly.add("Expand", apart, [1, 1, 1, times, 1])
        return self._assembly.add("Reshape", more, [0, 0, sizes.heads * sizes.size_of_head])

    def _attention_bias(self, name: str, index: int, query: str, key: str) -> str:
        """Return what is added to the scores of all pairs of tokens, [1 or batch, 1 or heads, length, length]; "" for nothing."""
        sizes = self._architecture
        if sizes.distances is not None and self._positions:
            return self._distance_scores(name, query, key)
        if sizes.alibi and self._positions:
            return self._penalties()
        window = sizes.windows[index] if sizes.windows else 0
        return self._visible(window) if window or sizes.causal else ""

    def _visible(self, window: int) -> str:
        """Return 0 for a key that the query attends to, and a very low number for others, [1, 1, length, length]."""
        if window not in self._masks:
            add, constant, dtype = self._assembly.add, self._assembly.constant, self._numbers.dtype
            pairs = self._pairs()
            seen = add("Less", add("Abs", pairs), window or 1 << 40)
            if self._architecture.causal:
                seen = add("And", seen, add("LessOrEqual", pairs, 0))
            mask = add("Where", seen, constant(0.0, dtype), constant(_HIDDEN[dtype], dtype))
            self._masks[window] = add("Unsqueeze", mask, [0, 1])
        return self._masks[window]

    def _penalties(self) -> str:
        """Return ALiBi's penalty for each distance, [1, heads, length, length]."""
        if 0 not in self._masks:
            add = self._assembly.add
            slopes = -alibi_slopes(self._architecture.heads)[None, :, None, None].astype(self._numbers.dtype)
            far = self._numbers.cast(add("Abs", self._pairs()), self._numbers.dtype)
            self._masks[0] = add("Mul", far, self._assembly.weight("slopes", slopes))
        return self._masks[0]

    def _distance_scores(self, name: str, query: str, key: str) -> str:
        """Return DeBERTa's scores of words with distances, [batch, heads, length, length]."""
        sizes, distances = self._architecture, self._architecture.distances
        assert distances is not None
        add, constant = self._assembly.add, self._assembly.constant
        if not self._rows_of_distances:
            table = self._assembly.weight("rows-of-distances", distance_rows(distances, sizes.max_length))
            pairs, last = self._pairs(), sizes.max_length - 1
            # [query, key] for words of queries, [key, query] for words of keys: in both, the place of the query minus that of the key.
            back = [
                add("Gather", table, add("Add", add("Neg", pairs), last)),
                add("Gather", table, add("Add", pairs, last)),
            ]
            self._rows_of_distances = [add("Unsqueeze", each, [0, 1]) for each in back]
        terms = []
        if distances.to_position:
            terms.append(self._scores_of(name, query, "position_key", "key", self._rows_of_distances[0]))
        if distances.from_position:
            # The scores of keys with distances stand with a row for each key.
            rows = self._scores_of(name, key, "position_query", "query", self._rows_of_distances[1])
            terms.append(add("Transpose", rows, perm=[0, 1, 3, 2]))
        factor = constant(sizes.scale / (1 + len(terms)) ** 0.5, self._numbers.dtype)
        total = add("Sum", *terms) if len(terms) > 1 else terms[0] if terms else ""
        return add("Mul", total, factor) if total else ""

    def _scores_of(self, name: str, words: str, own: str, shared: str, rows: str) -> str:
        """Return the products of `words` [batch, length, heads · size] with the embedding of the distance to each other position."""
        sizes, distances = self._architecture, self._architecture.distances
        assert distances is not None
        add = self._assembly.add
        part = f"{name}{shared if distances.shared else own}"
        table = self._distance_embeddings() @ self._weights[f"{part}.weight"].T + self._weights[f"{part}.bias"]
        heads = table.reshape(len(table), sizes.heads, sizes.size_of_head).transpose(1, 2, 0)
        matrix = self._assembly.weight(f"{name}{own}.distances", heads.astype(self._numbers.dtype))
        apart = add("Reshape", words, [0, 0, sizes.heads, sizes.size_of_head])
        products = add("MatMul", add("Transpose", apart, perm=[0, 2, 1, 3]), matrix)
        shape = add("Shape", products, start=0, end=3)
        length = add("Shape", rows, start=3, end=4)
        return add("GatherElements", products, add("Expand", rows, add("Concat", shape, length, axis=0)), axis=3)

    def _distance_embeddings(self) -> Array:
        """Return the embeddings of distances [2 · span, hidden size], normalized if the model does so."""
        table: Array = self._weights["distances"].astype(np.float32)
        if "distances.norm.weight" in self._weights:
            centred = table - table.mean(axis=-1, keepdims=True)
            deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self._architecture.epsilon)
            table = centred / deviation * self._weights["distances.norm.weight"] + self._weights["distances.norm.bias"]
        return table


# Positions in attention: tables by distance and by position that families other than BERT have, computed once for a graph.


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


def alibi_slopes(heads: int) -> NDArray[np.float32]:
    """Return the penalty of each head for a distance of one token.

    For a power of two they are a geometric sequence that ends at 1/256; for other numbers those of the next lower power, followed by every second one of
    the next higher. Source: Press et al. 2022 (ALiBi), section 3, and the code that they published.
    """
    lower = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 / lower * np.arange(1, lower + 1))
    between = 2.0 ** (-4.0 / lower * np.arange(1, 2 * lower + 1))[::2]
    return np.concatenate([slopes, between[: heads - lower]]).astype(np.float32)


def rotary_tables(rotary: "Rotary", size: int, max_length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosine and sine [max_length, size / 2] of the angles by which each pair of numbers of a head is turned at each position.

    Source: Su et al. 2021 (RoFormer), section 3.2; NTK scaling stretches all wavelengths, the longest ones most, as the model code of GTE does. Llama 3's
    scaling follows `rope_scaling` of its config.json; between its two bounds the share of the stretched wave falls linearly.
    """
    places = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies = 1.0 / np.float32(rotary.theta * rotary.stretch) ** places / np.float32(rotary.stretch ** (2 / size))
    if rotary.scaling is not None:
        factor, low, high, length = rotary.scaling
        kept = np.clip((length / (2 * np.pi) * frequencies - low) / (high - low), 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / factor)
    angles = np.arange(max_length, dtype=np.float32)[:, None] * frequencies[None].astype(np.float32)
    return np.cos(angles), np.sin(angles)


def distance_rows(distances: "Distances", max_length: int) -> NDArray[np.int64]:
    """Return the row of DeBERTa's embeddings of distances for each distance from query to key, 1 - max_length to max_length - 1.

    Half of the buckets to each side stand for one distance each, the others for ranges that grow logarithmically up to the longest distance.
    Source: He et al. 2021 (DeBERTaV3), and its published code.
    """
    distance = np.arange(1 - max_length, max_length)
    rows = distance
    if distances.buckets:
        exact = distances.buckets // 2
        size = np.where(np.abs(distance) < exact, exact - 1, np.abs(distance)).astype(np.float32)
        grown = (
            np.log(size / np.float32(exact))
            / np.log(np.float32((distances.longest - 1) / exact))
            * np.float32(exact - 1)
        )
        bucket = np.ceil(grown).astype(np.int64) + exact
        rows = np.where(size <= exact, distance, bucket * np.sign(distance))
    return np.clip(rows + distances.span, 0, 2 * distances.span - 1)


# The tower for images: patches, the encoder's layers, and one value of each image.


_VISION_POOL = "layer.pool."  # the beginning of the names of the weights of SigLIP's pooling


class VisionLayers(GeneralLayers):
    """Adds the encoder of images to a graph: the patches of the input `pixels` at once, then all layers but the last in order, then `pooled`.

    Sources: Dosovitskiy et al. 2021 (ViT), section 3.1; Radford et al. 2021 (CLIP), section 2.4.
    """

    def __init__(
        self, assembly: Assembly, numbers: Numbers, architecture: "Architecture", weights: Mapping[str, Array], *, device: str, image_size: int,
    ) -> None:  # fmt: skip
        pixels = assembly.input("pixels", "float32", ("batch", 3, image_size, image_size))
        pixels = pixels if numbers.dtype == "float32" else numbers.cast(pixels, numbers.dtype)
        kernel = numbers.rounded("patches.weight", weights["patches.weight"])
        bias = [numbers.vector("patches.bias", weights["patches.bias"])] if "patches.bias" in weights else []
        size, side = architecture.hidden_size, architecture.patch_size
        patches = assembly.add("Conv", pixels, kernel, *bias, strides=[side, side])
        value = assembly.add("Transpose", assembly.add("Reshape", patches, [0, size, -1]), perm=[0, 2, 1])
        if "class_token" in weights:
            token = numbers.vector("class_token", weights["class_token"][None, None])
            value = assembly.add("Concat", _for_each(assembly, token, value), value, axis=1)
        value = assembly.add("Add", value, numbers.vector("positions", weights["embeddings.position"]))
        super().__init__(assembly, numbers, architecture, weights, device=device, positions=True, embedded=value)
        if "before_norm.weight" in weights:
            self.value = self._norm(value, "before_norm")

    def pooled(self) -> str:
        """Add the last layer, and return the value of each image, [batch, hidden size]: that of CLIP's first token, normalized, or SigLIP's attention pooling."""
        last = self._architecture.layers - 1
        if f"{_VISION_POOL}probe" in self._weights:
            self.add_layer(last)
            return self._attention_pooled()
        first = self._norm(self._add_for_first(self._name(last)), "final_norm")
        return self._assembly.add("Squeeze", first, [1])

    def _add_for_first(self, name: str) -> str:
        """Add the last layer for the first token of each image alone, and return its output [batch, 1, hidden size]: no other token is read."""
        residual = self.rows.first(self.value)
        self.value = self._norm(self.value, name + "attention_norm")
        attended = self._attend_from_first(name)
        out = self._numbers.stored_dense(attended, name + "output", self._weights, name + "output")
        self.value = self._assembly.add("Sum", out, residual)
        self._add_part(name + "norm", name + "down", "", lambda: self._feed(name))
        return self.value

    def _attention_pooled(self) -> str:
        """Return a layer of attention and feed-forward whose only query is a weight, the same for all images. Source: Zhai et al. 2022, section 3.1."""
        weights, size = self._weights, self._architecture.hidden_size
        own = (
            weights[f"{_VISION_POOL}probe"] @ weights[f"{_VISION_POOL}query.weight"].T
            + weights[f"{_VISION_POOL}query.bias"]
        )
        query = _for_each(self._assembly, self._numbers.vector(f"{_VISION_POOL}query", own), self.value)
        key_value = self._numbers.dense(
            self.value,
            f"{_VISION_POOL}kv",
            *self._concatenated(_VISION_POOL, PARTS[1:]),
            "identity",
            self._input_ranges(),
        )
        key, value = self.rows.split(key_value, 2, size)
        attended = self._multi_head_attention(query, key, value, "")
        self.value = self._numbers.stored_dense(attended, f"{_VISION_POOL}output", weights, f"{_VISION_POOL}output")
        self._add_part(f"{_VISION_POOL}norm", f"{_VISION_POOL}down", "", lambda: self._feed(_VISION_POOL))
        return self._assembly.add("Squeeze", self.value, [1])


def _for_each(assembly: Assembly, value: str, images: str) -> str:
    """Return `value` [1, length, size] once for each of `images` [batch, ...]."""
    batch = assembly.add("Shape", images, start=0, end=1)
    return assembly.add("Expand", value, assembly.add("Concat", batch, [1, 1], axis=0))
