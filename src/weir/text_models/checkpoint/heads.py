"""The heads of a checkpoint in addition to its classifier: what makes sparse vectors, token vectors, and labels of tokens of the network's output.

- A language model's head makes the weights of SPLADE: one for each word of the vocabulary.
- `sparse_linear.pt` and `colbert_linear.pt` are BGE-M3's: a weight for each token of the text, and a vector for each token. They are pickles.
- `linear.weight` (ColBERT), or a Dense behind a Transformer without a Pooling (PyLate), makes the token vectors of late interaction.
- A classifier in a model of transformers' class ForTokenClassification labels tokens.

And the towers of models for texts and images whose vectors share a space: CLIP, and SigLIP and SigLIP 2 of a fixed resolution. Their config.json has a part for
each tower, and leaves out what is usual. Sources: Radford et al. 2021 (CLIP), Zhai et al. 2023 (SigLIP), and the configuration classes of transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weir.errors import SettingsError
from weir.images.preparation import Preparation, read_preparation
from weir.text_models import Pooling
from weir.text_models.checkpoint.families import SIZES, Architecture
from weir.text_models.checkpoint.hub import PICKLED_HEADS
from weir.text_models.checkpoint.weights import Store, TensorFile, open_pickled
from weir.text_models.formats import JsonDocument

if TYPE_CHECKING:
    from weir.text_models.checkpoint.onnx_files import OnnxStore
    from weir.text_models.checkpoint.reading import Checkpoint


Array = NDArray[Any]

TOKEN_CLASSIFIER = "ForTokenClassification"  # the end of the names of transformers' classes of models that label tokens

# The head of a language model: the names in the files of its dense layer, its normalization, its matrix to the vocabulary, which may be that of the
# embeddings, and its bias.
_BERT_WORDS = (
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder", "cls.predictions.bias",
)  # fmt: skip
_ROBERTA_WORDS = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
WORD_HEADS = {
    "bert": _BERT_WORDS,
    "roberta": _ROBERTA_WORDS,
    "xlm-roberta": _ROBERTA_WORDS,
    "mpnet": _ROBERTA_WORDS,
    "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),
    "deberta-v2": _BERT_WORDS,
    "albert": ("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"),
    "electra": (
        "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", "generator_lm_head.bias",
    ),
    "modernbert": ("head.dense", "head.norm", "decoder", "decoder.bias"),
}  # fmt: skip


@dataclass(frozen=True)
class WordHead:
    """A language model's head, from which SPLADE's weights of words are made.

    Attributes:
        weights: `dense`, `norm` and `decoder`, each with .weight and perhaps .bias.
        activation: that of the dense layer.
        sums: whether the weights of a word in all tokens are summed; otherwise the largest counts.
        twice: whether the logarithm is taken twice.
    """

    weights: Mapping[str, Array]
    activation: str
    sums: bool = False
    twice: bool = False


@dataclass(frozen=True)
class Dense:
    """A dense layer: `activation(weight @ vector + bias) + residual @ vector`, all float32.

    Attributes:
        weight: [out, in].
        bias: [out], or None.
        activation: identity, tanh, relu, gelu or sigmoid.
        residual: [out, in]; None if nothing is added.
    """

    weight: Array
    bias: Array | None
    activation: str = "identity"
    residual: Array | None = None


@dataclass(frozen=True)
class TokenHead(Dense):
    """A dense layer on each token.

    Attributes:
        skips_first: the first token has no vector.
        before: ModernBERT's dense layer with gelu and normalization before it: `dense` and `norm`, each with .weight and perhaps .bias.
        first: the dense layers before it, in order.
    """

    skips_first: bool = False
    before: Mapping[str, Array] | None = None
    first: tuple[Dense, ...] = ()

    @property
    def layers(self) -> tuple[Dense, ...]:
        """All dense layers, in order."""
        return (*self.first, self)


@dataclass(frozen=True)
class ModelHeads:
    """The heads that a checkpoint has; None for those that it lacks.

    Attributes:
        words: makes a weight for each word of the vocabulary.
        weights: makes a weight for each token, [1, hidden size].
        tokens: makes a vector for each token.
        labels: makes a number for each label of each token.
        files: the files of heads next to the weights.
        pickled: the names of pickles with heads that may not be read.
    """

    words: WordHead | None = None
    weights: TokenHead | None = None
    tokens: TokenHead | None = None
    labels: TokenHead | None = None
    files: tuple[Path, ...] = ()
    pickled: tuple[str, ...] = ()


def read_heads(checkpoint: "Checkpoint", config: JsonDocument, splade: JsonDocument | None) -> ModelHeads:
    """Return the heads in the directory of a checkpoint. `splade` is the configuration of a SpladePooling, if modules.json names one.

    Raises SettingsError naming a file or a weight that does not fit.
    """
    directory, allow_pickle = checkpoint.directory, checkpoint.allow_pickle
    architecture, store = checkpoint.architecture, checkpoint.store
    there = [directory / name for name in PICKLED_HEADS if (directory / name).is_file()]
    opened = {path.name: open_pickled(path) for path in there} if allow_pickle else {}
    sparse, late = (opened.get(name) for name in PICKLED_HEADS)
    return ModelHeads(
        words=_word_head(config, architecture, store, splade),
        weights=None if sparse is None else _linear(sparse, "", architecture),
        tokens=_linear(late, "", architecture, skips_first=True)
        if late is not None
        else _stored(store, "linear", architecture),
        labels=_label_head(store, architecture) if is_token_classifier(config) else None,
        files=tuple(there) if allow_pickle else (),
        pickled=() if allow_pickle else tuple(path.name for path in there),
    )


def read_responses(checkpoint: "Checkpoint", yes: int | None, no: int | None) -> TokenHead:
    """Return the layer of one number on a decoder's last token: that of the word `yes` minus that of the word `no`, which are token ids.

    Raises SettingsError if the model is no decoder or its vocabulary lacks a word.
    """
    rule, store = f"pooling='yes-no': {checkpoint.directory}", checkpoint.store
    if checkpoint.architecture.classifier_reads is not Pooling.SEP:
        raise SettingsError(f"{rule} is not a decoder, which could answer yes or no")
    if yes is None or no is None:
        raise SettingsError(f"{rule} has no tokens for yes and no")
    name = store.stored.outside("lm_head.weight") or store.stored.words()
    assert name is not None
    words = store.files[name][name]
    return TokenHead(words[yes : yes + 1] - words[no : no + 1], None)


def is_token_classifier(config: JsonDocument) -> bool:
    """Return whether config.json says that the model labels tokens."""
    named = config.values.get("architectures")
    return isinstance(named, list) and any(str(each).endswith(TOKEN_CLASSIFIER) for each in named)


def _linear(file: TensorFile, name: str, architecture: Architecture, *, skips_first: bool = False) -> TokenHead:
    """Return the dense layer in a file. Raises SettingsError if it does not take the network's output."""
    weight, bias = f"{name}weight", f"{name}bias"
    hidden = architecture.hidden_size
    if (
        weight not in file
        or len(file.shape(weight)) != 2
        or file.shape(weight)[1] != hidden
        or not file.floating(weight)
    ):
        raise SettingsError(f"{file.path}: must hold {weight!r} of the shape [any, {hidden}]")
    if bias in file and file.shape(bias) != file.shape(weight)[:1]:
        raise SettingsError(f"{file.path}: {bias!r} must have as many numbers as {weight!r} has rows")
    return TokenHead(file[weight], file.get(bias), skips_first=skips_first)


