"""Read a model's directory: the files of the network, and the files that sentence-transformers adds to them.

`read_checkpoint` reads the architectures that the onnx runtime computes. `read_for` reads any architecture if the torch runtime computes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from weir.errors import SettingsError
from weir.text_models import DEFAULT_COMPUTING, ComputingSettings, Pooling
from weir.text_models.checkpoint.configuration import read_architecture, read_family
from weir.text_models.checkpoint.families import MODEL2VEC, OWN_POSITIONS, SIZES, Architecture
from weir.text_models.checkpoint.heads import (
    REFUSED,
    TOWERS,
    Dense,
    ModelHeads,
    TokenHead,
    VisionTower,
    is_token_classifier,
    read_heads,
    read_responses,
    read_vision,
    tower_config,
)
from weir.text_models.checkpoint.onnx_files import (
    RUNTIME,
    OnnxFile,
    OnnxStore,
    classifies_texts,
    file_names,
    find_file,
    read_onnx_file,
    store_of,
)
from weir.text_models.checkpoint.weights import (
    PICKLED_WEIGHTS,
    STATIC_MODULE,
    WEIGHTS,
    StaticStore,
    Store,
    Weights,
    no_weights_error,
    open_pickled,
    open_tensors,
)
from weir.text_models.formats import JsonDocument, read_document, read_json, read_optional
from weir.text_models.late_interaction import (
    MASK_MODULE,
    METADATA,
    STANFORD,
    LateInteraction,
    read_multi_vector,
    read_pylate,
    read_stanford,
)
from weir.text_models.texts import NO_TOKENIZER_OPTIONS, TokenizerOptions
from weir.text_models.tokenizer import Tokenizer

CONFIG = "config.json"
CLASSIFIER = "ForSequenceClassification"  # the end of the names of transformers' classes of models that label texts
LANGUAGE_MODEL = "ForCausalLM"  # the end of the names of classes of decoders that say the next word
MODULES = "modules.json"
QUANTIZER = "FlexibleQuantizer"  # a module of pplx-embed
CLIP_MODULE = "CLIPModel"  # what a Transformer of texts and images was called before sentence-transformers 5.4
ROUTER = "router_config.json"  # in the folder of a Router
DOCUMENT = "document"  # the route of a Router that states no default
ENCODING_SETTINGS = "config_sentence_transformers.json"
# The files of sentence-transformers that may state the greatest length of a text; current versions write the first.
TEXT_SETTINGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_mpnet_config.json",
)

# The name of each pooling in current files, with its switch in older files. Several poolings are joined in this order.
POOLINGS = {
    "cls": ("pooling_mode_cls_token", Pooling.CLS),
    "max": ("pooling_mode_max_tokens", Pooling.MAX),
    "mean": ("pooling_mode_mean_tokens", Pooling.MEAN),
    "mean_sqrt_len_tokens": ("pooling_mode_mean_sqrt_len_tokens", Pooling.MEAN_SQRT),
    "weightedmean": ("pooling_mode_weightedmean_tokens", Pooling.WEIGHTED_MEAN),
    "lasttoken": ("pooling_mode_lasttoken", Pooling.SEP),
}
# How sentence-transformers compares vectors (similarity_fn_name); the first is the default.
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}

# Keys of the sizes in config.json in addition to those in SIZES, in families that torch alone computes.
MORE_NAMES = {
    "hidden_size": ("d_model",),
    "layers": ("num_layers",),
    "heads": ("num_heads",),
    "intermediate_size": ("d_ff",),
}


@dataclass(frozen=True)
class ModelLayout:
    """The paths of the network's files, and the steps that sentence-transformers adds to the network.

    Attributes:
        network: the directory of the network.
        pooled: the poolings, joined in this order; None for a directory without modules.json.
        normalize: whether vectors are scaled to length 1.
        dense: the dense layers between pooling and normalization.
        max_length: the most tokens of a text, special tokens included; None if no file states it.
        lowercase: whether texts are lowercased before they are tokenized.
        prompts: texts to put before a text, by name.
        default_prompt: the name of the prompt that stands before every text, if any.
        dimensions: how many numbers at the start of each vector are kept; None for all.
        files: the files in addition to those of the network that affect the vectors.
        similarity: how two vectors are compared, one of SIMILARITIES.
        splade: the configuration of the module that makes sparse vectors, if there is one.
        answers: the token ids of yes and no, if a module compares a decoder's numbers for them.
        late: how queries and documents become vectors of tokens, if the model was trained for late interaction.
        static: whether there is no network, but a vector for each token (see StaticStore); no special tokens are put around texts.
        quantized: whether each number x of a vector becomes the whole number next to 127 · tanh(x), before vectors are cut and scaled.
        reads: a file that states how many numbers the network makes for a token, and how many; None if there is none.

    A dense layer without a pooling makes token vectors.
    """

    network: Path
    pooled: tuple[Pooling, ...] | None = None
    normalize: bool = False
    dense: tuple[Dense, ...] = ()
    max_length: int | None = None
    lowercase: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    dimensions: int | None = None
    files: tuple[Path, ...] = ()
    splade: Path | None = None
    similarity: str = SIMILARITIES[0]
    answers: tuple[int, int] | None = None
    late: LateInteraction | None = None
    static: bool = False
    quantized: bool = False
    reads: tuple[Path, int] | None = None


# Which modules may follow one another: for each step on the way of a text the kinds of the next module, with the step that they lead to. A Dropout has no
# effect after training.
_STEPS: Mapping[str, Mapping[str, str]] = {
    "network": {"Dropout": "network", "Pooling": "texts"},
    "texts": {"Dropout": "texts", "Dense": "texts", "Normalize": "end", QUANTIZER: "end"},
    "tokens": {"Dense": "tokens", MASK_MODULE: "tokens", "Normalize": "end"},  # of late interaction
    "end": {},
}


def read_layout(directory: Path, *, allow_pickle: bool = False, router: str | None = None) -> ModelLayout:
    """Read modules.json and the folders that it names. A directory without modules.json holds a network alone.

    Of a Router the modules of the route `router` count, None for its default. The modules must be a Transformer, and what _STEPS lets follow. Raises
    SettingsError naming the file and the module for any other sequence, and the file, key and rule for a broken file.
    """
    if not directory.is_dir():
        raise no_weights_error(directory)
    if not (directory / MODULES).is_file():
        return _bare_layout(directory)
    modules = _modules(directory, router)
    kinds = [kind for _, kind in modules]
    network, settings = directory / modules[0][0], read_optional(directory / ENCODING_SETTINGS)
    towers = kinds[0] in ("Transformer", CLIP_MODULE) and kinds[1:] in ([], ["Normalize"])
    if towers and read_optional(network / CONFIG).values.get("model_type") in TOWERS:
        return replace(_bare_layout(network), files=(directory / MODULES,))
    max_length, lowercase = _text_settings(network)
    layout = ModelLayout(network, max_length=max_length, lowercase=lowercase)
    if kinds == ["Transformer", "LogitScore"]:  # a decoder that says yes or no, a CrossEncoder in sentence-transformers
        config = read_document(directory / modules[1][0] / CONFIG)
        answers = config.integer("true_token_id", least=0), config.integer("false_token_id", least=0)
        return replace(layout, files=(directory / MODULES, config.path), answers=answers)
    prompts, default = _prompts(settings)
    layout = replace(layout, prompts=prompts, default_prompt=default)
    if kinds == ["MLMTransformer", "SpladePooling"]:
        splade = directory / modules[1][0] / CONFIG
        return replace(layout, splade=splade, files=(directory / MODULES, splade))
    layout = replace(layout, dimensions=settings.integer("truncate_dim") if "truncate_dim" in settings else None)
    return _layout_of_vectors(directory, layout, settings, modules, allow_pickle)


def _layout_of_vectors(
    directory: Path, layout: ModelLayout, settings: JsonDocument, modules: list[tuple[str, str]], allow_pickle: bool
) -> ModelLayout:
    """Return the layout of a model that makes vectors of texts or of tokens, with what its modules add to `layout`."""
    late = _check_order(directory, [kind for _, kind in modules]) == "tokens"
    (_, first), *rest = modules
    static = first == STATIC_MODULE
    pooled: tuple[Pooling, ...] | None = (Pooling.MEAN,) if static else None
    reads: tuple[Path, int] | None = None
    dense: list[Dense] = []
    files: list[Path] = [directory / MODULES]
    for path, kind in rest:
        if kind in ("Pooling", "Dense", MASK_MODULE):
            files.append(directory / path / CONFIG)
        if kind == "Pooling":
            pooling = read_document(directory / path / CONFIG)
            pooled, reads = _poolings(pooling), _stated_size(pooling)
        elif kind == "Dense":
            inputs = ("sentence_embedding", "token_embeddings")[: 1 + late]
            layer, path_of_weights = _dense(directory / path, allow_pickle, inputs)
            dense.append(layer)
            files.append(path_of_weights)
    interaction = _late_interaction(directory, layout, settings, rest) if late else None
    prompts = layout.prompts
    if interaction is not None:
        prompts = prompts | {"query": interaction.query, "document": interaction.document}
        files += [path for path in (settings.path, layout.network / TEXT_SETTINGS[0]) if path.is_file()]
    return replace(
        layout,
        pooled=pooled,
        normalize=bool(rest) and rest[-1][1] == "Normalize",
        dense=tuple(dense),
        prompts=prompts,
        files=tuple(files),
        similarity=_similarity(settings) if interaction is None else interaction.similarity,
        late=interaction,
        static=static,
        quantized=bool(rest) and rest[-1][1] == QUANTIZER,
        reads=reads,
    )


def _check_order(directory: Path, kinds: Sequence[str]) -> str:
    """Return the step of _STEPS at which the modules behind the network begin. Raises SettingsError for a module that cannot stand where it does."""
    first, *rest = kinds
    if first not in ("Transformer", STATIC_MODULE):
        raise _unknown(directory, first, "must begin with a Transformer or a StaticEmbedding")
    is_late = rest[:1] in (["Dense"], [MASK_MODULE]) and set(rest) <= _STEPS["tokens"].keys()
    begin = step = "tokens" if is_late else "texts" if first == STATIC_MODULE else "network"
    for kind in rest:
        if kind not in _STEPS[step]:
            rule = "must be Transformer, Pooling, Dense or Normalize, in this order"
            raise _unknown(directory, kind, "must not come behind a Normalize" if step == "end" else rule)
        step = _STEPS[step][kind]
    if step == "network":
        raise _unknown(directory, first, "must be followed by a Pooling, or by a Dense for token vectors")
    return begin


def _bare_layout(directory: Path) -> ModelLayout:
    """Return the layout of a network alone; Stanford's ColBERT has late interaction."""
    config = read_optional(directory / CONFIG).values
    if config.get("model_type") in TOWERS:
        return ModelLayout(directory, normalize=True)
    if config.get("model_type") == MODEL2VEC:
        return ModelLayout(directory, (Pooling.MEAN,), normalize=config.get("normalize") is True, static=True)
    if STANFORD not in (config.get("architectures") or ()):
        return ModelLayout(directory)
    late = read_stanford(directory)
    prompts = {"query": late.query, "document": late.document}
    files = (directory / METADATA,) if (directory / METADATA).is_file() else ()
    return ModelLayout(directory, prompts=prompts, files=files, similarity=late.similarity, late=late)


