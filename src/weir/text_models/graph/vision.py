"""The tower for images as a part of an ONNX graph: patches, the encoder's layers, and one value of each image."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from weir.text_models.graph import Assembly, Numbers
from weir.text_models.graph.layers import PARTS, GeneralLayers

if TYPE_CHECKING:
    from weir.text_models.checkpoint.families import Architecture

Array = NDArray[Any]
_POOL = "layer.pool."  # the beginning of the names of the weights of SigLIP's pooling


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
        if f"{_POOL}probe" in self._weights:
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
        own = weights[f"{_POOL}probe"] @ weights[f"{_POOL}query.weight"].T + weights[f"{_POOL}query.bias"]
        query = _for_each(self._assembly, self._numbers.vector(f"{_POOL}query", own), self.value)
        key_value = self._numbers.dense(
            self.value, f"{_POOL}kv", *self._concatenated(_POOL, PARTS[1:]), "identity", self._input_ranges()
        )
        key, value = self.rows.split(key_value, 2, size)
        attended = self._multi_head_attention(query, key, value, "")
        self.value = self._numbers.stored_dense(attended, f"{_POOL}output", weights, f"{_POOL}output")
        self._add_part(f"{_POOL}norm", f"{_POOL}down", "", lambda: self._feed(_POOL))
        return self._assembly.add("Squeeze", self.value, [1])


def _for_each(assembly: Assembly, value: str, images: str) -> str:
    """Return `value` [1, length, size] once for each of `images` [batch, ...]."""
    batch = assembly.add("Shape", images, start=0, end=1)
    return assembly.add("Expand", value, assembly.add("Concat", batch, [1, 1], axis=0))
