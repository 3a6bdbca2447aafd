"""Tiny models of late interaction as PyLate, sentence-transformers' MultiVectorEncoder and Stanford's ColBERT save them, and texts for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tests.text_models import tiny, tiny_tokens

LONG_QUERY, LONG_DOCUMENT = (
    "the river rises and the mill turns faster than yesterday. " * 4,
    "a weir holds the water back! " * 12,
)
QUERIES = ["First do it", "who reads this, has time?", LONG_QUERY, "do"]
DOCUMENTS = ["then do it right, then do it better.", LONG_DOCUMENT, "no", "..., a (quick) brown fox; jumps?"]
SIZE = 16
PYLATE = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 16, "document_length": 40} | {
    "similarity_fn_name": "MaxSim"
}
WIDER = {"out_features": 64, "use_residual": True}
SEVERAL: dict[str, Any] = {"layers": [{**WIDER, "bias": True}, WIDER, {}]}
# Settings that PyLate saves, beside those above, by the name of the reference.
CASES: dict[str, dict[str, Any]] = {
    "bert": {},
    "bert, attends": {"attend_to_expansion_tokens": True},
    "bert, no expansion": {"do_query_expansion": False},
    "bert, no skipped": {"skiplist_words": []},
    "bert, with prompts": {"prompts": {"query": "find: ", "document": "text: "}},
    "bert, several layers": SEVERAL,
    "modernbert": {"query_length": 32},
    "roberta": {},
}


def _save(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))


def network(directory: Path, family: str, markers: tuple[str, ...]) -> Path:
    """Write a network whose tokenizer has these tokens, each with an embedding."""
    tokens = "roberta" if family == "roberta" else "bert"
    known = tiny_tokens.size(tokens)
    tiny.model(directory, family, vocab_size=known + len(markers), seed=3)
    made = json.loads((directory / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    made["added_tokens"] += [{"id": known + place, "content": marker, **flags} for place, marker in enumerate(markers)]
    _save(directory / "tokenizer.json", made)
    return directory


def _dense(directory: Path, inputs: int = 32, **more: Any) -> int:
    """Write a dense layer, and return how many numbers it makes."""
    identity = "torch.nn.modules.linear.Identity"
    config = {"in_features": inputs, "out_features": SIZE, "bias": False, "activation_function": identity, **more}
    _save(directory / "config.json", config)
    random = np.random.default_rng(11)
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (config["out_features"], inputs)}
    if config["bias"]:
        shapes["linear.bias"] = shapes["linear.weight"][:1]
    if config.get("use_residual") and config["out_features"] != inputs:
        shapes["residual.weight"] = shapes["linear.weight"]
    weights = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    tiny.save(directory / "model.safetensors", weights)
    return int(config["out_features"])


def _modules(directory: Path, *modules: tuple[str, str]) -> None:
    listed = [{"idx": at, "name": str(at), "path": path, "type": kind} for at, (path, kind) in enumerate(modules)]
    _save(directory / "modules.json", listed)
    _save(directory / "sentence_bert_config.json", {"max_seq_length": 60, "do_lower_case": False})


def pylate(directory: Path, family: str = "bert", **settings: Any) -> Path:
    """Write a model as PyLate does."""
    network(directory, family, ("[Q] ", "[D] "))
    layers = settings.pop("layers", [{}])
    folders = [f"{place}_Dense" for place in range(1, len(layers) + 1)]
    dense = [(folder, "pylate.models.Dense.Dense") for folder in folders]
    _modules(directory, ("", "sentence_transformers.models.Transformer"), *dense)
    size = 32
    for folder, layer in zip(folders, layers, strict=True):
        size = _dense(directory / folder, size, **layer)
    saved = {"model_type": "ColBERT", "prompts": {}, "default_prompt_name": None, **PYLATE, **settings}
    _save(directory / "config_sentence_transformers.json", saved)
    return directory


def multi_vector(directory: Path, **settings: Any) -> Path:
    """Write a model as a MultiVectorEncoder of sentence-transformers is saved; `settings` are those of its Transformer."""
    network(directory, "bert", ())
    base = "sentence_transformers.base.modules"
    _modules(
        directory, ("", f"{base}.transformer.Transformer"), ("1_Dense", f"{base}.dense.Dense"),
        ("2_MultiVectorMask", "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"),
        ("3_Normalize", f"{base}.normalize.Normalize"),
    )  # fmt: skip
    of_tokens: dict[str, Any] = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    _dense(directory / "1_Dense", **of_tokens)
    skipped = {"skiplist_words": [",", "!"], "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    _save(directory / "2_MultiVectorMask" / "config.json", skipped)
    _save(directory / "3_Normalize" / "config.json", of_tokens)
    expansion = {"strategy": "fixed", "attend": False, "token": None, "length": 16}
    _save(directory / "sentence_bert_config.json", {"document_length": 40, "query_expansion": expansion, **settings})
    saved = {"model_type": "MultiVectorEncoder", "default_prompt_name": None, "similarity_fn_name": "meanmaxsim"}
    prompts = {"query": "find: ", "document": "text: "}
    _save(directory / "config_sentence_transformers.json", {**saved, "prompts": prompts})
    return directory


def stanford(directory: Path, **metadata: Any) -> Path:
    """Write a model as Stanford's ColBERT does."""
    network(directory, "bert", ("[unused0]", "[unused1]"))
    weights = load_file(directory / "model.safetensors")
    weight = np.random.default_rng(11).normal(0, 0.3, (SIZE, 32)).astype(np.float32)
    renamed = {f"bert.{name}": value for name, value in weights.items()}
    tiny.save(directory / "model.safetensors", renamed | {"linear.weight": weight})
    tiny.change(directory / "config.json", architectures=["HF_ColBERT"])
    _save(directory / "artifact.metadata", {"query_maxlen": 16, "doc_maxlen": 40, "mask_punctuation": True, **metadata})
    return directory