def _late_interaction(
    directory: Path, layout: ModelLayout, settings: JsonDocument, rest: Sequence[tuple[str, str]]
) -> LateInteraction | None:
    """Return how queries and documents become vectors, if PyLate or a MultiVectorEncoder saved the model."""
    masks = [directory / folder / CONFIG for folder, kind in rest if kind == MASK_MODULE]
    if masks:
        own = read_optional(layout.network / TEXT_SETTINGS[0])
        return read_multi_vector(settings, own, read_document(masks[0]), layout.prompts)
    types = [str(module.get("type")) for module in read_json(directory / MODULES)]
    return read_pylate(settings, types, layout.prompts)


def _modules(directory: Path, router: str | None) -> list[tuple[str, str]]:
    """Return each module's folder and class name, without the package: versions of sentence-transformers differ in the package."""
    found = [
        each
        for folder, kind in _listed_modules(directory)
        for each in (_routed(directory, folder, router) if kind == "Router" else [(folder, kind)])
    ]
    if (
        router is not None
        and len(found)
        and not any((directory / folder / ROUTER).is_file() for folder, _ in _listed_modules(directory))
    ):
        raise SettingsError(f"router={router!r}: {directory / MODULES}: has no module Router")
    return found


def _routed(directory: Path, folder: str, router: str | None) -> list[tuple[str, str]]:
    """Return the modules of one route of a Router. Raises SettingsError naming the routes that there are."""
    config = read_document(directory / folder / ROUTER)
    try:
        routes = msgspec.convert(config.values.get("structure"), dict[str, list[str]])
        types = msgspec.convert(config.values.get("types"), dict[str, str])
        stated = msgspec.convert(config.values.get("parameters") or {}, dict[str, Any]).get("default_route")
        named = [(name, types[name]) for name in routes.get(router or stated or DOCUMENT, [])]
    except (msgspec.ValidationError, KeyError) as error:
        raise SettingsError(f"{config.path}: must name the types and the structure of its routes: {error}") from None
    if not named:
        rule = f"must be one of {', '.join(routes) or 'its routes'}"
        raise SettingsError(f"router={router or stated or DOCUMENT!r}: {config.path}: {rule}")
    for name, _ in named:
        _check_folder(config.path, name)
    return [(str(Path(folder) / name), kind.rsplit(".", 1)[-1]) for name, kind in named]


