"""Build the ONNX graph of a BERT sentence encoder from its weights.

The graph is token ids in, unit vectors out: embeddings, the encoder's layers, mean over the real tokens, normalisation.
It holds no weights: they are handed to the session beside it, so that 90 MB are neither written nor copied. Attention,
BiasGelu and SkipLayerNormalization are onnxruntime's own fused operators, for CPU and CUDA alike.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

Array = NDArray[Any]
FUSED = "com.microsoft"


class Graph(NamedTuple):
    """A serialised model, and the weights it names."""

    model: bytes
    weights: dict[str, Array]


def build(tensors: Mapping[str, Array], *, heads: int, epsilon: float) -> Graph:
    """Return the graph for the weights `tensors`, named as in a BertModel.

    Inputs `ids` and `mask` (1 for a real token) are int64 and int32 of shape [batch, length]; the output `vectors` is float32
    of shape [batch, hidden size].
    """
    builder = _Builder(tensors, heads, epsilon)
    builder.embed()
    layer = 0
    while f"encoder.layer.{layer}.output.dense.weight" in tensors:
        builder.encode(f"encoder.layer.{layer}.")
        layer += 1
    builder.pool()
    return Graph(builder.model().SerializeToString(), builder.weights)


class _Builder:
    def __init__(self, tensors: Mapping[str, Array], heads: int, epsilon: float) -> None:
        self.tensors = tensors
        self.heads = heads
        self.epsilon = epsilon
        self.hidden = tensors["embeddings.LayerNorm.weight"].shape[0]
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.weights: dict[str, Array] = {}
        self.at = ""  # the value that the next operator reads

    def embed(self) -> None:
        """Add word, position and type embeddings. There is one sentence, so the type is always the first."""
        positions = self.tensors["embeddings.position_embeddings.weight"]
        types = self.tensors["embeddings.token_type_embeddings.weight"]
        words = self._weight("words", self.tensors["embeddings.word_embeddings.weight"])
        table = self._weight("positions", positions + types[0])
        self._constant("zero", [0])
        self._constant("one", [1])
        shape = self._add("Shape", "ids")
        length = self._add("Gather", shape, self._constant("second", [1]))
        here = self._add("Slice", table, "zero", length, "zero")
        known = self._add("Add", self._add("Gather", words, "ids"), here)
        self.at = self._add("LayerNormalization", known, *self._norm("embeddings."), axis=-1, epsilon=self.epsilon)

    def encode(self, layer: str) -> None:
        """Add one layer: attention, then the feed-forward part, each added to what it got and normalised."""
        parts = [f"{layer}attention.self.{part}." for part in ("query", "key", "value")]
        weight = self._weight(layer + "qkv", np.concatenate([self.tensors[part + "weight"] for part in parts]).T)
        bias = self._weight(layer + "qkv.bias", np.concatenate([self.tensors[part + "bias"] for part in parts]))
        seen = self._add("Attention", self.at, weight, bias, "mask", domain=FUSED, num_heads=self.heads)
        self._join(seen, layer + "attention.output.")
        wide = self._add("MatMul", self.at, self._dense(layer + "intermediate.dense."))
        bent = self._add("BiasGelu", wide, self._bias(layer + "intermediate.dense."), domain=FUSED)
        self._join(bent, layer + "output.")

    def pool(self) -> None:
        """Add the mean over the real tokens, scaled to length 1. The length's own scale cancels, so it is a plain sum."""
        real = self._add("Unsqueeze", self._add("Cast", "mask", to=TensorProto.FLOAT), self._constant("last", [-1]))
        total = self._add("ReduceSum", self._add("Mul", self.at, real), "one", keepdims=0)
        self._add("LpNormalization", total, axis=-1, p=2, result="vectors")

    def model(self) -> Any:
        graph = helper.make_graph(
            self.nodes,
            "sentence-encoder",
            [
                helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"]),
                helper.make_tensor_value_info("mask", TensorProto.INT32, ["batch", "length"]),
            ],
            [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["batch", self.hidden])],
            self.constants,
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(FUSED, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)

    def _join(self, value: str, name: str) -> None:
        """Multiply, add the bias and what came before, normalise."""
        out = self._add("MatMul", value, self._dense(name + "dense."))
        norm, bias = self._norm(name), self._bias(name + "dense.")
        self.at = self._add("SkipLayerNormalization", out, self.at, *norm, bias, domain=FUSED, epsilon=self.epsilon)

    def _norm(self, name: str) -> tuple[str, str]:
        gamma, beta = (self.tensors[f"{name}LayerNorm.{part}"] for part in ("weight", "bias"))
        return self._weight(name + "gamma", gamma), self._weight(name + "beta", beta)

    def _dense(self, name: str) -> str:
        return self._weight(name + "weight", self.tensors[name + "weight"].T)

    def _bias(self, name: str) -> str:
        return self._weight(name + "bias", self.tensors[name + "bias"])

    def _weight(self, name: str, value: Array) -> str:
        """Name a weight that the session gets beside the graph."""
        self.weights[name] = np.ascontiguousarray(value, dtype=np.float32)
        declared = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=value.shape)
        declared.data_location = TensorProto.EXTERNAL
        declared.external_data.add(key="location", value="beside the graph")
        self.constants.append(declared)
        return name

    def _constant(self, name: str, values: list[int]) -> str:
        self.constants.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
        return name

    def _add(self, operator: str, *inputs: str, result: str = "", domain: str = "", **attributes: Any) -> str:
        name = result or f"{operator}-{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], name=name, domain=domain, **attributes))
        return name
