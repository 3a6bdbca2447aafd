"""Tiny models of each architecture with random weights, in Hugging Face's layout: made in milliseconds, without torch.

`tiny.model(tmp_path, "roberta")` writes one and returns its directory; `tiny.sentence_model` adds what sentence-transformers adds. The same
arguments give the same bytes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.text_models import tiny_tokens

from weir.text_models.checkpoint.families import HEADS, POOLER, names_of, read_architecture, weight_names
from weir.text_models.checkpoint.weights import weight_shapes
from weir.text_models.formats import read_document

FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet")
HIDDEN, HEADS_PER_LAYER, WIDE, POSITIONS = 32, 4, 64, 64

# Families whose layers differ from BERT's, each with a config.json as published checkpoints have it. Sizes are small, and windows and buckets smaller still.
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_DEBERTA = {
    **_SIZES,
    "model_type": "deberta-v2",
    "relative_attention": True,
    "layer_norm_eps": 1e-7,
    "hidden_act": "gelu",
}
_GEMMA = {
    **_SIZES, "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
}  # fmt: skip
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "electra": {**_SIZES, "model_type": "electra", "embedding_size": 16, "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12},
    "albert": {**_SIZES, "model_type": "albert", "embedding_size": 16, "type_vocab_size": 2, "hidden_act": "gelu_new", "layer_norm_eps": 1e-12},
    "deberta-v2": {**_DEBERTA, "max_relative_positions": 16, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 2},
    "deberta-v3": {
        **_DEBERTA, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p",
        "position_biased_input": False, "type_vocab_size": 0,
    },
    "modernbert": {
        **_SIZES, "model_type": "modernbert", "local_attention": 8, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0, "norm_eps": 1e-5, "pad_token_id": 0,
    },
    "nomic-bert": {
        "model_type": "nomic_bert", "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 64, "n_positions": 64, "type_vocab_size": 2,
        "layer_norm_epsilon": 1e-12, "activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    },
    "gte": {
        **_SIZES, "model_type": "new", "type_vocab_size": 1, "rope_theta": 20000, "rope_scaling": {"type": "ntk", "factor": 8.0},
        "position_embedding_type": "rope", "layer_norm_type": "layer_norm", "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    },
    "jina-bert": {
        **_SIZES, "model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu", "type_vocab_size": 2,
        "num_attention_heads": 4, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    },
    "qwen2": {**_SIZES, "model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 1e6, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    "qwen2-both-ways": {
        **_SIZES, "model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 1e6, "hidden_act": "silu", "rms_norm_eps": 1e-6, "is_causal": False,
    },
    "eurobert": {**_SIZES, "model_type": "eurobert", "num_key_value_heads": 2, "rope_theta": 250000, "hidden_act": "silu", "rms_norm_eps": 1e-5},
    "qwen3": {
        **_SIZES, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1e6, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    },
    "gemma3": _GEMMA | {"use_bidirectional_attention": True},
    "gemma3-causal": _GEMMA,
}  # fmt: skip
# Stored biases of those families that have them only in some layers of weights.
_WITHOUT_BIAS = {
    "modernbert": ("",), "nomic-bert": ("Wqkv", "out_proj", "mlp"), "gte": ("up_gate_proj",), "jina-bert": ("gated_layers",), "qwen2": ("o_proj", "mlp", "norm"),
    "qwen2-both-ways": ("o_proj", "mlp", "norm"), "qwen3": ("",), "eurobert": ("proj", "norm"), "gemma3": ("",), "gemma3-causal": ("",), "deberta-v2": (), "deberta-v3": (),
    "electra": (), "albert": (),
}  # fmt: skip

CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "distilbert": "DistilBert",
    "mpnet": "MPNet",
}
PREFIXES = {
    "bert": "bert.",
    "roberta": "roberta.",
    "xlm-roberta": "roberta.",
    "distilbert": "distilbert.",
    "mpnet": "mpnet.",
}


def model(
    directory: Path, family: str = "bert", *, layers: int = 3, labels: int = 0, pooler: bool = True, kind: str = "F32", seed: int = 0,
    tokenizer: bool = True, **config: Any,
) -> Path:  # fmt: skip
    """Write a model and return `directory`: config.json, model.safetensors, tokenizer.json and what stands beside it.

    With `labels`, it has a classifier, and the prefix of models that have one. `kind` is the datatype of the weights: F32, F16 or BF16.
    `config` are further keys of config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if family in MORE_FAMILIES:
        return _network(directory, family, labels, seed, tokenizer, config)
    vocabulary = tiny_tokens.write(directory, family) if tokenizer else tiny_tokens.size(family)
    settings = configuration(family, layers, labels, vocabulary) | config
    (directory / "config.json").write_text(json.dumps(settings, indent=1))
    save(directory / "model.safetensors", weights(family, settings, labels, pooler, seed), kind)
    return directory


