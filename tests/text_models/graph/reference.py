"""JinaBERT v2 and NomicBERT with experts in plain numpy, text by text, as papers and configurations describe them: no library that the tests could ask has
them. And what other layers are compared with.

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


def softmax(scores: Array) -> Array:
    """Return probabilities over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: Array = powers / powers.sum(axis=-1, keepdims=True)
    return found


def turned(value: Array, heads: int, base: float) -> Array:
    """Return queries or keys [tokens, size] turned by rotary positions: number i of a head with number i + half (Su et al. 2021, section 3.2)."""
    first, second = np.split(value.reshape(len(value), heads, -1), 2, axis=-1)
    half = first.shape[-1]
    angles = np.arange(len(value))[:, None, None] * base ** (-np.arange(half) / half)
    pairs = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    return np.concatenate(pairs, axis=-1).reshape(len(value), -1)


class Network:
    """A checkpoint's weights in double precision, and the layers that they make."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        names = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps")
        self.epsilon = next((self.config[name] for name in names if name in self.config), 1e-12)
        self.weights: dict[str, Array] = {name: value.astype(np.float64) for name, value in stored.items()}

    def linear(self, value: Array, name: str) -> Array:
        """Apply a dense layer, with its bias if there is one."""
        return value @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def layer_norm(self, value: Array, name: str) -> Array:
        """Normalize by mean and deviation."""
        centred = value - value.mean(axis=-1, keepdims=True)
        scaled: Array = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.epsilon)
        return scaled * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0.0)

    def added(self, value: Array, found: Array, dense: str, norm: str) -> Array:
        """Add what a dense layer makes of `found`, and normalize."""
        return self.layer_norm(value + self.linear(found, dense), norm)

    def attended(self, query: Array, key: Array, held: Array, bias: Array) -> Array:
        """Return attention of [tokens, size]; `bias` is added to the scores, [heads, tokens, tokens]."""
        query, key, held = (each.reshape(len(each), len(bias), -1).transpose(1, 0, 2) for each in (query, key, held))
        found = softmax(query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1]) + bias) @ held
        return found.transpose(1, 0, 2).reshape(found.shape[1], -1)

    def jina(self, ids: Array, types: Array) -> Array:
        """Return the vector of each token. The one for code normalizes queries and keys, and adds the input of attention once more."""
        words, kinds = (self.weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "token_type"))
        value = self.layer_norm(words[ids] + kinds[types], "embeddings.LayerNorm")
        code = "encoder.layer.0.layer_norm_1.weight" in self.weights
        heads = self.config["num_attention_heads"]
        slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)  # for a power of two
        bias = -slopes[:, None, None] * np.abs(np.arange(len(ids))[:, None] - np.arange(len(ids)))
        for layer in range(self.config["num_hidden_layers"]):
            at = f"encoder.layer.{layer}."
            own = at + "attention.self."
            query, key, held = (self.linear(value, own + name) for name in ("query", "key", "value"))
            if code:
                query, key = self.layer_norm(query, own + "layer_norm_q"), self.layer_norm(key, own + "layer_norm_k")
            found, before = self.attended(query, key, held, bias), value
            value = self.added(value, found, at + "attention.output.dense", at + "attention.output.LayerNorm")
            if code:
                value = self.layer_norm(before + value, at + "layer_norm_1")
                up, gate = np.split(self.linear(value, at + "mlp.up_gated_layer"), 2, axis=-1)
                value = self.added(value, gelu(gate) * up, at + "mlp.down_layer", at + "layer_norm_2")
            else:
                gate, up = np.split(self.linear(value, at + "mlp.gated_layers"), 2, axis=-1)
                value = self.added(value, gelu(gate) * up, at + "mlp.wo", at + "mlp.layernorm")
        return value

    def nomic(self, ids: Array, types: Array) -> Array:
        """Return the vector of each token; all are of the only type."""
        words, kinds = (self.weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "token_type"))
        value, heads = self.layer_norm(words[ids] + kinds[0], "emb_ln"), self.config["n_head"]
        for layer in range(self.config["n_layer"]):
            at = f"encoder.layers.{layer}."
            *pair, held = np.split(self.linear(value, at + "attn.Wqkv"), 3, axis=-1)
            query, key = (turned(each, heads, self.config["rotary_emb_base"]) for each in pair)
            found = self.attended(query, key, held, np.zeros((heads, len(ids), len(ids))))
            value = self.added(value, found, at + "attn.out_proj", at + "norm1")
            if layer % self.config["moe_every_n_layers"] == 1:
                value = self.layer_norm(value + self.mixed(value, at + "mlp."), at + "norm2")
            else:
                value = self.added(value, gelu(self.linear(value, at + "mlp.fc1")), at + "mlp.fc2", at + "norm2")
        return value

    def mixed(self, value: Array, at: str) -> Array:
        """Return what the likeliest experts of each token make of it, weighed by their probabilities."""
        count, used = self.config["num_experts"], self.config["moe_top_k"]
        ups, downs = (np.split(self.weights[f"{at}experts.mlp.{name}"], count) for name in ("w1", "w2"))
        found = np.zeros_like(value) + self.weights[f"{at}experts.bias"]
        for token, odds in enumerate(softmax(self.linear(value, at + "router.layer"))):
            for expert in np.argsort(-odds)[:used]:
                found[token] += odds[expert] * (gelu(value[token] @ ups[expert].T) @ downs[expert])
        return found
