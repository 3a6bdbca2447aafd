"""Random checkpoints of transformers' own classes, and what Weir makes of their texts: what comparisons with other libraries share."""

from pathlib import Path
from typing import Any

import pytest
from tests.text_models.tiny import LLAMA3

# The libraries' own warnings are of all three kinds.
WITH_TORCH = [
    pytest.mark.torch,
    *(pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future", "User")),
]
EXACT = 0.99999
VOCABULARY = 200
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 66, "pad_token_id": 1,
}  # fmt: skip
_GEMMA = {
    "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
# The class of each configuration without "Config", and what it is given beside the sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {}),
    "xlm-roberta": ("XLMRoberta", {}),
    "camembert": ("Camembert", {}),
    "distilbert": ("DistilBert", {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}),
    "mpnet": ("MPNet", {}),
    "electra": ("Electra", {"embedding_size": 16}),
    "electra-large": ("Electra", {"embedding_size": 32}),
    "albert": ("Albert", {"embedding_size": 16}),
    "deberta-v2": ("DebertaV2", {**_DEBERTA, "max_relative_positions": 16, "type_vocab_size": 2}),
    "deberta-v3": (
        "DebertaV2", {**_DEBERTA, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False},
    ),
    "modernbert": ("ModernBert", {"local_attention": 8, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}),
    "nomic-bert": ("NomicBert", {}),
    "gte": ("Gte", {}),
    "llama": ("Llama", {"num_key_value_heads": 2, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 8}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "gemma3": ("Gemma3Text", {**_GEMMA, "use_bidirectional_attention": True}),
    "gemma3-causal": ("Gemma3Text", _GEMMA),
    "eurobert": ("EuroBert", {"num_key_value_heads": 2}),
}  # fmt: skip
# Types of encoders, and the family that computes like them with `is_causal` false. Their own classes are code next to the weights.
ENCODERS = {"llama_bidirec": "llama", "bidirectional_pplx_qwen3": "qwen3"}

# The families that are compared in each task, by the columns of the table in docs/reference/supported-text-models.md.
CLASSIFIERS = (
    "bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "electra", "albert", "deberta-v2", "deberta-v3", "nomic-bert", "gte", "qwen2", "qwen3",
    "gemma3-causal", "llama", "mistral",
)  # fmt: skip
# What of a family's classifier the configuration chooses, one by one.
READS = {"modernbert": ("cls", "mean"), "eurobert": ("bos", "mean", "late")}
LABELLERS = ("bert", "distilbert", "roberta", "xlm-roberta", "electra", "deberta-v3", "modernbert", "albert", "mpnet")
SPARSE = ("bert", "distilbert", "roberta", "xlm-roberta", "mpnet", "modernbert", "albert", "electra", "deberta-v2")


def save(directory: Path, family: str, *, kind: str = "", **more: Any) -> Path:
    """Write a random model of transformers' class; `kind` is the end of the name of the class of a head."""
    import torch
    import transformers

    name, given = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **given, **more})
    torch.manual_seed(0)
    network = getattr(transformers, f"AutoModelFor{kind}" if kind else "AutoModel").from_config(config)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.normal_(0, 0.25 if kind else 0.15)
            if "norm" in name.lower() and name.endswith("weight") and config.model_type != "gemma3_text":
                weight.add_(1.0)
    network.save_pretrained(directory)
    return directory