def _network(directory: Path, family: str, labels: int, seed: int, tokenizer: bool, config: dict[str, Any]) -> Path:
    """Write a model of MORE_FAMILIES."""
    vocabulary = tiny_tokens.write(directory, "bert") if tokenizer else tiny_tokens.size("bert")
    named = {"id2label": {str(label): f"LABEL_{label}" for label in range(labels)}} if labels else {}
    _write(directory / "config.json", {"vocab_size": vocabulary, **MORE_FAMILIES[family], **named, **config})
    architecture = read_architecture(
        read_document(directory / "config.json"), has_pooler=False, has_classifier=labels > 0
    )
    names = names_of(architecture) | ({name: name for name in HEADS[architecture.family]} if labels else {})
    shapes = weight_shapes(architecture)
    stored: dict[str, tuple[int, ...]] = {}
    for here, there in names.items():
        name, _, part = there.partition(":")
        shape = shapes[here.split(".", 2)[-1] if here.startswith("layer.") else here]
        stored[name] = (shape[0] * int(part[-1]), *shape[1:]) if part else shape
    random = np.random.default_rng(seed)
    values = {}
    for name, shape in stored.items():
        if (
            name.endswith("bias") and any(part in name for part in _WITHOUT_BIAS[family])
        ) or name == "layers.0.attn_norm.weight":
            continue
        value = _random(random, shape)
        is_scale = len(shape) == 1 and name.endswith("weight") and not architecture.norm_offset
        values[name] = value + np.float32(1) if is_scale else value
    save(directory / "model.safetensors", values)
    return directory


def sentence_model(
    directory: Path, family: str = "bert", *, pooling: str | list[str] = "mean", normalize: bool = True, dense: int = 0,
    max_length: int | None = None, prompts: dict[str, str] | None = None, residual: bool = False, **more: Any,
) -> Path:  # fmt: skip
    """Write a model as sentence-transformers does. `pooling` is one of its names, `dense` the size of a layer behind it (0: none), which may have a `residual`."""
    model(directory, family, **more)
    return sentence_files(
        directory, pooling=pooling, normalize=normalize, dense=dense, max_length=max_length, prompts=prompts, residual=residual,
    )  # fmt: skip