def _check_folder(path: Path, folder: str) -> None:
    if "\0" in folder or Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise SettingsError(f"{path}: {folder!r} must be a folder in that directory")


def _listed_modules(directory: Path) -> list[tuple[str, str]]:
    path = directory / MODULES
    try:
        modules = msgspec.convert(read_json(path), list[dict[str, Any]])
        found = [(msgspec.convert(module["path"], str), msgspec.convert(module["type"], str)) for module in modules]
    except (msgspec.ValidationError, KeyError) as error:
        raise SettingsError(f"{path}: must be a list of modules with their path and type: {error}") from None
    if not found:
        raise SettingsError(f"{path}: names no modules")
    for folder, _ in found:
        _check_folder(path, folder)
    return [(folder, kind.rsplit(".", 1)[-1]) for folder, kind in found]


def _unknown(directory: Path, kind: str, rule: str) -> SettingsError:
    return SettingsError(f"{directory / MODULES}: the module {kind}: {rule}; no other order of modules is supported")


def _poolings(config: JsonDocument) -> tuple[Pooling, ...]:
    if not config.switch("include_prompt", default=True):
        raise config.wrong("include_prompt", False, "must be true: prompts are pooled with the text")
    if "pooling_mode" in config:
        named = config.values["pooling_mode"]
        modes = [named] if isinstance(named, str) else named
        if (
            not isinstance(modes, list)
            or not modes
            or not all(isinstance(mode, str) and mode in POOLINGS for mode in modes)
        ):
            raise config.wrong("pooling_mode", named, f"must be one or several of {', '.join(POOLINGS)}")
        return tuple(POOLINGS[mode][1] for mode in modes)
    switches = dict(POOLINGS.values())
    chosen = tuple(pooling for switch, pooling in switches.items() if config.switch(switch))
    for name, value in config.values.items():
        if name.startswith("pooling_mode_") and name not in switches and value:
            raise config.wrong(name, value, f"is unknown: must be one or several of {', '.join(switches)}")
    mean = POOLINGS["mean"][0]
    if not chosen and mean in config:
        raise config.wrong(mean, False, f"is off, as all others are: one of {', '.join(switches)} must be true")
    return chosen or (Pooling.MEAN,)


