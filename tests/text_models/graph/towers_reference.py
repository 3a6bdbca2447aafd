"""CLIP and SigLIP in plain numpy and double precision, one text or image at a time, written from their papers: Radford et al. 2021, Zhai et al. 2022 and 2023.

Nothing here is taken from the package but the names that checkpoints have.
"""

from pathlib import Path

import numpy as np
from tests.text_models.graph.reference import Array, Network, silu, softmax, tanh_gelu


def quick_gelu(value: Array) -> Array:
    """Return the approximation of GELU by a sigmoid."""
    return silu(1.702 * value) / 1.702


class Towers(Network):
    """The two towers of a checkpoint."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.epsilon = self.config["text_config"]["layer_norm_eps"]
        self.is_clip = self.config["model_type"] == "clip"
        self.activate = quick_gelu if self.is_clip else tanh_gelu

    def text(self, ids: Array) -> Array:
        """Return the vector of a text, of length 1."""
        at, words = "text_model.", self.weights["text_model.embeddings.token_embedding.weight"]
        value = words[ids] + self.weights[f"{at}embeddings.position_embedding.weight"][: len(ids)]
        later = np.triu(np.full((len(ids), len(ids)), -np.inf), 1) if self.is_clip else 0.0
        value = self._encoded(value, at, later)
        value = self.layer_norm(value, f"{at}final_layer_norm")
        if not self.is_clip:
            return unit(self.linear(value[-1], f"{at}head"))
        end = int(np.argmax(ids == self.config["text_config"]["eos_token_id"]))
        return unit(self.linear(value[end], "text_projection"))

    def image(self, pixels: Array) -> Array:
        """Return the vector of an image [3, height, width], of length 1."""
        at, side = "vision_model.", self.config["vision_config"]["patch_size"]
        kernel = self.weights[f"{at}embeddings.patch_embedding.weight"]
        bias = self.weights.get(f"{at}embeddings.patch_embedding.bias", 0.0)
        rows, columns = (size // side for size in pixels.shape[1:])
        patches = [
            pixels[:, row * side : row * side + side, column * side : column * side + side]
            for row in range(rows)
            for column in range(columns)
        ]
        value = np.stack([np.tensordot(kernel, patch, 3) for patch in patches]) + bias
        if self.is_clip:
            value = np.concatenate([self.weights[f"{at}embeddings.class_embedding"][None], value])
        value = value + self.weights[f"{at}embeddings.position_embedding.weight"]
        value = self.layer_norm(value, f"{at}pre_layrnorm") if self.is_clip else value
        value = self.layer_norm(self._encoded(value, at, 0.0), f"{at}post_layernorm")
        return unit(self.linear(value[0], "visual_projection")) if self.is_clip else unit(self._pooled(value))

    def _encoded(self, value: Array, at: str, hidden: Array | float) -> Array:
        for layer in range(self.config["text_config"]["num_hidden_layers"]):
            own = f"{at}encoder.layers.{layer}."
            normed = self.layer_norm(value, own + "layer_norm1")
            query, key, held = (self.linear(normed, f"{own}self_attn.{part}_proj") for part in "qkv")
            value = value + self.linear(attention(query, key, held, hidden), f"{own}self_attn.out_proj")
            value = value + self._fed(self.layer_norm(value, own + "layer_norm2"), own)
        return value

    def _fed(self, value: Array, at: str) -> Array:
        return self.linear(self.activate(self.linear(value, at + "mlp.fc1")), at + "mlp.fc2")

    def _pooled(self, value: Array) -> Array:
        """Return what a learned query finds in the tokens of an image."""
        at = "vision_model.head."
        matrices, biases = (np.split(self.weights[f"{at}attention.in_proj_{kind}"], 3) for kind in ("weight", "bias"))
        given = self.weights[f"{at}probe"][0], value, value
        query, key, held = (each @ matrix.T + bias for each, matrix, bias in zip(given, matrices, biases, strict=True))
        found: Array = self.linear(attention(query, key, held, 0.0), f"{at}attention.out_proj")[0]
        return found + self._fed(self.layer_norm(found, f"{at}layernorm"), at)


def attention(query: Array, key: Array, held: Array, hidden: Array | float, heads: int = 4) -> Array:
    """Return attention of [queries, size] to [tokens, size]."""
    queries, keys, values = (each.reshape(len(each), heads, -1).transpose(1, 0, 2) for each in (query, key, held))
    scores = queries @ keys.transpose(0, 2, 1) / np.sqrt(queries.shape[-1]) + hidden
    found: Array = softmax(scores) @ values
    return found.transpose(1, 0, 2).reshape(len(query), -1)


def unit(vector: Array) -> Array:
    """Return the vector scaled to length 1."""
    found: Array = vector / np.linalg.norm(vector)
    return found
