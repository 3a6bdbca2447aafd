"""Networks in plain numpy, text by text, as the papers and the configurations describe them: what graphs are compared with where there is no torch.

Nothing here is taken from the package but the reading of safetensors: weights are looked up by the names that checkpoints have.
"""

import json
import math
from collections.abc import Callable
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
    """Return the softmax over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    found: Array = powers / powers.sum(axis=-1, keepdims=True)
    return found


def rotated(value: Array, inverse: Array) -> Array:
    """Turn the halves of each head [heads, tokens, size] by position times the inverse wavelengths."""
    angles = np.arange(value.shape[1])[:, None] * inverse[None]
    first, second = np.split(value, 2, axis=-1)
    cosines, sines = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


def wavelengths(theta: float, size: int) -> Array:
    """Return the inverse wavelengths of rotary positions."""
    found: Array = 1.0 / theta ** (np.arange(0, size, 2) / size)
    return found


class Network:
    """A checkpoint as a function from token ids to the vectors of its tokens in the last layer."""

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

    def rms_norm(self, value: Array, name: str, offset: float = 0.0) -> Array:
        """Normalize by the root of the mean square."""
        scaled: Array = value / np.sqrt((value**2).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        scaled = scaled * (self.weights[f"{name}.weight"] + offset)
        return scaled

    def tokens(self, ids: Array, types: Array) -> Array:
        """Return the vector of each token."""
        kind = self.config["model_type"]
        if self.config.get("position_embedding_type") == "alibi":
            return self.jina(ids, types)
        names = {"deberta-v2": "deberta", "nomic_bert": "nomic", "new": "gte"}
        own = kind if kind in ("electra", "albert", "modernbert") else names.get(kind, "decoder")
        compute: Callable[[Array, Array], Array] = getattr(self, own)
        return compute(ids, types)

    def embedded(self, ids: Array, types: Array, *, positions: bool, norm: str = "embeddings.LayerNorm") -> Array:
        """Return the sum of the embeddings, normalized."""
        value = self.weights["embeddings.word_embeddings.weight"][ids]
        if positions:
            value = value + self.weights["embeddings.position_embeddings.weight"][: len(ids)]
        if kinds := self.config.get("type_vocab_size", 2):
            value = value + self.weights["embeddings.token_type_embeddings.weight"][np.minimum(types, kinds - 1)]
        return self.layer_norm(value, norm, self.epsilon)

    @property
    def epsilon(self) -> float:
        return float(self.config.get("layer_norm_eps", self.config.get("layer_norm_epsilon", 1e-12)))

    @property
    def heads(self) -> int:
        return int(self.config.get("num_attention_heads") or self.config["n_head"])

    @property
    def layers(self) -> int:
        return int(self.config.get("num_hidden_layers") or self.config["n_layer"])

    def divided(self, value: Array, heads: int) -> Array:
        """Return [heads, tokens, size]."""
        return value.reshape(len(value), heads, -1).transpose(1, 0, 2)

    def attended(self, query: Array, key: Array, value: Array, bias: Array | float = 0.0, scale: float = 0.0) -> Array:
        """Return attention of [heads, tokens, size] as [tokens, heads · size]. Heads of keys and values are repeated."""
        times = len(query) // len(key)
        key, value = np.repeat(key, times, axis=0), np.repeat(value, times, axis=0)
        scores = query @ key.transpose(0, 2, 1) * (scale or 1 / math.sqrt(query.shape[-1])) + bias
        found: Array = softmax(scores) @ value
        return found.transpose(1, 0, 2).reshape(found.shape[1], -1)

    def added(self, value: Array, found: Array, dense: str, norm: str) -> Array:
        """Add what a dense layer makes of `found`, and normalize."""
        return self.layer_norm(value + self.linear(found, dense), norm, self.epsilon)

    def parts(self, value: Array, name: str) -> list[Array]:
        """Return the queries, keys and values that one matrix makes."""
        return [self.divided(part, self.heads) for part in np.split(self.linear(value, name), 3, axis=-1)]

    def bert_layer(self, value: Array, found: Array, at: str) -> Array:
        """Return what comes after attention in BERT's layers."""
        value = self.added(value, found, at + "attention.output.dense", at + "attention.output.LayerNorm")
        return self.added(
            value, gelu(self.linear(value, at + "intermediate.dense")), at + "output.dense", at + "output.LayerNorm"
        )

    def bert_attention(self, value: Array, at: str, bias: Array | float = 0.0) -> Array:
        query, key, held = (
            self.divided(self.linear(value, at + name), self.heads) for name in ("query", "key", "value")
        )
        return self.attended(query, key, held, bias)

    def electra(self, ids: Array, types: Array) -> Array:
        value = self.linear(self.embedded(ids, types, positions=True), "embeddings_project")
        for layer in range(self.layers):
            at = f"encoder.layer.{layer}."
            found = self.bert_attention(value, at + "attention.self.")
            value = self.bert_layer(value, found, at)
        return value

    def albert(self, ids: Array, types: Array) -> Array:
        value = self.linear(self.embedded(ids, types, positions=True), "encoder.embedding_hidden_mapping_in")
        at = "encoder.albert_layer_groups.0.albert_layers.0."
        for _ in range(self.layers):
            found = self.bert_attention(value, at + "attention.")
            value = self.added(value, found, at + "attention.dense", at + "attention.LayerNorm")
            wide = tanh_gelu(self.linear(value, at + "ffn"))
            value = self.added(value, wide, at + "ffn_output", at + "full_layer_layer_norm")
        return value

    def bucket(self, distance: int) -> int:
        """Return DeBERTa's bucket of a distance."""
        buckets = self.config.get("position_buckets", -1)
        half = buckets // 2
        if buckets < 1 or abs(distance) <= half:
            return distance
        longest = self.config.get("max_relative_positions", -1)
        longest = self.config["max_position_embeddings"] if longest < 1 else longest
        grown = math.ceil(math.log(abs(distance) / half) / math.log((longest - 1) / half) * (half - 1)) + half
        return int(math.copysign(grown, distance))

    def deberta(self, ids: Array, types: Array) -> Array:
        config, count = self.config, len(ids)
        value = self.embedded(ids, types, positions=config.get("position_biased_input", True))
        span = config.get("position_buckets") or config["max_relative_positions"]
        table = self.weights["encoder.rel_embeddings.weight"]
        if config.get("norm_rel_ebd") == "layer_norm":
            table = self.layer_norm(table, "encoder.LayerNorm", self.epsilon)
        buckets = [[self.bucket(i - j) for j in range(count)] for i in range(count)]
        rows = np.clip(np.array(buckets) + span, 0, 2 * span - 1)
        shared = config.get("share_att_key", False)
        for layer in range(self.layers):
            at = f"encoder.layer.{layer}."
            names = ["query_proj", "key_proj", "value_proj"]
            inner = [self.divided(self.linear(value, f"{at}attention.self.{name}"), self.heads) for name in names]
            of_positions = names[:2] if shared else ["pos_query_proj", "pos_key_proj"]
            turned, turning = (
                self.divided(self.linear(table, f"{at}attention.self.{name}"), self.heads)[:, rows]
                for name in of_positions
            )
            query, key, held = inner
            bias = (query[:, :, None] * turning + key[:, None] * turned).sum(-1)
            scale = 1 / math.sqrt(3 * query.shape[-1])
            found = self.attended(query, key, held, bias * scale, scale)
            value = self.bert_layer(value, found, at)
        return value

    def modernbert(self, ids: Array, types: Array) -> Array:
        config, epsilon = self.config, self.config["norm_eps"]
        value = self.layer_norm(self.weights["embeddings.tok_embeddings.weight"][ids], "embeddings.norm", epsilon)
        far = np.abs(np.arange(len(ids))[:, None] - np.arange(len(ids))) > config["local_attention"] // 2
        for layer in range(self.layers):
            at = f"layers.{layer}."
            near = layer % config["global_attn_every_n_layers"] != 0
            inner = self.layer_norm(value, at + "attn_norm", epsilon) if layer else value
            query, key, held = self.parts(inner, at + "attn.Wqkv")
            turns = wavelengths(config["local_rope_theta" if near else "global_rope_theta"], query.shape[-1])
            found = self.attended(rotated(query, turns), rotated(key, turns), held, np.where(far & near, -np.inf, 0.0))
            value = value + self.linear(found, at + "attn.Wo")
            inner = self.layer_norm(value, at + "mlp_norm", epsilon)
            gate, up = np.split(self.linear(inner, at + "mlp.Wi"), 2, axis=-1)
            value = value + self.linear(gelu(gate) * up, at + "mlp.Wo")
        return self.layer_norm(value, "final_norm", epsilon)

    def nomic(self, ids: Array, types: Array) -> Array:
        value = self.embedded(ids, types, positions=False, norm="emb_ln")
        for layer in range(self.layers):
            at = f"encoder.layers.{layer}."
            query, key, held = self.parts(value, at + "attn.Wqkv")
            turns = wavelengths(self.config["rotary_emb_base"], query.shape[-1])
            found = self.attended(rotated(query, turns), rotated(key, turns), held)
            value = self.added(value, found, at + "attn.out_proj", at + "norm1")
            wide = self.linear(value, at + "mlp.fc11") * silu(self.linear(value, at + "mlp.fc12"))
            value = self.added(value, wide, at + "mlp.fc2", at + "norm2")
        return value

    def gte(self, ids: Array, types: Array) -> Array:
        value = self.embedded(ids, types, positions=False)
        factor = self.config["rope_scaling"]["factor"]
        for layer in range(self.layers):
            at = f"encoder.layer.{layer}."
            query, key, held = self.parts(value, at + "attention.qkv_proj")
            size = query.shape[-1]
            turns = wavelengths(self.config["rope_theta"] * factor, size) / factor ** (2 / size)
            found = self.attended(rotated(query, turns), rotated(key, turns), held)
            value = self.added(value, found, at + "attention.o_proj", at + "attn_ln")
            up, gate = np.split(self.linear(value, at + "mlp.up_gate_proj"), 2, axis=-1)
            value = self.added(value, gelu(gate) * up, at + "mlp.down_proj", at + "mlp_ln")
        return value

    def jina(self, ids: Array, types: Array) -> Array:
        value = self.embedded(ids, types, positions=False)
        slopes = 2.0 ** (-8 * np.arange(1, self.heads + 1) / self.heads)  # for a power of two
        bias = -slopes[:, None, None] * np.abs(np.arange(len(ids))[:, None] - np.arange(len(ids)))
        for layer in range(self.layers):
            at = f"encoder.layer.{layer}."
            found = self.bert_attention(value, at + "attention.self.", bias)
            value = self.added(value, found, at + "attention.output.dense", at + "attention.output.LayerNorm")
            gate, up = np.split(self.linear(value, at + "mlp.gated_layers"), 2, axis=-1)
            value = self.added(value, gelu(gate) * up, at + "mlp.wo", at + "mlp.layernorm")
        return value

    def decoder(self, ids: Array, types: Array) -> Array:
        config, gemma, count = self.config, self.config["model_type"] == "gemma3_text", len(ids)
        kind, offset = config["model_type"], 1.0 if gemma else 0.0
        value = self.weights["embed_tokens.weight"][ids] * (math.sqrt(config["hidden_size"]) if gemma else 1.0)
        both_ways = config.get("use_bidirectional_attention", False) or not config.get("is_causal", kind != "eurobert")
        later = np.arange(count)[None] - np.arange(count)[:, None]
        for layer in range(self.layers):
            at = f"layers.{layer}."
            near = gemma and config["layer_types"][layer] == "sliding_attention"
            inner = self.rms_norm(value, at + "input_layernorm", offset)
            kept = config["num_key_value_heads"]
            query, key, held = (
                self.divided(self.linear(inner, f"{at}self_attn.{part}_proj"), heads)
                for part, heads in (("q", self.heads), ("k", kept), ("v", kept))
            )
            if kind not in ("qwen2", "eurobert"):
                query = self.rms_norm(query, at + "self_attn.q_norm", offset)
                key = self.rms_norm(key, at + "self_attn.k_norm", offset)
            turns = wavelengths(config["rope_local_base_freq" if near else "rope_theta"], query.shape[-1])
            hidden = np.zeros((count, count), bool) if both_ways else later > 0
            if near:
                window = config["sliding_window"] // 2 + 1 if both_ways else config["sliding_window"]
                hidden |= np.abs(later) >= window
            scale = config["query_pre_attn_scalar"] ** -0.5 if gemma else 0.0
            bias = np.where(hidden, -np.inf, 0.0)
            found = self.attended(rotated(query, turns), rotated(key, turns), held, bias, scale)
            found = self.linear(found, at + "self_attn.o_proj")
            value = value + (self.rms_norm(found, at + "post_attention_layernorm", offset) if gemma else found)
            before = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
            inner = self.rms_norm(value, at + before, offset)
            gate, up = self.linear(inner, at + "mlp.gate_proj"), self.linear(inner, at + "mlp.up_proj")
            wide = self.linear((tanh_gelu if gemma else silu)(gate) * up, at + "mlp.down_proj")
            value = value + (self.rms_norm(wide, at + "post_feedforward_layernorm", offset) if gemma else wide)
        return self.rms_norm(value, "norm", offset)
