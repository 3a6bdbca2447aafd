"""The architecture of a network, how each family of networks states it in config.json, and under which names it stores its weights.

The canonical names of weights, the same for all families:

- `embeddings.word`, `embeddings.position`, `embeddings.type`, `embeddings.norm.*`, `embeddings.projection.*` (ALBERT, ELECTRA);
- for each layer, counted from 0: `layer.0.query`, `.key`, `.value`, `.output`, `.attention_norm`, `.up`, `.down`, `.norm`; where there are any also `.gate`,
  `.query_norm`, `.key_norm`, `.attention_post_norm`, `.post_norm` (Gemma), `.position_query`, `.position_key` (DeBERTa);
- `final_norm.*`, `relative_bias` [buckets, heads] (MPNet), `distances` and `distances.norm.*` (DeBERTa);
- `pooler.*`, and the heads of classifiers by their stored names.

Matrices have torch's layout [outputs, inputs]. A name "a:1/3" is the second of three equal parts of the outputs of `a`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from weir.errors import SettingsError
from weir.text_models import Pooling
from weir.text_models.formats import JsonDocument


class Rotary(NamedTuple):
    """Rotary positions of one layer: pairs of numbers of queries and keys are turned by an angle that grows with the position.

    Attributes:
        theta: the base of the wavelengths.
        stretch: the factor by which NTK scaling stretches them (1: as trained).
    """

    theta: float
    stretch: float = 1.0


class Distances(NamedTuple):
    """DeBERTa's attention to distances: in addition to words with words, words with distances are compared.

    Attributes:
        span: how many distances to each side have an embedding.
        buckets: how many buckets of distances there are to each side, which widen with the distance; 0 if each distance stands alone.
        longest: the distance at which buckets end.
        to_position, from_position: whether the word of the query is compared with the distance (c2p), and that of the key (p2c).
        shared: whether the matrices for words are those for distances, too.
        normed: whether the embeddings of distances are normalized.
    """

    span: int
    buckets: int
    longest: int
    to_position: bool
    from_position: bool
    shared: bool
    normed: bool


@dataclass(frozen=True)
class Architecture:
    """The architecture of a network: everything that its computation depends on, except the weights.

    Attributes:
        family: one of the values of FAMILIES; for the torch runtime any model_type.
        hidden_size, layers, heads, intermediate_size, vocab_size: as in config.json.
        max_length: the most tokens of a text, special tokens included: as many as there are positions.
        position_offset: the token at index p has the position embedding p + position_offset. If the offset is not 0, the token with the id
            position_offset - 1 is padding wherever it stands: that number is also its position, and it is not counted in the indices of others.
        type_vocab_size: how many token types there are; 0 if the network has no token type embeddings.
        epsilon: the constant in layer normalization.
        activation: the activation of the feed-forward layers, by its name in config.json.
        pad_id: the id of the padding token.
        relative_buckets: how many buckets of distances MPNet's attention has; 0 in all other families.
        labels: how many outputs the classifier has; 0 if there is none.
        has_pooler: whether there are weights of a pooler, a dense layer on the first token.
        embedding_size: the size of the embeddings of words if a dense layer makes the hidden size of it, as in ALBERT and ELECTRA; else 0.
        embedding_scale: the factor of the embeddings of words.
        position_table: whether there are position embeddings that are added to those of words.
        shared_layers: whether all layers have the weights of the first, as in ALBERT.
        order: where a layer normalizes: "post", after the sum with the residual (BERT); "pre", before attention and before the feed-forward layers;
            "both", before and after each of the two (Gemma); "static" for a network without layers.
        final_norm: whether the output of the last layer is normalized.
        rms: whether normalization divides by the root of the mean square alone; norm_offset is added to its factors.
        gated: whether the feed-forward layer multiplies an activated gate with a second product.
        key_value_heads: how many heads keys and values have; 0 for as many as queries.
        head_size: the size of a head; 0 for hidden_size / heads.
        query_scale: the factor of products of queries and keys; 0 for 1 / sqrt(head size).
        head_norm: whether queries and keys are normalized head by head.
        rotary: the rotary positions of each layer; empty without.
        windows: for each layer, a token attends to tokens at smaller distances than this, 0 for all; empty if all layers attend to all.
        causal: whether a token attends to no later one.
        alibi: whether a penalty for the distance, of another slope in each head, is added in attention.
        distances: DeBERTa's attention to distances, or None.
        classifier_reads: what a classifier reads of the last layer: the first token, the last one (decoders), the mean (ModernBERT may), or with
            NONE each token, of whose numbers the mean counts (EuroBERT).
        passed_over: the token that does not count as the last one for a classifier, as it is padding wherever it stands; -1 for none.
    """

    family: str
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    vocab_size: int
    max_length: int
    position_offset: int = 0
    type_vocab_size: int = 2
    epsilon: float = 1e-12
    activation: str = "gelu"
    pad_id: int = 0
    relative_buckets: int = 0
    labels: int = 0
    has_pooler: bool = False
    embedding_size: int = 0
    embedding_scale: float = 1.0
    position_table: bool = True
    shared_layers: bool = False
    order: str = "post"
    final_norm: bool = False
    rms: bool = False
    norm_offset: float = 0.0
    gated: bool = False
    key_value_heads: int = 0
    head_size: int = 0
    query_scale: float = 0.0
    head_norm: bool = False
    rotary: tuple[Rotary, ...] = ()
    windows: tuple[int, ...] = ()
    causal: bool = False
    alibi: bool = False
    distances: Distances | None = None
    classifier_reads: Pooling = Pooling.CLS
    passed_over: int = -1

    @property
    def like_bert(self) -> bool:
        """Whether its layers are computed as those of BERT, but for their positions."""
        return self.order == "post" and not (self.gated or self.rotary or self.alibi or self.distances)

    @property
    def size_of_head(self) -> int:
        """The size of a head."""
        return self.head_size or self.hidden_size // self.heads

    @property
    def attended_heads(self) -> int:
        """How many heads keys and values have."""
        return self.key_value_heads or self.heads

    @property
    def scale(self) -> float:
        """The factor of products of queries and keys."""
        return self.query_scale or 1.0 / math.sqrt(self.size_of_head)


# The supported values of model_type in config.json, and the family of each: models of one family compute in the same way. MiniLM, E5, BGE and GTE
# have the type bert or xlm-roberta.
FAMILIES = {
    "bert": "bert",
    "roberta": "roberta",
    "camembert": "roberta",
    "xlm-roberta": "xlm-roberta",
    "distilbert": "distilbert",
    "mpnet": "mpnet",
    "electra": "electra",
    "albert": "albert",
    "deberta-v2": "deberta-v2",
    "modernbert": "modernbert",
    "nomic_bert": "nomic-bert",
    "new": "gte",
    "gte": "gte",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "eurobert": "eurobert",
}
MODEL2VEC = "model2vec"  # the model_type of one that is not among FAMILIES, as it has no network
STATIC = "static"  # a table alone, see StaticStore
JINA = "jina-bert"  # has the model_type bert, and position_embedding_type alibi

# The keys of each size in config.json: the usual one, then DistilBERT's, then those of GPT-2, which NomicBert has.
SIZES = {
    "hidden_size": ("hidden_size", "dim", "n_embd"),
    "layers": ("num_hidden_layers", "n_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_heads", "n_head"),
    "intermediate_size": ("intermediate_size", "hidden_dim", "n_inner"),
    "vocab_size": ("vocab_size",),
}

WORDS = "embeddings.word_embeddings.weight"
WORD_NAMES = (WORDS, "embeddings.tok_embeddings.weight", "embed_tokens.weight")

EMBEDDINGS = {
    "embeddings.word": WORDS,
    "embeddings.position": "embeddings.position_embeddings.weight",
    "embeddings.type": "embeddings.token_type_embeddings.weight",
    "embeddings.norm.weight": "embeddings.LayerNorm.weight",
    "embeddings.norm.bias": "embeddings.LayerNorm.bias",
}

BERT_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
DECODER_LAYER = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj", "output": "self_attn.o_proj",
    "attention_norm": "input_layernorm", "up": "mlp.up_proj", "gate": "mlp.gate_proj", "down": "mlp.down_proj", "norm": "post_attention_layernorm",
}  # fmt: skip
HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
LAYERS: dict[str, dict[str, str]] = {
    "bert": BERT_LAYER,
    "roberta": BERT_LAYER,
    "xlm-roberta": BERT_LAYER,
    "electra": BERT_LAYER,
    "mpnet": BERT_LAYER | {
        "query": "attention.attn.q", "key": "attention.attn.k", "value": "attention.attn.v",
        "output": "attention.attn.o", "attention_norm": "attention.LayerNorm",
    },
    "distilbert": {
        "query": "attention.q_lin", "key": "attention.k_lin", "value": "attention.v_lin",
        "output": "attention.out_lin", "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1", "down": "ffn.lin2", "norm": "output_layer_norm",
    },
    "albert": {
        "query": "attention.query", "key": "attention.key", "value": "attention.value", "output": "attention.dense",
        "attention_norm": "attention.LayerNorm", "up": "ffn", "down": "ffn_output", "norm": "full_layer_layer_norm",
    },
    "deberta-v2": BERT_LAYER | {
        "query": "attention.self.query_proj", "key": "attention.self.key_proj", "value": "attention.self.value_proj",
    },
    "modernbert": {
        "query": "attn.Wqkv:0/3", "key": "attn.Wqkv:1/3", "value": "attn.Wqkv:2/3", "output": "attn.Wo", "attention_norm": "attn_norm",
        "gate": "mlp.Wi:0/2", "up": "mlp.Wi:1/2", "down": "mlp.Wo", "norm": "mlp_norm",
    },
    "nomic-bert": {
        "query": "attn.Wqkv:0/3", "key": "attn.Wqkv:1/3", "value": "attn.Wqkv:2/3", "output": "attn.out_proj", "attention_norm": "norm1",
        "up": "mlp.fc11", "gate": "mlp.fc12", "down": "mlp.fc2", "norm": "norm2",
    },
    "gte": {
        "query": "attention.qkv_proj:0/3", "key": "attention.qkv_proj:1/3", "value": "attention.qkv_proj:2/3", "output": "attention.o_proj",
        "attention_norm": "attn_ln", "up": "mlp.up_gate_proj:0/2", "gate": "mlp.up_gate_proj:1/2", "down": "mlp.down_proj", "norm": "mlp_ln",
    },
    JINA: BERT_LAYER | {
        "gate": "mlp.gated_layers:0/2", "up": "mlp.gated_layers:1/2", "down": "mlp.wo", "norm": "mlp.layernorm",
    },
    "qwen2": DECODER_LAYER,
    "qwen3": DECODER_LAYER | HEAD_NORMS,
    "eurobert": DECODER_LAYER,
    "gemma3": DECODER_LAYER | HEAD_NORMS | {
        "attention_post_norm": "post_attention_layernorm", "norm": "pre_feedforward_layernorm", "post_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
# Where the layers of a family are; {} is their number.
ROOTS = {
    "distilbert": "transformer.layer.{}.",
    "albert": "encoder.albert_layer_groups.0.albert_layers.0.",
    "modernbert": "layers.{}.",
    "nomic-bert": "encoder.layers.{}.",
    "qwen2": "layers.{}.",
    "qwen3": "layers.{}.",
    "gemma3": "layers.{}.",
    "eurobert": "layers.{}.",
}
ROOT = "encoder.layer.{}."
# Families in which each weight that goes with a matrix must be there. In others, what is not stored is not added.
COMPLETE = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "electra", "albert", "deberta-v2")

POOLER = {"pooler.weight": "pooler.dense.weight", "pooler.bias": "pooler.dense.bias"}
ALBERT_POOLER = {"pooler.weight": "pooler.weight", "pooler.bias": "pooler.bias"}
RELATIVE_BIAS = {"relative_bias": "encoder.relative_attention_bias.weight"}
PROJECTIONS = {
    "electra": "embeddings_project",
    "albert": "encoder.embedding_hidden_mapping_in",
    "deberta-v2": "embeddings.embed_proj",
}

ONE_LAYER_HEAD = ("classifier.weight", "classifier.bias")
TWO_LAYER_HEAD = (
    "classifier.dense.weight",
    "classifier.dense.bias",
    "classifier.out_proj.weight",
    "classifier.out_proj.bias",
)
HEADS: dict[str, tuple[str, ...]] = {
    "bert": ONE_LAYER_HEAD,
    "roberta": TWO_LAYER_HEAD,
    "xlm-roberta": TWO_LAYER_HEAD,
    "mpnet": TWO_LAYER_HEAD,
    "electra": TWO_LAYER_HEAD,
    "distilbert": ("pre_classifier.weight", "pre_classifier.bias", *ONE_LAYER_HEAD),
    "albert": ONE_LAYER_HEAD,
    "deberta-v2": ("pooler.dense.weight", "pooler.dense.bias", *ONE_LAYER_HEAD),
    "modernbert": ("head.dense.weight", "head.norm.weight", *ONE_LAYER_HEAD),
    "nomic-bert": ONE_LAYER_HEAD,
    "gte": ONE_LAYER_HEAD,
    JINA: ONE_LAYER_HEAD,
    "qwen2": ("score.weight",),
    "qwen3": ("score.weight",),
    "gemma3": ("score.weight",),
    "eurobert": ("dense.weight", "dense.bias", *ONE_LAYER_HEAD),
}


def weight_names(family: str, layers: int) -> dict[str, str]:
    """Return the weights that a model like BERT must have: names in the files, without prefix, by canonical name. Heads are not among them."""
    names = dict(EMBEDDINGS)
    if family in ("mpnet", "distilbert"):
        del names["embeddings.type"]
    if family == "mpnet":
        names |= RELATIVE_BIAS
    return names | _layer_names(family, layers)


def _layer_names(family: str, layers: int) -> dict[str, str]:
    """Return the names of the weights of all layers. A part of a weight is a part of its matrix and of its bias."""
    names = {}
    for layer in range(layers):
        root = ROOTS.get(family, ROOT).format(layer)
        for here, there in LAYERS[family].items():
            stored, colon, part = there.partition(":")
            for kind in ("weight", "bias"):
                names[f"layer.{layer}.{here}.{kind}"] = f"{root}{stored}.{kind}{colon}{part}"
    return names


def names_of(architecture: Architecture) -> dict[str, str]:
    """Return the names in the files, without prefix, of all weights that a network of this architecture may have, by canonical name."""
    family = architecture.family
    layers = 1 if architecture.shared_layers else architecture.layers
    if family in ("qwen2", "qwen3", "gemma3", "eurobert"):
        names = {"embeddings.word": "embed_tokens.weight", "final_norm.weight": "norm.weight"}
    elif family == "modernbert":
        names = {
            "embeddings.word": "embeddings.tok_embeddings.weight",
            "embeddings.norm.weight": "embeddings.norm.weight",
            "embeddings.norm.bias": "embeddings.norm.bias",
            "final_norm.weight": "final_norm.weight",
            "final_norm.bias": "final_norm.bias",
        }
    else:
        names = dict(EMBEDDINGS)
        if family == "nomic-bert":
            names |= {"embeddings.norm.weight": "emb_ln.weight", "embeddings.norm.bias": "emb_ln.bias"}
        if not architecture.position_table:
            del names["embeddings.position"]
        if not architecture.type_vocab_size:
            del names["embeddings.type"]
    if architecture.relative_buckets:
        names |= RELATIVE_BIAS
    if architecture.embedding_size:
        names |= {f"embeddings.projection.{kind}": f"{PROJECTIONS[family]}.{kind}" for kind in ("weight", "bias")}
    names |= _layer_names(family, layers)
    if architecture.distances is not None:
        names |= _distance_names(architecture.distances, layers)
    return names


def _distance_names(distances: Distances, layers: int) -> dict[str, str]:
    names = {"distances": "encoder.rel_embeddings.weight"}
    if distances.normed:
        names |= {f"distances.norm.{kind}": f"encoder.LayerNorm.{kind}" for kind in ("weight", "bias")}
    used = [
        ("position_key", "pos_key_proj", distances.to_position),
        ("position_query", "pos_query_proj", distances.from_position),
    ]
    for layer in range(0 if distances.shared else layers):
        for here, there, is_used in used:
            if is_used:
                root = ROOT.format(layer)
                names |= {
                    f"layer.{layer}.{here}.{kind}": f"{root}attention.self.{there}.{kind}"
                    for kind in ("weight", "bias")
                }
    return names


def read_family(config: JsonDocument) -> str:
    """Return the family of a config.json's model_type. Raises SettingsError naming the supported types."""
    kind = config.text("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        others = "others are served from an ONNX file that the model has, or with --runtime torch"
        raise config.not_computed("model_type", kind, f"must be one of {known}", others)
    if kind == "bert" and config.text("position_embedding_type", default="absolute") == "alibi":
        return JINA
    return FAMILIES[kind]


def read_architecture(config: JsonDocument, *, has_pooler: bool, has_classifier: bool) -> Architecture:
    """Return the architecture of a config.json, given whether the weights hold a pooler and a classifier.

    Raises SettingsError naming the file, the key and the rule: a size is missing, sizes do not fit each other, or the model is a variant of its
    family that computes differently, such as a decoder.
    """
    family = read_family(config)
    _refuse_variants(config, family)
    sizes: dict[str, Any] = {name: config.integer(*keys) for name, keys in SIZES.items()}
    if "head_dim" not in config and sizes["hidden_size"] % sizes["heads"]:
        raise config.wrong("num_attention_heads", sizes["heads"], f"must divide the hidden size {sizes['hidden_size']}")
    heads = {"labels": _label_count(config) if has_classifier else 0, "has_pooler": has_pooler}
    return READERS.get(family, _read_like_bert)(config, {"family": family, **sizes, **heads})


def _refuse_variants(config: JsonDocument, family: str) -> None:
    kind = config.text("position_embedding_type", default="absolute")
    if kind != "absolute" and family not in (JINA, "gte"):
        raise config.not_computed("position_embedding_type", kind, "must be absolute")
    for key in ("is_decoder", "add_cross_attention"):
        if config.switch(key):
            raise config.wrong(key, True, "must be false: a text is encoded by encoders")


def _label_count(config: JsonDocument) -> int:
    names = config.values.get("id2label")
    if names is None:
        return config.integer("num_labels", default=2)
    if not isinstance(names, dict) or not names:
        raise SettingsError(f"{config.path}: id2label={names!r}: must name at least one label by its number")
    return len(names)


def _read_like_bert(config: JsonDocument, known: dict[str, Any]) -> Architecture:
    family = known["family"]
    distil, mpnet = family == "distilbert", family == "mpnet"
    from_zero = family in ("bert", "distilbert", "electra", "albert")
    pad_id = config.integer("pad_token_id", default=0 if from_zero else 1, least=0)
    # MPNet's positions begin at 2 whatever its padding id is.
    offset = 0 if from_zero else 2 if mpnet else pad_id + 1
    positions = config.integer("max_position_embeddings", default=512)
    if positions <= offset + 2:
        raise config.wrong("max_position_embeddings", positions, f"must be more than {offset + 2}")
    architecture = Architecture(
        **known,
        max_length=positions - offset,
        position_offset=offset,
        type_vocab_size=0 if distil or mpnet else config.integer("type_vocab_size", default=2),
        epsilon=1e-12 if distil else config.number("layer_norm_eps", default=1e-12),
        activation=config.text("hidden_act", "activation", default="gelu_new" if family == "albert" else "gelu"),
        pad_id=pad_id,
        relative_buckets=config.integer("relative_attention_num_buckets", default=32) if mpnet else 0,
        embedding_size=_embedding_size(config, known) if family in PROJECTIONS else 0,
        shared_layers=family == "albert",
    )
    for key in ("num_hidden_groups", "inner_group_num"):
        if family == "albert" and config.integer(key, default=1) != 1:
            raise config.not_computed(key, config.values[key], "must be 1")
    return architecture


def _embedding_size(config: JsonDocument, known: dict[str, Any]) -> int:
    """Return the size of the embeddings if a dense layer follows them: always in ALBERT, in other families if the sizes differ."""
    size = config.integer(
        "embedding_size", default=128 if known["family"] in ("albert", "electra") else known["hidden_size"]
    )
    return 0 if size == known["hidden_size"] and known["family"] != "albert" else size


class Defaults(NamedTuple):
    """What the config.json of a family may leave out, and which value then holds. `types` is None for a family without types of tokens."""

    max_length: int
    types: int | None
    epsilon: float
    activation: str
    pad_id: int = 0


DEFAULTS = {
    "deberta-v2": Defaults(512, 0, 1e-7, "gelu"),
    "modernbert": Defaults(8192, None, 1e-5, "gelu", 50283),
    "nomic-bert": Defaults(2048, 2, 1e-12, "silu"),
    "gte": Defaults(8192, 1, 1e-12, "gelu"),
    JINA: Defaults(8192, 2, 1e-12, "gelu"),
    "qwen2": Defaults(32768, None, 1e-6, "silu"),
    "qwen3": Defaults(32768, None, 1e-6, "silu"),
    "gemma3": Defaults(32768, None, 1e-6, "gelu_pytorch_tanh"),
    "eurobert": Defaults(8192, None, 1e-5, "silu"),
}


def _usual_architecture(config: JsonDocument, known: dict[str, Any]) -> Architecture:
    """Return what all families in DEFAULTS state alike; each adds its own."""
    usual = DEFAULTS[known["family"]]
    return Architecture(
        **known,
        max_length=config.integer("max_position_embeddings", "n_positions", default=usual.max_length),
        type_vocab_size=0 if usual.types is None else config.integer("type_vocab_size", default=usual.types, least=0),
        epsilon=config.number(
            "norm_eps", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=usual.epsilon
        ),
        activation=config.text("hidden_activation", "hidden_act", "activation_function", default=usual.activation),
        pad_id=config.integer("pad_token_id", default=usual.pad_id, least=0),
        position_table=False,
    )


def _read_deberta(config: JsonDocument, known: dict[str, Any]) -> Architecture:
    if not config.switch("relative_attention"):
        raise config.not_computed("relative_attention", False, "must be true")
    if config.values.get("conv_kernel_size") or config.values.get("attention_head_size"):
        raise config.not_computed("conv_kernel_size", config.values.get("conv_kernel_size"), "must be 0")
    if config.text("pooler_hidden_act", default="gelu") != "gelu":
        raise config.not_computed("pooler_hidden_act", config.values["pooler_hidden_act"], "must be gelu")
    usual = _usual_architecture(config, known)
    kinds = config.values.get("pos_att_type") or []
    kinds = [kind.strip() for kind in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    longest = config.integer("max_relative_positions", default=-1, least=-1)
    longest = usual.max_length if longest < 1 else longest
    buckets = max(config.integer("position_buckets", default=-1, least=-1), 0)
    return replace(
        usual,
        embedding_size=_embedding_size(config, known),
        position_table=config.switch("position_biased_input", default=True),
        distances=Distances(
            span=buckets or longest,
            buckets=buckets,
            longest=longest,
            to_position="c2p" in kinds,
            from_position="p2c" in kinds,
            shared=config.switch("share_att_key"),
            normed="layer_norm" in config.text("norm_rel_ebd", default="none"),
        ),
    )


def _thetas(config: JsonDocument, kind: str, old_key: str, default: float) -> Rotary:
    """Return the rotary positions of layers of a kind ("full_attention", "sliding_attention"), which newer files state by kind.

    Raises SettingsError for scaled positions.
    """
    stated = config.values.get("rope_parameters")
    stated = stated.get(kind, stated) if isinstance(stated, dict) else {}
    scaling = stated or config.values.get("rope_scaling") or {}
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise config.not_computed("rope_scaling", scaling, "must be null")
    return Rotary(
        JsonDocument(config.path, {**config.values, **stated}).number(
            "rope_theta" if stated else old_key, default=default
        )
    )


def _sliding(config: JsonDocument, layers: int, every: int, first: int) -> list[bool]:
    """Return for each layer whether it attends to near tokens alone: as layer_types states, else all but each `every`-th from `first`."""
    stated = config.values.get("layer_types")
    if stated is None:
        return [layer % every != first for layer in range(layers)]
    if not (
        isinstance(stated, list) and len(stated) == layers and set(stated) <= {"full_attention", "sliding_attention"}
    ):
        raise config.wrong(
            "layer_types", stated, f"must name full_attention or sliding_attention for each of {layers} layers"
        )
    return [kind == "sliding_attention" for kind in stated]


def _read_modernbert(config: JsonDocument, known: dict[str, Any]) -> Architecture:
    layers = known["layers"]
    reads = config.text("classifier_pooling", default="cls")
    if reads not in ("cls", "mean"):
        raise config.wrong("classifier_pooling", reads, "must be cls or mean")
    sliding = _sliding(config, layers, config.integer("global_attn_every_n_layers", default=3), 0)
    near = config.integer("local_attention", default=128) // 2 + 1
    everywhere = _thetas(config, "full_attention", "global_rope_theta", 160_000.0)
    local = _thetas(config, "sliding_attention", "local_rope_theta", 10_000.0)
    return replace(
        _usual_architecture(config, known),
        order="pre",
        final_norm=True,
        gated=True,
        rotary=tuple(local if is_local else everywhere for is_local in sliding),
        windows=tuple(near if is_local else 0 for is_local in sliding),
        classifier_reads=Pooling(reads),
    )


def _read_nomic(config: JsonDocument, known: dict[str, Any]) -> Architecture:
    if config.switch("prenorm") or config.switch("use_rms_norm") or config.switch("rotary_emb_interleaved"):
        raise config.wrong("prenorm", True, "must be false, and so must use_rms_norm and rotary_emb_interleaved")
    if config.number("rotary_emb_fraction", default=1.0) != 1.0:
        raise config.wrong("rotary_emb_fraction", config.values["rotary_emb_fraction"], "must be 1")
    usual = _usual_architecture(config, known)
    longest = usual.max_length
    if config.values.get("rotary_scaling_factor"):  # longer texts would change the positions of all tokens
        longest = min(longest, config.integer("max_trained_positions", default=2048))
    theta = config.number("rotary_emb_base", default=0.0001)
    return replace(
        usual,
        max_length=longest,
        activation={"swiglu": "silu", "geglu": "gelu"}.get(usual.activation, usual.activation),
        gated=True,
        rotary=(Rotary(theta) if theta > 1 else _thetas(config, "full_attention", "rope_theta", 1000.0),)
        * known["layers"],
    )


def _read_gte(config: JsonDocument, known: dict[str, Any]) -> Architecture:
    if config.text("layer_norm_type", default="layer_norm") != "layer_norm":
        raise config.wrong("layer_norm_type", config.values["layer_norm_type"], "must be layer_norm")
    if config.text("position_embedding_type", default="rope") not in ("rope", "absolute"):
        raise config.wrong("position_embedding_type", config.values["position_embedding_type"], "must be rope")
    if config.switch("logn_attention_scale"):
        raise config.not_computed("logn_attention_scale", True, "must be false")
    scaling = config.values.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") == "ntk" and "mixed_b" not in scaling:
        factor = JsonDocument(config.path, scaling).number("factor", default=1.0)
        rotary = Rotary(config.number("rope_theta", default=10_000.0), factor)
    else:
        rotary = _thetas(config, "full_attention", "rope_theta", 160_000.0 if "rope_parameters" in config else 10_000.0)
    return replace(_usual_architecture(config, known), gated=True, rotary=(rotary,) * known["layers"])


def _read_jina(config: JsonDocument, known: dict[str, Any]) -> Architecture:
    kind = config.text("feed_forward_type", default="original")
    if kind not in ("geglu", "reglu"):
        raise config.wrong("feed_forward_type", kind, "must be geglu or reglu")
    usual = _usual_architecture(config, known)
    return replace(
        usual,
        max_length=config.integer("model_max_length", default=usual.max_length),
        activation={"geglu": "gelu", "reglu": "relu"}[kind],
        gated=True,
        alibi=True,
    )


def _read_decoder(config: JsonDocument, known: dict[str, Any]) -> Architecture:
    """Read Qwen2, Qwen3 or Gemma 3. As an encoder, it may attend to later tokens too (is_causal, use_bidirectional_attention)."""
    family, layers = known["family"], known["layers"]
    gemma = family == "gemma3"
    head_size = config.integer("head_dim", default=256 if gemma else known["hidden_size"] // known["heads"])
    attended = config.integer("num_key_value_heads", default=4 if gemma else known["heads"])
    if known["heads"] % attended:
        raise config.wrong("num_key_value_heads", attended, f"must divide the {known['heads']} heads")
    causal = not config.switch("use_bidirectional_attention") and config.switch("is_causal", default=True)
    everywhere = _thetas(config, "full_attention", "rope_theta", 1e6 if gemma else 10_000.0)
    sliding, near, local = [False] * layers, 0, everywhere
    if gemma:
        sliding = _sliding(config, layers, 6, 5)
        near = config.integer("sliding_window", default=4096)
        near = near if causal else near // 2 + 1
        local = _thetas(config, "sliding_attention", "rope_local_base_freq", 10_000.0)
    elif config.switch("use_sliding_window"):
        from_layer = config.integer("max_window_layers", default=28, least=0)
        sliding = (
            _sliding(config, layers, 1, 1)
            if "layer_types" in config
            else [layer >= from_layer for layer in range(layers)]
        )
        near = config.integer("sliding_window", default=4096)
    if softcapping := config.values.get("attn_logit_softcapping"):
        raise config.not_computed("attn_logit_softcapping", softcapping, "must be null")
    return replace(
        _usual_architecture(config, known),
        embedding_scale=known["hidden_size"] ** 0.5 if gemma else 1.0,
        order="both" if gemma else "pre",
        final_norm=True,
        rms=True,
        norm_offset=1.0 if gemma else 0.0,
        gated=True,
        key_value_heads=attended,
        head_size=head_size,
        query_scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5 if gemma else 0.0,
        head_norm=family != "qwen2",
        rotary=tuple(local if is_local else everywhere for is_local in sliding),
        windows=tuple(near if is_local else 0 for is_local in sliding) if any(sliding) else (),
        causal=causal,
        classifier_reads=Pooling.SEP,
        passed_over=config.integer("pad_token_id", least=0) if "pad_token_id" in config else -1,
    )


def _read_eurobert(config: JsonDocument, known: dict[str, Any]) -> Architecture:
    for key in ("attention_bias", "mlp_bias"):
        if config.switch(key):
            raise config.not_computed(key, True, "must be false")
    attended = config.integer("num_key_value_heads", default=known["heads"])
    if known["heads"] % attended:
        raise config.wrong("num_key_value_heads", attended, f"must divide the {known['heads']} heads")
    reads = config.text("classifier_pooling", default="late")
    if reads not in EUROBERT_READS:
        raise config.wrong("classifier_pooling", reads, f"must be one of {', '.join(EUROBERT_READS)}")
    return replace(
        _usual_architecture(config, known),
        order="pre",
        final_norm=True,
        rms=True,
        gated=True,
        key_value_heads=attended,
        head_size=config.integer("head_dim", default=known["hidden_size"] // known["heads"]),
        rotary=(_thetas(config, "full_attention", "rope_theta", 250_000.0),) * known["layers"],
        classifier_reads=EUROBERT_READS[reads],
    )


# What EuroBERT's classifier reads, by classifier_pooling: "late" computes a number for each token, and their mean.
EUROBERT_READS = {"bos": Pooling.CLS, "mean": Pooling.MEAN, "late": Pooling.NONE}
READERS: Mapping[str, Callable[[JsonDocument, dict[str, Any]], Architecture]] = {
    "deberta-v2": _read_deberta, "modernbert": _read_modernbert, "nomic-bert": _read_nomic, "gte": _read_gte, JINA: _read_jina,
    "qwen2": _read_decoder, "qwen3": _read_decoder, "gemma3": _read_decoder, "eurobert": _read_eurobert,
}  # fmt: skip
