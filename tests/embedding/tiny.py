"""Tiny models of each architecture with random weights, in Hugging Face's layout: made in milliseconds, without torch.

`tiny.model(tmp_path, "roberta")` writes one and returns its directory; `tiny.sentence_model` adds what sentence-transformers adds. The same
arguments give the same bytes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.embedding import tiny_tokens

from weir.embedding.checkpoint.weights import HEADS, POOLER, weight_names

FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet")
HIDDEN, HEADS_PER_LAYER, WIDE, POSITIONS = 32, 4, 64, 64

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
    vocabulary = tiny_tokens.write(directory, family) if tokenizer else tiny_tokens.size(family)
    settings = configuration(family, layers, labels, vocabulary) | config
    (directory / "config.json").write_text(json.dumps(settings, indent=1))
    save(directory / "model.safetensors", weights(family, settings, labels, pooler, seed), kind)
    return directory


def sentence_model(
    directory: Path, family: str = "bert", *, pooling: str | list[str] = "mean", normalize: bool = True, dense: int = 0,
    max_length: int | None = None, prompts: dict[str, str] | None = None, **more: Any,
) -> Path:  # fmt: skip
    """Write a model as sentence-transformers does. `pooling` is one of its names, `dense` the size of a layer behind it (0: none)."""
    model(directory, family, **more)
    return sentence_files(
        directory, pooling=pooling, normalize=normalize, dense=dense, max_length=max_length, prompts=prompts
    )


def sentence_files(
    directory: Path, *, pooling: str | list[str] = "mean", normalize: bool = True, dense: int = 0, max_length: int | None = None,
    prompts: dict[str, str] | None = None, truncate_dim: int | None = None,
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
        }
        _write(directory / "2_Dense" / "config.json", shape)
        random = np.random.default_rng(7)
        layer = {"linear.weight": _random(random, (dense, HIDDEN)), "linear.bias": _random(random, (dense,))}
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