def _stated_size(config: JsonDocument) -> tuple[Path, int] | None:
    """Return the file of a pooling, and the size of the vectors that it takes, if it states that; before sentence-transformers 6 the key began with word_."""
    key = next((key for key in ("word_embedding_dimension", "embedding_dimension") if key in config), None)
    return None if key is None else (config.path, config.integer(key))


def _dense(folder: Path, allow_pickle: bool, inputs: Sequence[str]) -> tuple[Dense, Path]:
    """Return the dense layer in a folder, and the file of its weights. It reads one of `inputs`, and puts its output in the place of that."""
    config = read_document(folder / "config.json")
    read = config.text("module_input_name", default=inputs[0])
    if read not in inputs or config.text("module_output_name", default=read) != read:
        raise config.wrong("module_input_name", read, f"must be {' or '.join(inputs)}, and so must its output")
    name = config.text("activation_function", default="torch.nn.modules.activation.Tanh")
    activation = ACTIVATIONS.get(name.rsplit(".", 1)[-1])
    if activation is None or not name.startswith("torch.nn."):
        raise config.wrong("activation_function", name, f"must be torch's {', '.join(ACTIVATIONS)}")
    if (folder / WEIGHTS).is_file():
        tensors = open_tensors(folder / WEIGHTS)
    elif allow_pickle and (folder / PICKLED_WEIGHTS).is_file():
        tensors = open_pickled(folder / PICKLED_WEIGHTS)
    else:
        raise no_weights_error(folder)
    out, size = config.integer("out_features"), config.integer("in_features")
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (out, size)}
    if adds := config.switch("use_residual"):  # of the same size it is the vector itself
        shapes |= {} if out == size else {"residual.weight": (out, size)}
    if config.switch("bias", default=True):
        shapes["linear.bias"] = (out,)
    for tensor, shape in shapes.items():
        if tensor not in tensors or tensors.shape(tensor) != shape or not tensors.floating(tensor):
            raise SettingsError(
                f"{tensors.path}: must hold {tensor!r} of the shape {list(shape)}, as its config.json says"
            )
    bias = tensors["linear.bias"] if "linear.bias" in shapes else None
    residual = tensors["residual.weight"] if "residual.weight" in shapes else np.eye(size, dtype=np.float32)
    return Dense(tensors["linear.weight"], bias, activation, residual if adds else None), tensors.path