def sentence_files(
    directory: Path, *, pooling: str | list[str] = "mean", normalize: bool = True, dense: int = 0, max_length: int | None = None,
    prompts: dict[str, str] | None = None, truncate_dim: int | None = None, residual: bool = False,
) -> Path:  # fmt: skip
    """Write what sentence-transformers puts beside a model."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    _write(directory / "1_Pooling" / "config.json", {"embedding_dimension": HIDDEN, "pooling_mode": pooling})
    if dense:
        modules.append(("2_Dense", "Dense"))
        shape = {
            "in_features": HIDDEN,
            "out_features": dense,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
            "use_residual": residual,
        }
        _write(directory / "2_Dense" / "config.json", shape)
        random = np.random.default_rng(7)
        layer = {"linear.weight": _random(random, (dense, HIDDEN)), "linear.bias": _random(random, (dense,))}
        if residual:
            layer["residual.weight"] = _random(random, (dense, HIDDEN))
        save(directory / "2_Dense" / "model.safetensors", layer)
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    named = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(modules)
    ]
    _write(directory / "modules.json", named)
    _write(directory / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    settings = {"prompts": prompts or {}, "default_prompt_name": None, "truncate_dim": truncate_dim}
    _write(directory / "config_sentence_transformers.json", settings)
    return directory


def configuration(family: str, layers: int, labels: int, vocabulary: int) -> dict[str, Any]:
    """Return a config.json of the family."""
    angle = family not in ("bert", "distilbert")
    known: dict[str, Any] = {"model_type": family, "vocab_size": vocabulary, "pad_token_id": int(angle)}
    known["architectures"] = [CLASSES[family] + ("ForSequenceClassification" if labels else "Model")]
    known["max_position_embeddings"] = POSITIONS + (2 if angle else 0)
    if labels:
        known["id2label"] = {str(label): f"LABEL_{label}" for label in range(labels)}
        known["label2id"] = {f"LABEL_{label}": label for label in range(labels)}
    if family == "distilbert":
        return known | {
            "dim": HIDDEN,
            "n_layers": layers,
            "n_heads": HEADS_PER_LAYER,
            "hidden_dim": WIDE,
            "activation": "gelu",
        }
    known |= {"hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS_PER_LAYER}
    known |= {"intermediate_size": WIDE, "hidden_act": "gelu", "layer_norm_eps": 1e-5 if angle else 1e-12}
    if family == "mpnet":
        return known | {"relative_attention_num_buckets": 32}
    return known | {"type_vocab_size": 1 if angle else 2}


def weights(
    family: str, config: dict[str, Any], labels: int, pooler: bool, seed: int
) -> dict[str, NDArray[np.float32]]:
    """Return random weights by the names that the family has in its files."""
    layers = config.get("num_hidden_layers", config.get("n_layers", 0))
    prefix = PREFIXES[family] if labels else ""
    names = {name: prefix + name for name in weight_names(family, layers).values()}
    # Neither DistilBERT nor a RoBERTa with a classifier has one.
    if pooler and family != "distilbert" and not (labels and family != "bert"):
        names |= {name: prefix + name for name in POOLER.values()}
    if labels:
        names |= {name: name for name in HEADS[family]}
    random = np.random.default_rng(seed)
    values = {}
    for plain, name in names.items():
        value = _random(random, shape_of(plain, config, labels))
        values[name] = value + np.float32(1) if "norm" in plain.lower() and plain.endswith("weight") else value
    return values


def shape_of(name: str, config: dict[str, Any], labels: int) -> tuple[int, ...]:
    """Return the shape of a weight by its name in the files."""
    tables = {
        "word_embeddings": config["vocab_size"], "position_embeddings": config["max_position_embeddings"],
        "token_type_embeddings": config.get("type_vocab_size", 0),
    }  # fmt: skip
    for table, rows in tables.items():
        if table in name:
            return (rows, HIDDEN)
    if "relative_attention_bias" in name:
        return (32, HEADS_PER_LAYER)
    if name in ("classifier.weight", "classifier.out_proj.weight"):
        return (labels, HIDDEN)
    if name in ("classifier.bias", "classifier.out_proj.bias"):
        return (labels,)
    out, inner = HIDDEN, HIDDEN
    if "intermediate" in name or "lin1" in name:
        out = WIDE
    elif "lin2" in name or (".output.dense" in name and "attention" not in name):
        inner = WIDE
    vector = name.endswith("bias") or "norm" in name.lower()
    return (out,) if vector else (out, inner)


def save(path: Path, arrays: dict[str, NDArray[np.float32]], kind: str = "F32") -> None:
    """Write a safetensors file. `kind` is F32, F16 or BF16 (cut, not rounded)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, array in arrays.items():
        if kind == "BF16":
            data = (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        else:
            data = array.astype(np.float16 if kind == "F16" else np.float32).tobytes()
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def _random(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return random.normal(0, 0.15, shape).astype(np.float32)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))
