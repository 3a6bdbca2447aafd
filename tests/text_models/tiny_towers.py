"""Tiny models of texts and images with random weights, as transformers writes CLIP and SigLIP: made in milliseconds, without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.text_models import tiny, tiny_tokens

from weir.text_models.checkpoint.configuration import read_architecture
from weir.text_models.checkpoint.families import names_of
from weir.text_models.checkpoint.heads import tower_config, vision_architecture
from weir.text_models.checkpoint.weights import weight_shapes
from weir.text_models.formats import JsonDocument

KINDS = ("clip", "siglip")
DIMENSIONS, IMAGE = 24, 20
_LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 4, "layer_norm_eps": 1e-5}
_TEXT = {**_LAYERS, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 30}
_VISION = {
    **_LAYERS,
    "hidden_size": 40,
    "intermediate_size": 80,
    "image_size": IMAGE,
    "patch_size": 6,
}  # 2 pixels remain at two sides
_FIXED = {"height": IMAGE, "width": IMAGE}
_PREPROCESSORS: dict[str, dict[str, Any]] = {
    "clip": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": IMAGE}, "crop_size": _FIXED},
    "siglip": {"image_processor_type": "SiglipImageProcessor", "size": _FIXED},
}


def configuration(kind: str, vocabulary: int, end_id: int) -> dict[str, Any]:
    """Return a config.json. The vectors of SigLIP's images have the hidden size of their tower."""
    text, own = {**_TEXT, "vocab_size": vocabulary}, dict[str, Any]()
    if kind == "clip":
        text, own = {**text, "eos_token_id": end_id}, {"projection_dim": DIMENSIONS}
    else:
        text["projection_size"] = _VISION["hidden_size"]
    return {"model_type": kind, **own, "text_config": text, "vision_config": dict(_VISION)}


def model(directory: Path, kind: str = "clip", *, seed: int = 0) -> Path:
    """Write a model, and return `directory`: config.json, model.safetensors, preprocessor_config.json and the files of the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = tiny_tokens.write(directory, kind)
    config = configuration(kind, vocabulary, vocabulary - 1)
    document = JsonDocument(directory / "config.json", config)
    text = read_architecture(tower_config(document, "text_config"), has_pooler=False, has_classifier=False)
    random, stored = np.random.default_rng(seed), dict[str, Any]()
    for architecture in (text, vision_architecture(document)):
        shapes = weight_shapes(architecture)
        for here, there in names_of(architecture).items():
            name, _, part = there.partition(":")
            shape = shapes[here.split(".", 2)[-1] if here.startswith("layer.") else here]
            whole = (shape[0] * int(part[-1]), *shape[1:]) if part else shape
            stored[name] = random.normal(0, 0.15, whole).astype(np.float32) + np.float32(
                "norm" in here and name.endswith("weight")
            )
    stored["logit_scale"] = np.array(2.0, np.float32)
    if kind == "siglip":
        stored["logit_bias"] = np.array([-3.0], np.float32)
    document.path.write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSORS[kind]))
    tiny.save(directory / "model.safetensors", stored)
    return directory
