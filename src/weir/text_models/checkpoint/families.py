"""The architecture of a network, and under which names each family of networks stores its weights. configuration.py reads it from config.json.

The canonical names of weights, the same for all families:

- `embeddings.word`, `embeddings.position`, `embeddings.type`, `embeddings.norm.*`, `embeddings.projection.*` (ALBERT, ELECTRA);
- for each layer, counted from 0: `layer.0.query`, `.key`, `.value`, `.output`, `.attention_norm`, `.up`, `.down`, `.norm`; where there are any also `.gate`,
  `.query_norm`, `.key_norm`, `.attention_post_norm`, `.post_norm` (Gemma), `.position_query`, `.position_key` (DeBERTa); with experts `.router`, `.experts.*`;
- `final_norm.*`, `relative_bias` [buckets, heads] (MPNet), `distances` and `distances.norm.*` (DeBERTa);
- `pooler.*`, and the heads of classifiers by their stored names.

Matrices have torch's layout [outputs, inputs]. A name "a:1/3" is the second of three equal parts of the outputs of `a`.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from weir.text_models import Pooling


class Llama3Scaling(NamedTuple):
    """Llama 3's scaling of rotary positions: waves are stretched by `factor` if fewer than `low` of them fit into `length` tokens, and not at all if
    more than `high` do."""

    factor: float
    low: float
    high: float
    length: float


class Rotary(NamedTuple):
    """Rotary positions of one layer: pairs of numbers of queries and keys are turned by an angle that grows with the position.

    Attributes:
        theta: the base of the wavelengths.
        stretch: the factor by which NTK scaling stretches them (1: as trained).
        scaling: Llama 3's scaling, if any.
    """

    theta: float
    stretch: float = 1.0
    scaling: Llama3Scaling | None = None


class Experts(NamedTuple):
    """A mixture of experts: in some layers a router chooses, for each token, `used` of `total` feed-forward layers.

    `every`, 2 or more, is the distance between two such layers, of which the first is the layer 1.
    """

    total: int
    used: int
    every: int


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
        head_norm: whether queries and keys are normalized: head by head, or all heads as one (JinaBERT for code).
        rotary: the rotary positions of each layer; empty without.
        windows: for each layer, a token attends to tokens at smaller distances than this, 0 for all; empty if all layers attend to all.
        causal: whether a token attends to no later one.
        alibi: whether a penalty for the distance, of another slope in each head, is added in attention.
        distances: DeBERTa's attention to distances, or None.
        experts: the experts of the feed-forward layers, or None.
        classifier_reads: what a classifier reads of the last layer: the first token, the last one (decoders), the mean (ModernBERT may), or with
            NONE each token, of whose numbers the mean counts (EuroBERT).
        passed_over: the token that does not count as the last one for a classifier, as it is padding wherever it stands; -1 for none.
        projection_size: how many numbers a vector has in the space that texts and images share; 0 for a model of texts alone.
        end_id: the token at whose first position CLIP's projection reads a text; -1: the token with the highest id.
        patch_size: the side of a patch of an image, in pixels; 0 for texts.
        pair_text: the one text, with {query} and {document}, that a pair is read as; "": as two texts with special tokens.
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
    experts: Experts | None = None
    classifier_reads: Pooling = Pooling.CLS
    passed_over: int = -1
    projection_size: int = 0
    end_id: int = -1
    patch_size: int = 0
    pair_text: str = ""

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
    def mixed_layers(self) -> range:
        """The layers that have experts."""
        return range(1, self.layers, self.experts.every) if self.experts else range(0)

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
    "bidirectional_pplx_qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "eurobert": "eurobert",
    "llama": "llama",
    "llama_bidirec": "llama",
    "mistral": "mistral",
    "clip": "clip",
    "siglip": "siglip",
}
MODEL2VEC = "model2vec"  # the model_type of one that is not among FAMILIES, as it has no network
STATIC = "static"  # a table alone, see StaticStore
JINA = "jina-bert"  # has the model_type bert, and position_embedding_type alibi
JINA_CODE = "jina-code"  # so does this one, and the name of its code
JINA_CODE_NAME = "jina-bert-v2-qk-post-norm"
NOMIC_PLAIN = "nomic-plain"  # has the model_type nomic_bert, and no gate in its feed-forward layers
OWN_POSITIONS = (JINA, JINA_CODE, "gte")  # families whose position_embedding_type need not be absolute
DECODERS = ("qwen2", "qwen3", "gemma3", "llama", "mistral")

# The keys of each size in config.json: the usual one, then DistilBERT's, then those of GPT-2, which NomicBert has.
SIZES = {
    "hidden_size": ("hidden_size", "dim", "n_embd"),
    "layers": ("num_hidden_layers", "n_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_heads", "n_head"),
    "intermediate_size": ("intermediate_size", "hidden_dim", "n_inner"),
    "vocab_size": ("vocab_size",),
}

WORDS = "embeddings.word_embeddings.weight"
WORD_NAMES = (
    WORDS,
    "embeddings.tok_embeddings.weight",
    "embed_tokens.weight",
    "text_model.embeddings.token_embedding.weight",
)

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
TOWER_LAYER = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj", "output": "self_attn.out_proj",
    "attention_norm": "layer_norm1", "up": "mlp.fc1", "down": "mlp.fc2", "norm": "layer_norm2",
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
    JINA_CODE: BERT_LAYER | {
        "query_norm": "attention.self.layer_norm_q", "key_norm": "attention.self.layer_norm_k", "attention_post_norm": "layer_norm_1",
        "up": "mlp.up_gated_layer:0/2", "gate": "mlp.up_gated_layer:1/2", "down": "mlp.down_layer", "norm": "layer_norm_2",
    },
    "llama": DECODER_LAYER,
    "mistral": DECODER_LAYER,
    "qwen2": DECODER_LAYER,
    "qwen3": DECODER_LAYER | HEAD_NORMS,
    "eurobert": DECODER_LAYER,
    "gemma3": DECODER_LAYER | HEAD_NORMS | {
        "attention_post_norm": "post_attention_layernorm", "norm": "pre_feedforward_layernorm", "post_norm": "post_feedforward_layernorm",
    },
    **dict.fromkeys(("clip", "siglip", "clip-vision", "siglip-vision"), TOWER_LAYER),
}  # fmt: skip
LAYERS[NOMIC_PLAIN] = {here: there for here, there in LAYERS["nomic-bert"].items() if here != "gate"} | {
    "up": "mlp.fc1"
}
# What a layer with experts has in the place of its feed-forward layers.
EXPERTS = {
    "router.weight": "mlp.router.layer.weight",
    "experts.up": "mlp.experts.mlp.w1",
    "experts.down": "mlp.experts.mlp.w2",
    "experts.bias": "mlp.experts.bias",
}
# Where the layers of a family are; {} is their number.
ROOTS = {
    "distilbert": "transformer.layer.{}.",
    "albert": "encoder.albert_layer_groups.0.albert_layers.0.",
    "modernbert": "layers.{}.",
    **dict.fromkeys(("nomic-bert", NOMIC_PLAIN), "encoder.layers.{}."),
    **dict.fromkeys((*DECODERS, "eurobert"), "layers.{}."),
    **dict.fromkeys(("clip", "siglip"), "text_model.encoder.layers.{}."),
    **dict.fromkeys(("clip-vision", "siglip-vision"), "vision_model.encoder.layers.{}."),
}
ROOT = "encoder.layer.{}."
# The weights of a tower beside its layers. SigLIP pools an image by attention: its layer `pool` has a query of its own in place of the image's.
_TEXT_TOWER = {
    "embeddings.word": "text_model.embeddings.token_embedding.weight", "embeddings.position": "text_model.embeddings.position_embedding.weight",
    "final_norm.weight": "text_model.final_layer_norm.weight", "final_norm.bias": "text_model.final_layer_norm.bias",
}  # fmt: skip
_VISION_TOWER = {
    "patches.weight": "vision_model.embeddings.patch_embedding.weight", "embeddings.position": "vision_model.embeddings.position_embedding.weight",
    "final_norm.weight": "vision_model.post_layernorm.weight", "final_norm.bias": "vision_model.post_layernorm.bias",
}  # fmt: skip
_POOL = {
    "query.{}": "attention.in_proj_{}:0/3", "key.{}": "attention.in_proj_{}:1/3", "value.{}": "attention.in_proj_{}:2/3", "output.{}": "attention.out_proj.{}",
    "norm.{}": "layernorm.{}", "up.{}": "mlp.fc1.{}", "down.{}": "mlp.fc2.{}",
}  # fmt: skip
TOWERS: dict[str, dict[str, str]] = {
    "clip": _TEXT_TOWER | {"projection.weight": "text_projection.weight"},
    "siglip": _TEXT_TOWER | {"projection.weight": "text_model.head.weight", "projection.bias": "text_model.head.bias"},
    "clip-vision": _VISION_TOWER | {
        "class_token": "vision_model.embeddings.class_embedding", "projection.weight": "visual_projection.weight",
        "before_norm.weight": "vision_model.pre_layrnorm.weight", "before_norm.bias": "vision_model.pre_layrnorm.bias",
    },
    "siglip-vision": _VISION_TOWER | {
        "patches.bias": "vision_model.embeddings.patch_embedding.bias", "layer.pool.probe": "vision_model.head.probe",
        **{f"layer.pool.{here.format(kind)}": f"vision_model.head.{there.format(kind)}" for here, there in _POOL.items() for kind in ("weight", "bias")},
    },
}  # fmt: skip

# Families in which each weight that goes with a matrix must be there. In others, what is not stored is not added.
COMPLETE = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "electra", "albert", "deberta-v2", *TOWERS)

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
    **dict.fromkeys(("nomic-bert", NOMIC_PLAIN, "gte", JINA, JINA_CODE), ONE_LAYER_HEAD),
    **dict.fromkeys(DECODERS, ("score.weight",)),
    "eurobert": ("dense.weight", "dense.bias", *ONE_LAYER_HEAD),
    "clip": ONE_LAYER_HEAD,
    "siglip": ONE_LAYER_HEAD,
}


def weight_names(family: str, layers: int) -> dict[str, str]:
    """Return the weights that a model like BERT must have: names in the files, without prefix, by canonical name. Heads are not among them."""
    names = dict(EMBEDDINGS)
    if family in ("mpnet", "distilbert"):
        del names["embeddings.type"]
    if family == "mpnet":
        names |= RELATIVE_BIAS
    return names | _layer_names(family, layers)


def _layer_names(family: str, layers: int, mixed: Collection[int] = ()) -> dict[str, str]:
    """Return the names of the weights of all layers; those in `mixed` have experts. A part of a weight is a part of its matrix and of its bias."""
    names: dict[str, str] = {}
    for layer in range(layers):
        root = ROOTS.get(family, ROOT).format(layer)
        if layer in mixed:
            names |= {f"layer.{layer}.{here}": root + there for here, there in EXPERTS.items()}
        for here, there in LAYERS[family].items():
            if layer in mixed and here in ("up", "down"):
                continue
            stored, colon, part = there.partition(":")
            for kind in ("weight", "bias"):
                names[f"layer.{layer}.{here}.{kind}"] = f"{root}{stored}.{kind}{colon}{part}"
    return names


def names_of(architecture: Architecture) -> dict[str, str]:
    """Return the names in the files, without prefix, of all weights that a network of this architecture may have, by canonical name."""
    family = architecture.family
    layers = 1 if architecture.shared_layers else architecture.layers
    if family in (*DECODERS, "eurobert"):
        names = {"embeddings.word": "embed_tokens.weight", "final_norm.weight": "norm.weight"}
    elif family in TOWERS:
        names = dict(TOWERS[family])
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
        if family in ("nomic-bert", NOMIC_PLAIN):
            names |= {"embeddings.norm.weight": "emb_ln.weight", "embeddings.norm.bias": "emb_ln.bias"}
        if not architecture.position_table:
            del names["embeddings.position"]
        if not architecture.type_vocab_size:
            del names["embeddings.type"]
    if architecture.relative_buckets:
        names |= RELATIVE_BIAS
    if architecture.embedding_size:
        names |= {f"embeddings.projection.{kind}": f"{PROJECTIONS[family]}.{kind}" for kind in ("weight", "bias")}
    names |= _layer_names(family, layers, architecture.mixed_layers)
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
