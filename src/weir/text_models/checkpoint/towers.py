"""Models with two towers, one for texts and one for images, whose vectors share a space: CLIP, and SigLIP and SigLIP 2 of a fixed resolution.

config.json has a part for each tower, and leaves out what is usual. Sources: Radford et al. 2021 (CLIP), Zhai et al. 2023 (SigLIP), and the configuration
classes of transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weir.errors import SettingsError
from weir.images.preparation import Preparation, read_preparation
from weir.text_models.checkpoint.families import SIZES, Architecture
from weir.text_models.checkpoint.weights import Store
from weir.text_models.formats import JsonDocument

# What the two parts of a config.json may leave out.
_CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "num_hidden_layers": 12, "projection_dim": 512}
_SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_hidden_layers": 12, "num_attention_heads": 12,
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "clip": {
        "text_config": _CLIP | {
            "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 49407,
        },
        "vision_config": _CLIP | {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "image_size": 224, "patch_size": 32},
    },
    "siglip": {
        "text_config": _SIGLIP | {"vocab_size": 32000, "max_position_embeddings": 64, "eos_token_id": 49407},
        "vision_config": _SIGLIP | {"image_size": 224, "patch_size": 16},
    },
}  # fmt: skip
# Models with towers that are not computed, and the way out.
REFUSED = {
    "siglip2": "images keep their own resolution (NaFlex): serve a checkpoint of a fixed one, such as google/siglip2-base-patch16-224",
    "jina_clip": "its towers are code of its own: serve a CLIP or SigLIP checkpoint, such as google/siglip2-base-patch16-224",
}


@dataclass(frozen=True)
class VisionTower:
    """The tower for images of a model whose texts and images share a space.

    Attributes:
        kind: clip or siglip.
        architecture: that of the network; a token stands for a patch, and the first one of CLIP for the whole image.
        image_size: the height and the width of an image as the network reads it, in pixels.
        logit_scale: by which the cosine of a text and an image is multiplied to tell how well they fit.
        logit_bias: what is added then (SigLIP); None where the fit is relative to other texts (CLIP).
        preparation: how images become the numbers that it reads; None if no file states it, and then no images are read.
    """

    kind: str
    architecture: Architecture
    image_size: int
    logit_scale: float
    logit_bias: float | None
    preparation: Preparation | None

    @property
    def image_tokens(self) -> int:
        """How many tokens the network computes for an image."""
        return self.architecture.max_length

    @property
    def dimensions(self) -> int:
        """How many numbers the vector of an image has."""
        return self.architecture.projection_size


def tower_config(config: JsonDocument, part: str) -> JsonDocument:
    """Return the part `text_config` or `vision_config` of a config.json with nothing left out. Raises SettingsError if it is not an object."""
    kind = config.text("model_type")
    stated = [config.values.get(name) or {} for name in (part, f"{part}_dict")]  # old files state some values twice
    for value in stated:
        if not isinstance(value, dict):
            raise config.wrong(part, value, "must be an object")
    usual = DEFAULTS[kind][part]
    values = usual | {key: value for each in stated for key, value in each.items() if value is not None}
    own = {"projection_dim": values.get("projection_size", values["hidden_size"])} if kind == "siglip" else {}
    if kind == "clip" and "projection_dim" in config:
        own = {"projection_dim": config.values["projection_dim"]}
    return JsonDocument(config.path, {**values, **own, "model_type": kind})


def vision_architecture(config: JsonDocument) -> Architecture:
    """Return the architecture of the tower for images in a config.json. Raises SettingsError naming the file, the key and the rule."""
    part, kind = tower_config(config, "vision_config"), config.text("model_type")
    sizes: dict[str, Any] = {name: part.integer(*keys) for name, keys in SIZES.items() if name != "vocab_size"}
    image, patch = part.integer("image_size"), part.integer("patch_size")
    if patch > image:
        raise part.wrong("patch_size", patch, f"must be at most the image_size {image}")
    if sizes["hidden_size"] % sizes["heads"]:
        raise part.wrong("num_attention_heads", sizes["heads"], f"must divide the hidden size {sizes['hidden_size']}")
    if part.integer("num_channels", default=3) != 3:
        raise part.wrong("num_channels", part.values["num_channels"], "must be 3: red, green and blue")
    if not part.switch("vision_use_head", default=True):
        raise part.wrong("vision_use_head", False, "must be true: the head makes the vector of an image")
    return Architecture(
        family=f"{kind}-vision",
        **sizes,
        vocab_size=0,
        max_length=(image // patch) ** 2 + (kind == "clip"),
        type_vocab_size=0,
        epsilon=part.number("layer_norm_eps", default=1e-5),
        activation=part.text("hidden_act"),
        order="pre",
        final_norm=kind == "siglip",
        projection_size=part.integer("projection_dim"),
        patch_size=patch,
    )


def read_vision(config: JsonDocument, store: Store) -> VisionTower:
    """Return the tower for images of a config.json, whose weights are in `store`. Raises SettingsError naming the file, the key or weight, and the rule."""
    part, architecture = tower_config(config, "vision_config"), vision_architecture(config)
    store.weights(architecture)
    scale, bias = (_number(store, name) for name in ("logit_scale", "logit_bias"))
    if scale is None:
        raise SettingsError(f"{store.paths[0]}: has no weight 'logit_scale', which the model must have")
    image, preparation = part.integer("image_size"), read_preparation(config.path.parent)
    if preparation is not None and (preparation.height, preparation.width) != (image, image):
        stated = f"images of {preparation.height} × {preparation.width} pixels"
        raise part.wrong("image_size", image, f"must be that of the files beside it, which make {stated}")
    return VisionTower(config.text("model_type"), architecture, image, float(np.exp(scale)), bias, preparation)


def _number(store: Store, name: str) -> float | None:
    """Return the only number of a weight outside the towers; None if there is no such weight. Raises SettingsError if it has several."""
    stored = store.stored.outside(name)
    if stored is None:
        return None
    found = store.files[stored][stored]
    if found.size != 1:
        raise SettingsError(f"{store.paths[0]}: {stored!r} has {found.size} numbers, must have 1")
    return float(found.reshape(()))
