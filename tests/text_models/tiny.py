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

from weir.text_models.checkpoint.configuration import read_architecture
from weir.text_models.checkpoint.families import HEADS, POOLER, names_of, weight_names
from weir.text_models.checkpoint.weights import weight_shapes
from weir.text_models.formats import JsonDocument

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
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
_LLAMA = {
    **_SIZES, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_scaling": LLAMA3,
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
    "pplx": {
        **_SIZES, "model_type": "bidirectional_pplx_qwen3", "use_bidirectional_attention": True, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 1e6,
        "hidden_act": "silu", "rms_norm_eps": 1e-6,
    },
    "llama": _LLAMA | {"model_type": "llama"},
    "llama-both-ways": _LLAMA | {"model_type": "llama_bidirec", "pooling": "avg", "temperature": 1.0},
    "mistral": {
        **_SIZES, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 8, "rope_theta": 1e4, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    },
    "nomic-moe": {
        "model_type": "nomic_bert", "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 64, "n_positions": 64, "type_vocab_size": 1,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu", "rotary_emb_base": 10000, "rotary_emb_fraction": 1.0, "moe_every_n_layers": 2,
        "num_experts": 5, "moe_top_k": 2, "num_shared_experts": 0, "moe_normalize_expert_weights": False, "expert_choice_router": False,
    },
    "jina-code": {
        **_SIZES, "model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu", "type_vocab_size": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-12, "auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"},
    },
    "gemma3": _GEMMA | {"use_bidirectional_attention": True},
    "gemma3-causal": _GEMMA,
}  # fmt: skip
# Stored biases of those families that have them only in some layers of weights.
_WITHOUT_BIAS = {
    "modernbert": ("",), "nomic-bert": ("Wqkv", "out_proj", "mlp"), "gte": ("up_gate_proj",), "jina-bert": ("gated_layers",), "qwen2": ("o_proj", "mlp", "norm"),
    "qwen2-both-ways": ("o_proj", "mlp", "norm"), "qwen3": ("",), "pplx": ("",), "llama": ("",), "llama-both-ways": ("",),
    "mistral": ("",), "jina-code": ("up_gated_layer",), "eurobert": ("proj", "norm"), "gemma3": ("",), "gemma3-causal": ("",),
}  # fmt: skip

CLASSES = dict(zip(FAMILIES, ("Bert", "Roberta", "XLMRoberta", "DistilBert", "MPNet"), strict=True))


