"""How the config.json of each family of networks states the architecture. The families themselves, and the names of their weights, are in families.py."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from weir.errors import SettingsError
from weir.text_models import Pooling
from weir.text_models.checkpoint.families import (
    DECODERS,
    FAMILIES,
    JINA,
    JINA_CODE,
    JINA_CODE_NAME,
    NOMIC_PLAIN,
    OWN_POSITIONS,
    PROJECTIONS,
    SIZES,
    Architecture,
    Distances,
    Experts,
    Llama3Scaling,
    Rotary,
)
from weir.text_models.formats import JsonDocument


def read_family(config: JsonDocument) -> str:
    """Return the family of a config.json's model_type. Raises SettingsError naming the supported types."""
    kind = config.text("model_type")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        others = "others are served from an ONNX file that the model has, or with --runtime torch"
        raise config.not_computed("model_type", kind, f"must be one of {known}", others)
    if kind == "bert" and config.text("position_embedding_type", default="absolute") == "alibi":
        named = f"{config.values.get('_name_or_path')} {config.values.get('auto_map')}"
        return JINA_CODE if JINA_CODE_NAME in named else JINA
    if kind == "nomic_bert" and not config.text("activation_function", default="swiglu").endswith("glu"):
        return NOMIC_PLAIN
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
    if sizes["layers"] > MOST_LAYERS:
        raise config.wrong("num_hidden_layers", sizes["layers"], f"must be at most {MOST_LAYERS:,}")
    heads = {"labels": _label_count(config) if has_classifier else 0, "has_pooler": has_pooler}
    return READERS.get(family, _read_like_bert)(config, {"family": family, **sizes, **heads})


def _refuse_variants(config: JsonDocument, family: str) -> None:
    kind = config.text("position_embedding_type", default="absolute")
    if kind != "absolute" and family not in OWN_POSITIONS:
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


MOST_LAYERS = 1_000  # a few bytes of JSON must not take much memory
MOST_POSITIONS = 1 << 20  # of which a table is made