def _stored(store: "Store | OnnxStore", name: str, architecture: Architecture) -> TokenHead | None:
    """Return the dense layer of this name next to the network, or None if there is none."""
    weight = store.stored.outside(f"{name}.weight")
    if weight is None:
        return None
    return _linear(store.files[weight], weight.removesuffix("weight"), architecture)


def _label_head(store: "Store | OnnxStore", architecture: Architecture) -> TokenHead | None:
    head = _stored(store, "classifier", architecture)
    if head is None or architecture.family != "modernbert":
        return head
    names = [f"{part}.{kind}" for part in ("dense", "norm") for kind in ("weight", "bias")]
    found = {name: store.stored.outside(f"head.{name}") for name in names}
    before = {name: store.files[stored][stored] for name, stored in found.items() if stored is not None}
    if not {"dense.weight", "norm.weight"} <= before.keys():
        raise SettingsError(f"{store.paths[0]}: has no weights of the head before the classifier")
    return TokenHead(head.weight, head.bias, before=before)


def _word_head(
    config: JsonDocument, architecture: Architecture, store: "Store | OnnxStore", splade: JsonDocument | None
) -> WordHead | None:
    names = WORD_HEADS.get(architecture.family)
    if names is None or store.stored.outside(f"{names[0]}.weight") is None:
        return None
    *layers, own_bias = names
    wanted = {
        f"{part}.{kind}": f"{name}.{kind}"
        for part, name in zip(("dense", "norm", "decoder"), layers, strict=True)
        for kind in ("weight", "bias")
    }
    found = {here: store.stored.outside(name) for here, name in wanted.items()}
    found["decoder.bias"] = found["decoder.bias"] or store.stored.outside(own_bias)
    found["decoder.weight"] = found["decoder.weight"] or store.stored.words()
    weights = {here: store.files[name][name] for here, name in found.items() if name is not None}
    hidden, words = architecture.hidden_size, architecture.vocab_size
    inner = architecture.embedding_size or hidden
    for name, shape in (
        ("dense.weight", (inner, hidden)),
        ("norm.weight", (inner,)),
        ("decoder.weight", (words, inner)),
    ):
        if name not in weights or weights[name].shape != shape:
            raise SettingsError(f"{store.paths[0]}: the language model's head has no {name} of the shape {list(shape)}")
    activation = (
        config.text("classifier_activation", default="gelu")
        if architecture.family == "modernbert"
        else "gelu"
        if architecture.family == "electra"
        else architecture.activation
    )
    if splade is None:
        return WordHead(weights, activation)
    strategy = splade.text("pooling_strategy", default="max")
    function = splade.text("activation_function", default="relu")
    if strategy not in ("max", "sum") or function not in ("relu", "log1p_relu"):
        raise splade.wrong(
            "pooling_strategy",
            f"{strategy}, {function}",
            "must be max or sum, and the activation_function relu or log1p_relu",
        )
    return WordHead(weights, activation, strategy == "sum", function == "log1p_relu")


# What the two parts of a config.json may leave out.
_CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "num_hidden_layers": 12, "projection_dim": 512}
_SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_hidden_layers": 12, "num_attention_heads": 12,
}  # fmt: skip
TOWERS: Mapping[str, Mapping[str, dict[str, Any]]] = {
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
    usual = TOWERS[kind][part]
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