def _text_settings(network: Path) -> tuple[int | None, bool]:
    """Return the most tokens of a text, None if no file states it, and whether texts are lowercased."""
    for name in TEXT_SETTINGS:
        if (network / name).is_file():
            settings = read_document(network / name)
            longest = settings.integer("max_seq_length", least=3) if "max_seq_length" in settings else None
            return longest, settings.switch("do_lower_case")
    return None, False


def _prompts(settings: JsonDocument) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default prompt if there is one."""
    try:
        prompts = msgspec.convert(settings.values.get("prompts") or {}, dict[str, str])
    except msgspec.ValidationError as error:
        raise SettingsError(f"{settings.path}: prompts must be texts by name: {error}") from None
    default = settings.text("default_prompt_name") if "default_prompt_name" in settings else None
    if default is not None and default not in prompts:
        raise settings.wrong("default_prompt_name", default, f"must be one of {', '.join(prompts) or 'the prompts'}")
    return prompts, default


def _similarity(settings: JsonDocument) -> str:
    stated = settings.text("similarity_fn_name", default=SIMILARITIES[0])
    if stated not in SIMILARITIES:
        raise settings.wrong("similarity_fn_name", stated, f"must be one of {', '.join(SIMILARITIES)}")
    return stated


@dataclass(frozen=True)
class Checkpoint:
    """A model's directory, checked: its architecture, its layout and its weights.

    `allow_pickle`: pickled weights are read where there are no others. `onnx` is the ONNX file that is computed in place of the weights, if one is. `router`
    is the route of a Router that was chosen, if one was. `vision` is the tower for images of a model that has one; `architecture` is that of texts.
    """

    directory: Path
    architecture: Architecture
    layout: ModelLayout
    store: Store | OnnxStore
    allow_pickle: bool = False
    onnx: OnnxFile | None = None
    router: str | None = None
    vision: VisionTower | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether there are vectors of tokens, and not only of texts, as some ONNX files make them."""
        return self.onnx is None or len(self.onnx.outputs[self.onnx.output(self.classifies)]) != 2

    @property
    def prompts(self) -> dict[str, str]:
        """Texts to put before a text, by name."""
        return self.layout.prompts

    @property
    def dense(self) -> tuple[Dense, ...]:
        """The dense layers between pooling and normalization."""
        return self.layout.dense if self.layout.pooled else ()

    @cached_property
    def heads(self) -> ModelHeads:
        """The heads for sparse vectors, token vectors and labels of tokens. Raises SettingsError naming a file that does not fit."""
        splade = None if self.layout.splade is None else read_document(self.layout.splade)
        found = read_heads(self, self._config, splade)
        if self.layout.dense and not self.layout.pooled:
            *first, last = self.layout.dense
            own = TokenHead(last.weight, last.bias, last.activation, last.residual, first=tuple(first))
            return replace(found, tokens=own)
        if self.layout.late is not None and found.tokens is None:  # the vectors are those of the network
            return replace(found, tokens=TokenHead(np.eye(self.architecture.hidden_size, dtype=np.float32), None))
        return found

    @cached_property
    def answers(self) -> TokenHead:
        """The layer that tells yes from no. Raises SettingsError if the model cannot answer so."""
        vocabulary = self.tokenizer().vocabulary
        yes, no = vocabulary.get("yes"), vocabulary.get("no")
        if self.layout.answers not in (None, (yes, no)):
            raise SettingsError(
                f"{self.layout.files[-1]}: its tokens {self.layout.answers} must be those of yes and no, {(yes, no)}: only models that answer so are served"
            )
        return read_responses(self, yes, no)

    @property
    def judges(self) -> bool:
        """Whether the model was trained to say yes or no about a pair: its files state it, or it is a decoder that is called a reranker, as Qwen3-Reranker."""
        return self.layout.answers is not None or (self._says_words and any("rerank" in name for name in self._names))

    @property
    def _says_words(self) -> bool:
        """Whether the network is that of a language model that reads from left to right, and no module makes anything else of it."""
        named = self._config.values.get("architectures")
        first = str(named[0]) if isinstance(named, list) and named else ""
        bare = not (self.directory / MODULES).is_file()
        return bare and first.endswith(LANGUAGE_MODEL) and self._config.switch("is_causal", default=True)

    @property
    def _names(self) -> tuple[str, ...]:
        """The names that the directory may be known by: its own, and in the cache of the hub that of the repository."""
        parents = self.directory.parts
        return tuple(
            part.lower() for part in (parents[-1:] + parents[-3:-2] if "snapshots" in parents[-2:-1] else parents[-1:])
        )

    @property
    def pooling_of_head(self) -> Pooling | None:
        """The pooling of the head that the files say the model was trained with; None if it was trained for vectors."""
        if self.vision is not None:
            return Pooling.PROJECTION
        if self.layout.splade is not None:
            return Pooling.SPARSE
        if self.layout.late is not None or (self.layout.dense and not self.layout.pooled):
            return Pooling.TOKENS
        if is_token_classifier(self._config) and self.heads.labels is not None:
            return Pooling.TOKEN_LOGITS
        if self.judges:
            return Pooling.YES_NO
        return Pooling.LOGITS if self.classifies else None

    @property
    def pooling_of_others(self) -> Pooling:
        """The pooling where the files state none, as in sentence-transformers: the last token of a language model that reads from left to right, else
        the mean."""
        return Pooling.SEP if self._says_words else Pooling.MEAN

    @cached_property
    def _config(self) -> JsonDocument:
        path = self.layout.network / CONFIG
        return JsonDocument(path, {}) if self.layout.static else read_document(path)

    @property
    def classifies(self) -> bool:
        """Whether the model was trained to label or to score texts: config.json says so, and the weights hold a classifier."""
        architectures = self._config.values.get("architectures")
        named = isinstance(architectures, list) and any(str(each).endswith(CLASSIFIER) for each in architectures)
        return named and self.architecture.labels > 0 and self.layout.pooled is None

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the classifier of texts or of tokens, in the order of its outputs. Raises SettingsError if config.json does not name each output once."""
        of_tokens = self.heads.labels
        count = self.architecture.labels if of_tokens is None else len(of_tokens.weight)
        named = self._config.values.get("id2label")
        if not isinstance(named, dict):
            return tuple(f"LABEL_{index}" for index in range(count))
        found = [named.get(str(index)) for index in range(count)]
        labels = tuple(label for label in found if isinstance(label, str))
        if len(labels) != count:
            raise self._config.wrong("id2label", named, f"must have a text for each number from 0 to {count - 1}")
        return labels

    @property
    def independent_labels(self) -> bool:
        """Whether each label holds or not by itself: config.json states it as the kind of problem, or there is one label only."""
        return self.architecture.labels == 1 or self._config.values.get("problem_type") == "multi_label_classification"

    @cached_property
    def max_length(self) -> int:
        """The most tokens of a text, special tokens included: as the files state, and at most `architecture.max_length`."""
        stated = self.layout.max_length
        if self.layout.late is not None:
            stated = self.layout.late.document_length or stated
        path = self.layout.network / "tokenizer_config.json"
        if stated is None and path.is_file() and not self.layout.static:
            # transformers writes the float 1e30 for a tokenizer without a limit.
            limit = read_document(path).values.get("model_max_length")
            stated = limit if isinstance(limit, int) and limit > 2 else None
        return min(stated or self.architecture.max_length, self.architecture.max_length)

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        """The poolings that the files state, joined in this order; none for a directory without modules.json."""
        return self.layout.pooled or ()

    def tokenizer(self, options: TokenizerOptions = NO_TOKENIZER_OPTIONS) -> Tokenizer:
        """Return the model's tokenizer with these options. The model's default prompt holds unless the options state a prompt.

        Raises SettingsError naming the file if the tokenizer's files are missing or broken, or do not fit the weights.
        """
        if options.prompt is None and self.layout.default_prompt is not None:
            options = replace(options, prompt=self.prompts[self.layout.default_prompt])
        if options.prompt is None and options.late is not None:
            options = replace(options, prompt=options.late.document)
        if self.layout.static:
            options = replace(options, special_tokens=False)
        if self.architecture.family == "siglip":  # as it was trained, whichever class its files name
            options = replace(options, lowercase_text=True, fill=True)
        if self.architecture.pair_text:
            options = replace(options, pair_text=self.architecture.pair_text)
        if self.layout.lowercase:
            options = replace(options, lowercase_text=True)
        return Tokenizer(self.layout.network, options, vocab_size=self.architecture.vocab_size)

    def weights(self) -> Weights:
        """Return the weights as float32 arrays by canonical name (see weights.py). A weight is read from its file when it is accessed."""
        assert isinstance(self.store, Store)  # an ONNX file is computed as it is
        return self.store.weights(self.architecture)

    def vision_weights(self) -> Weights:
        """Return the weights of the tower for images as `weights` does."""
        assert isinstance(self.store, Store) and self.vision is not None
        return self.store.weights(self.vision.architecture)

    def content_hash(self) -> str:
        """Return a hash, in hexadecimal, of the files that affect the vectors: weights, configuration, modules. Reads all of the weights."""
        digest = hashlib.blake2b(digest_size=16)
        config = () if self.layout.static else (self.layout.network / CONFIG,)
        for path in (*config, *self.store.paths, *self.layout.files, *self.heads.files):
            digest.update(f"{path.relative_to(self.directory)}:{path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        return digest.hexdigest()


def read_checkpoint(directory: Path, *, allow_pickle: bool = False, router: str | None = None) -> Checkpoint:
    """Read a model's directory in the layout of Hugging Face or of sentence-transformers, for the onnx runtime.

    Sizes, names and shapes are checked; the values of the weights are not read. Raises SettingsError naming the file and the rule.
    """
    directory = Path(directory).resolve()
    layout = read_layout(directory, allow_pickle=allow_pickle, router=router)
    if layout.static:
        table = StaticStore(layout.network, allow_pickle=allow_pickle)
        _check_sizes(layout, table.architecture())
        return Checkpoint(directory, table.architecture(), layout, table, allow_pickle, router=router)
    if not (layout.network / CONFIG).is_file() and list(directory.glob("*.ckpt.index")):
        raise no_weights_error(directory)
    config = read_document(layout.network / CONFIG)
    if out := REFUSED.get(config.text("model_type")):
        raise config.wrong("model_type", config.text("model_type"), out)
    family = read_family(config)
    store = Store(layout.network, allow_pickle=allow_pickle)
    vision = read_vision(config, store) if family in TOWERS else None
    config = config if vision is None else tower_config(config, "text_config")
    labels_texts = store.stored.head(family) is not None and not is_token_classifier(config)
    architecture = read_architecture(config, has_pooler=bool(store.stored.pooler(family)), has_classifier=labels_texts)
    store.weights(architecture)
    if vision is not None and vision.dimensions != architecture.projection_size:
        rule = f"must be that of images, {vision.dimensions}: texts and images share a space"
        raise config.wrong("projection_size", architecture.projection_size, rule)
    _check_sizes(layout, architecture)
    return Checkpoint(directory, architecture, layout, store, allow_pickle, router=router, vision=vision)


def _check_sizes(layout: ModelLayout, architecture: Architecture) -> None:
    """Raise SettingsError unless the pooling and each dense layer take vectors of the size that the step before gives."""
    if layout.reads is not None and layout.reads[1] != architecture.hidden_size:
        path, size = layout.reads
        raise SettingsError(
            f"{path}: pools vectors of {size} numbers, must be {architecture.hidden_size}, as the network makes them: the files are of different models"
        )
    width = architecture.hidden_size * len(layout.pooled or (None,))
    for layer in layout.dense:
        if layer.weight.shape[1] != width:
            raise SettingsError(
                f"{layout.network}: a dense layer takes vectors of {layer.weight.shape[1]} numbers, but gets vectors of {width}"
            )
        width = layer.weight.shape[0]


def read_for(
    directory: Path, computing: ComputingSettings = DEFAULT_COMPUTING, router: str | None = None
) -> Checkpoint:
    """Read a model's directory for the runtime that the settings name. Raises SettingsError as `read_checkpoint` does.

    For torch any architecture is accepted, as transformers computes it; weights of an architecture that is not in FAMILIES are not checked. For "onnx-file"
    the ONNX file of the variant `computing.dtype` stands for the weights.
    """
    directory, allow_pickle = Path(directory).resolve(), computing.allow_pickle
    if computing.runtime == RUNTIME:
        return _read_for_file(directory, computing, router)
    if computing.runtime != "torch":
        return read_checkpoint(directory, allow_pickle=allow_pickle, router=router)
    layout = read_layout(directory, allow_pickle=allow_pickle, router=router)
    path = layout.network / CONFIG
    if not path.is_file() or not _is_for_torch_only(read_document(path)):
        return read_checkpoint(directory, allow_pickle=allow_pickle, router=router)
    store = Store(layout.network, allow_pickle=allow_pickle)
    architecture = _read_any_architecture(read_document(path), store)
    return Checkpoint(directory, architecture, layout, store, allow_pickle)


def _read_for_file(directory: Path, computing: ComputingSettings, router: str | None) -> Checkpoint:
    """Read a directory with an ONNX file. Raises SettingsError naming the ONNX files that there are, if that of `computing.dtype` is missing."""
    layout = read_layout(directory, allow_pickle=computing.allow_pickle, router=router)
    names = file_names(computing.dtype)
    path = find_file(directory, names) or find_file(layout.network, names)
    if path is None:
        there = sorted(str(each.relative_to(directory)) for each in directory.rglob("*.onnx"))
        raise SettingsError(
            f"{directory}: has no {' or '.join(names)}: there are {', '.join(there) or 'no ONNX files'}; --precision chooses the numbers of weights"
        )
    file, config = read_onnx_file(path), read_document(layout.network / CONFIG)
    store, classifies = store_of(file), classifies_texts(config)
    size = file.outputs[file.output(classifies)][-1]
    sizes = _read_any_architecture(config, store)
    # What a file makes are the vectors of the last layer: the only one that can be pooled.
    sizes = replace(
        sizes, layers=1, hidden_size=size or sizes.hidden_size, labels=size or _labels(config) if classifies else 0
    )
    if not classifies and len(file.outputs[file.output(False)]) == 2:  # the file pools
        layout = replace(layout, pooled=(Pooling.CLS,), dense=(), reads=None)
    _check_sizes(layout, sizes)
    return Checkpoint(directory, sizes, layout, store, computing.allow_pickle, file)


def _labels(config: JsonDocument) -> int:
    labels = config.values.get("id2label")
    return len(labels) if isinstance(labels, dict) else 2


def _is_for_torch_only(config: JsonDocument) -> bool:
    try:
        family = read_family(config)
    except SettingsError:
        return True
    return family not in OWN_POSITIONS and config.text("position_embedding_type", default="absolute") != "absolute"


def _read_any_architecture(config: JsonDocument, store: Store | OnnxStore) -> Architecture:
    if config.switch("is_encoder_decoder"):
        raise config.wrong(
            "is_encoder_decoder",
            True,
            f"must be false: {config.text('model_type')} has a decoder, and only encoders are served",
        )
    needed = {"hidden_size", "layers", "vocab_size"}
    sizes: dict[str, Any] = {
        name: config.integer(*keys, *MORE_NAMES.get(name, ()), default=None if name in needed else 1)
        for name, keys in SIZES.items()
    }
    classifies = any("classifier" in name or name.startswith("score") for name in store.files)
    return Architecture(
        family=config.text("model_type"),
        **sizes,
        max_length=config.integer("max_position_embeddings", "n_positions", default=512),
        type_vocab_size=config.integer("type_vocab_size", default=0, least=0),
        pad_id=config.integer("pad_token_id", default=0, least=0),
        labels=_labels(config) if classifies else 0,
        has_pooler=any(".pooler." in f".{name}" for name in store.files),
    )
