"""JinaBERT v2 in plain numpy, text by text, as its paper and its configuration describe it: no library that the tests could ask has it. And what other
layers are compared with.

Nothing here is taken from the package but the reading of safetensors: weights are looked up by the names that checkpoints have.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[Any]


def gelu(value: Array) -> Array:
    """Return the Gaussian error linear unit."""
    found: Array = value * (1 + np.vectorize(math.erf)(value / math.sqrt(2))) / 2
    return found


def tanh_gelu(value: Array) -> Array:
    """Return its approximation by tanh."""
    found: Array = value * (1 + np.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3))) / 2
    return found


def silu(value: Array) -> Array:
    """Return the sigmoid linear unit."""
    found: Array = value / (1 + np.exp(-value))
    return found


class Network:
    """A checkpoint's weights in double precision, and the layers that they make."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self.weights: dict[str, Array] = {name: value.astype(np.float64) for name, value in stored.items()}

    def linear(self, value: Array, name: str) -> Array:
        """Apply a dense layer, with its bias if there is one."""
        return value @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def layer_norm(self, value: Array, name: str, epsilon: float) -> Array:
        """Normalize by mean and deviation."""
        centred = value - value.mean(axis=-1, keepdims=True)
        scaled: Array = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
        return scaled * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0.0)

    def added(self, value: Array, found: Array, dense: str, norm: str) -> Array:
        """Add what a dense layer makes of `found`, and normalize."""
        return self.layer_norm(value + self.linear(found, dense), norm, self.config["layer_norm_eps"])

    def attended(self, value: Array, at: str, bias: Array) -> Array:
        """Return attention of [tokens, size]; `bias` is added to the scores, [heads, tokens, tokens]."""
        heads = len(bias)
        query, key, held = (
            self.linear(value, at + name).reshape(len(value), heads, -1).transpose(1, 0, 2)
            for name in ("query", "key", "value")
        )
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1]) + bias
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found: Array = powers / powers.sum(axis=-1, keepdims=True) @ held
        return found.transpose(1, 0, 2).reshape(len(value), -1)

    def jina(self, ids: Array, types: Array) -> Array:
        """Return the vector of each token."""
        words, kinds = (self.weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "token_type"))
        value = self.layer_norm(words[ids] + kinds[types], "embeddings.LayerNorm", self.config["layer_norm_eps"])
        heads = self.config["num_attention_heads"]
        slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)  # for a power of two
        bias = -slopes[:, None, None] * np.abs(np.arange(len(ids))[:, None] - np.arange(len(ids)))
        for layer in range(self.config["num_hidden_layers"]):
            at = f"encoder.layer.{layer}."
            found = self.attended(value, at + "attention.self.", bias)
            value = self.added(value, found, at + "attention.output.dense", at + "attention.output.LayerNorm")
            gate, up = np.split(self.linear(value, at + "mlp.gated_layers"), 2, axis=-1)
            value = self.added(value, gelu(gate) * up, at + "mlp.wo", at + "mlp.layernorm")
        return value