class Defaults(NamedTuple):
    """The keys that the config.json of a family may leave out, and the value that then holds. `types` is None for a family without types of tokens."""

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
    NOMIC_PLAIN: Defaults(2048, 2, 1e-12, "gelu"),
    **dict.fromkeys((JINA, JINA_CODE), Defaults(8192, 2, 1e-12, "gelu")),
    "llama": Defaults(2048, None, 1e-6, "silu"),
    "mistral": Defaults(131_072, None, 1e-6, "silu"),
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
        max_length=min(
            config.integer("max_position_embeddings", "n_positions", default=usual.max_length), MOST_POSITIONS
        ),
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

    Raises SettingsError for positions that are scaled in another way than Llama 3's.
    """
    stated = config.values.get("rope_parameters")
    stated = stated.get(kind, stated) if isinstance(stated, dict) else {}
    if not isinstance(stated, dict):
        raise config.wrong("rope_parameters", config.values["rope_parameters"], f"must state {kind} as an object")
    scaling = stated or config.values.get("rope_scaling") or {}
    of_type = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else "default"
    if of_type not in ("default", "llama3"):
        raise config.not_computed("rope_scaling", scaling, "must be null or of the type llama3")
    theta = JsonDocument(config.path, {**config.values, **stated}).number(
        "rope_theta" if stated else old_key, default=default
    )
    return Rotary(theta, scaling=_llama3(JsonDocument(config.path, scaling)) if of_type == "llama3" else None)


def _llama3(config: JsonDocument) -> Llama3Scaling:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    scaling = Llama3Scaling(*map(config.number, keys))
    if scaling.low >= scaling.high:
        raise config.wrong("low_freq_factor", scaling.low, f"must be less than high_freq_factor={scaling.high}")
    return scaling


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
        gated=known["family"] != NOMIC_PLAIN,
        experts=_read_experts(config),
        rotary=(Rotary(theta) if theta > 1 else _thetas(config, "full_attention", "rope_theta", 1000.0),)
        * known["layers"],
    )


def _read_experts(config: JsonDocument) -> Experts | None:
    """Return the experts of NomicBERT, if it has any. Raises SettingsError for experts that differ from those of nomic-embed-text-v2-moe."""
    every = config.integer("moe_every_n_layers", default=0, least=0)
    if every < 2:
        return None
    for key in ("expert_choice_router", "moe_normalize_expert_weights", "num_shared_experts"):
        if config.values.get(key):
            raise config.wrong(key, config.values[key], "must be false or 0: such experts are not computed")
    experts = Experts(config.integer("num_experts"), config.integer("moe_top_k"), every)
    if experts.used > experts.total:
        raise config.wrong("moe_top_k", experts.used, f"must be at most num_experts={experts.total}")
    return experts


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
        head_norm=known["family"] == JINA_CODE,
    )


def _read_decoder(config: JsonDocument, known: dict[str, Any]) -> Architecture:
    """Read one of DECODERS. As an encoder, it may attend to later tokens too (is_causal, use_bidirectional_attention, the types of such encoders)."""
    family, layers = known["family"], known["layers"]
    gemma, mistral = family == "gemma3", family == "mistral"
    both_ways = config.text("model_type") in ENCODERS or config.switch("use_bidirectional_attention")
    head_size = config.integer("head_dim", default=256 if gemma else known["hidden_size"] // known["heads"])
    attended = config.integer("num_key_value_heads", default=4 if gemma else 8 if mistral else known["heads"])
    if known["heads"] % attended:
        raise config.wrong("num_key_value_heads", attended, f"must divide the {known['heads']} heads")
    causal = not both_ways and config.switch("is_causal", default=True)
    everywhere = _thetas(config, "full_attention", "rope_theta", 1e6 if gemma else 10_000.0)
    sliding, near, local = [False] * layers, 0, everywhere
    if gemma:
        sliding = _sliding(config, layers, 6, 5)
        near = config.integer("sliding_window", default=4096)
        near = near if causal else near // 2 + 1
        local = _thetas(config, "sliding_attention", "rope_local_base_freq", 10_000.0)
    elif config.values.get("sliding_window", 4096) if mistral else config.switch("use_sliding_window"):
        from_layer = 0 if mistral else config.integer("max_window_layers", default=28, least=0)
        sliding = (
            _sliding(config, layers, 1, 1)
            if "layer_types" in config
            else [layer >= from_layer for layer in range(layers)]
        )
        near = config.integer("sliding_window", default=4096) + (not causal)
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
        head_norm=family in ("qwen3", "gemma3"),
        rotary=tuple(local if is_local else everywhere for is_local in sliding),
        windows=tuple(near if is_local else 0 for is_local in sliding) if any(sliding) else (),
        causal=causal,
        classifier_reads=Pooling.SEP,
        passed_over=config.integer("pad_token_id", least=0) if "pad_token_id" in config else -1,
    )


# The types of model that attend both ways, and what the classifier of Nemotron reads, by `pooling`.
ENCODERS = ("llama_bidirec", "bidirectional_pplx_qwen3")
NEMOTRON_READS = {"avg": Pooling.MEAN, "cls": Pooling.CLS, "last": Pooling.SEP}
NEMOTRON_PAIR = "question:{query} \n \n passage:{document}"  # what it was trained with (the model card of llama-nemotron-rerank-1b-v2)


def _read_llama(config: JsonDocument, known: dict[str, Any]) -> Architecture:
    decoder = _read_decoder(config, known)
    if not known["labels"] or config.text("model_type") not in ENCODERS:
        return decoder
    reads = config.text("pooling", default="avg")
    if reads not in NEMOTRON_READS:
        raise config.wrong("pooling", reads, f"must be one of {', '.join(NEMOTRON_READS)}")
    if (temperature := config.number("temperature", default=1.0)) != 1.0:
        raise config.wrong("temperature", temperature, "must be 1: scores are not divided")
    return replace(decoder, classifier_reads=NEMOTRON_READS[reads], passed_over=-1, pair_text=NEMOTRON_PAIR)


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


def _read_text_tower(config: JsonDocument, known: dict[str, Any]) -> Architecture:
    """Read the text tower of CLIP or SigLIP, whose configuration has no defaults left (see heads.py)."""
    return Architecture(
        **known,
        max_length=config.integer("max_position_embeddings"),
        type_vocab_size=0,
        epsilon=config.number("layer_norm_eps", default=1e-5),
        activation=config.text("hidden_act"),
        order="pre",
        final_norm=True,
        causal=known["family"] == "clip",
        projection_size=config.integer("projection_dim"),
        # The first configurations state 2, and mean the token with the highest id.
        end_id=-1 if config.values.get("eos_token_id") == 2 else config.integer("eos_token_id", least=0),
    )


# What EuroBERT's classifier reads, by classifier_pooling: "late" computes a number for each token, and their mean.
EUROBERT_READS = {"bos": Pooling.CLS, "mean": Pooling.MEAN, "late": Pooling.NONE}
READERS: Mapping[str, Callable[[JsonDocument, dict[str, Any]], Architecture]] = {
    "deberta-v2": _read_deberta, "modernbert": _read_modernbert, "nomic-bert": _read_nomic, NOMIC_PLAIN: _read_nomic, "gte": _read_gte,
    JINA: _read_jina, JINA_CODE: _read_jina, **dict.fromkeys(DECODERS, _read_decoder), "llama": _read_llama, "eurobert": _read_eurobert,
    "clip": _read_text_tower, "siglip": _read_text_tower,
}  # fmt: skip