def model(
    directory: Path, family: str = "bert", *, layers: int = 3, labels: int = 0, pooler: bool = True, kind: str = "F32", seed: int = 0,
    tokenizer: bool = True, **config: Any,
) -> Path:  # fmt: skip
    """Write a model and return `directory`: config.json, model.safetensors, tokenizer.json and what stands beside it.

    With `labels`, it has a classifier, and the prefix of models that have one. `kind` is the datatype of the weights: F32, F16 or BF16.
    `config` are further keys of config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary_of = family if family in FAMILIES else "bert"
    vocabulary = tiny_tokens.write(directory, vocabulary_of) if tokenizer else tiny_tokens.size(vocabulary_of)
    settings = configuration(family, layers, labels, vocabulary) | config
    write(directory / "config.json", settings)
    save(directory / "model.safetensors", weights(family, settings, labels, pooler, seed), kind)
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
    prompts: dict[str, str] | None = None, truncate_dim: int | None = None, residual: bool = False, quantized: bool = False,
) -> Path:  # fmt: skip
    """Write what sentence-transformers puts beside a model."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    write(directory / "1_Pooling" / "config.json", {"embedding_dimension": HIDDEN, "pooling_mode": pooling})
    if dense:
        modules.append(("2_Dense", "Dense"))
        shape = {"in_features": HIDDEN, "out_features": dense, "bias": True, "use_residual": residual}
        activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
        write(directory / "2_Dense" / "config.json", shape | activation)
        random = np.random.default_rng(7)
        layer = {"linear.weight": _random(random, (dense, HIDDEN)), "linear.bias": _random(random, (dense,))}
        if residual:
            layer["residual.weight"] = _random(random, (dense, HIDDEN))
        save(directory / "2_Dense" / "model.safetensors", layer)
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    if quantized:
        modules.append(("", "FlexibleQuantizer"))
    named = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(modules)
    ]
    write(directory / "modules.json", named)
    write(directory / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    settings = {"prompts": prompts or {}, "default_prompt_name": None, "truncate_dim": truncate_dim}
    write(directory / "config_sentence_transformers.json", settings)
    return directory


def read(path: Path) -> Any:
    """Return what a JSON file holds."""
    return json.loads(path.read_text())


def change(path: Path, **values: Any) -> Path:
    """Change keys of a JSON file, and return its folder; None takes one out."""
    now = read(path) | values
    path.write_text(json.dumps({key: value for key, value in now.items() if value is not None}))
    return path.parent


def answering(directory: Path) -> Path:
    """Have two words of a model's vocabulary be yes and no."""
    path = directory / "tokenizer.json"
    made = json.loads(path.read_text())
    for word, answer in (("water", "yes"), ("mill", "no")):
        made["model"]["vocab"][answer] = made["model"]["vocab"].pop(word)
    path.write_text(json.dumps(made))
    return directory


def configuration(family: str, layers: int, labels: int, vocabulary: int) -> dict[str, Any]:
    """Return a config.json of the family."""
    named: dict[str, Any] = {"id2label": {str(label): f"LABEL_{label}" for label in range(labels)}} if labels else {}
    if family in MORE_FAMILIES:
        return {"vocab_size": vocabulary, **MORE_FAMILIES[family], **named}
    angle = family not in ("bert", "distilbert")
    known = {
        "model_type": family, "vocab_size": vocabulary, "pad_token_id": int(angle),
        "architectures": [CLASSES[family] + ("ForSequenceClassification" if labels else "Model")],
        "max_position_embeddings": POSITIONS + (2 if angle else 0), **named,
    }  # fmt: skip
    if labels:
        known["label2id"] = {f"LABEL_{label}": label for label in range(labels)}
    if family == "distilbert":
        sizes = {"dim": HIDDEN, "n_layers": layers, "n_heads": HEADS_PER_LAYER, "hidden_dim": WIDE}
        return known | sizes | {"activation": "gelu"}
    known |= {"hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS_PER_LAYER}
    known |= {"intermediate_size": WIDE, "hidden_act": "gelu", "layer_norm_eps": 1e-5 if angle else 1e-12}
    if family == "mpnet":
        return known | {"relative_attention_num_buckets": 32}
    return known | {"type_vocab_size": 1 if angle else 2}


def weights(
    family: str, config: dict[str, Any], labels: int, pooler: bool, seed: int
) -> dict[str, NDArray[np.float32]]:
    """Return random weights by the names that the family has in its files: where there are labels, with the prefix of models that have some."""
    # Neither DistilBERT nor a RoBERTa with a classifier has a pooler.
    pools = pooler and family in FAMILIES and family != "distilbert" and not (labels and family != "bert")
    architecture = read_architecture(
        JsonDocument(Path("config.json"), config), has_pooler=pools, has_classifier=labels > 0
    )
    if family in MORE_FAMILIES:
        prefix, names = "", names_of(architecture)
    else:
        prefix = family.removeprefix("xlm-") + "." if labels else ""
        names = weight_names(family, architecture.layers) | (POOLER if pools else {})
    heads = {name: name for name in HEADS[architecture.family]} if labels else {}
    shapes, stored = weight_shapes(architecture), dict[str, tuple[int, ...]]()
    for here, there in (names | heads).items():
        name, _, part = there.partition(":")
        shape = shapes[here.split(".", 2)[-1] if here.startswith("layer.") else here]
        key = name if here in heads else prefix + name
        stored[key] = (shape[0] * int(part[-1]), *shape[1:]) if part else shape
    random = np.random.default_rng(seed)
    values = {}
    for name, shape in stored.items():
        left_out = name.endswith("bias") and any(part in name for part in _WITHOUT_BIAS.get(family, ()))
        if left_out or name == "layers.0.attn_norm.weight":
            continue
        is_scale = len(shape) == 1 and name.endswith("weight") and not architecture.norm_offset
        values[name] = _random(random, shape) + np.float32(is_scale)
    return values


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


def write(path: Path, value: Any) -> None:
    """Write a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))
