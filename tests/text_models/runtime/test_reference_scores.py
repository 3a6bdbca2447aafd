"""Scores of pairs are those of sentence-transformers' CrossEncoder, whichever tokenizer a model has."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_models import tiny_tokens
from tests.text_models.opening import results
from tests.text_models.runtime.references import WITH_TORCH, save
from tests.text_models.tokens.reading import ids

from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.texts import JUDGE_AFTER, JUDGE_BEFORE, JUDGE_INSTRUCTION, JUDGE_PAIR, TokenRule

pytestmark = WITH_TORCH
PAIRS = [("First do it", "then do it right"), ("do", "the river rises and the mill turns"), ("who reads this", "time")]


@pytest.mark.parametrize("family", ["bert", "albert", "deberta-v2"])
@pytest.mark.parametrize(
    ("tokens", "stated"),
    [
        ("bert", {}), ("bert", {"model_input_names": ["input_ids", "attention_mask"]}), ("bert", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("roberta", {}), ("xlm-roberta", {}),
    ],
)  # fmt: skip
def test_pairs_have_the_types_that_the_tokenizer_gives(
    family: str, tokens: str, stated: dict[str, Any], tmp_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    vocabulary = tiny_tokens.write(tmp_path, tokens)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | stated
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    save(
        tmp_path, family, kind="SequenceClassification", vocab_size=vocabulary, num_labels=1, type_vocab_size=2,
        pad_token_id=1 if family == "roberta" else 0,
    )  # fmt: skip
    try:
        theirs = CrossEncoder(str(tmp_path), device="cpu")
    except TypeError:  # transformers makes no tokenizer of this class of these files
        pytest.skip("transformers has no such tokenizer")
    tokenizer = read_checkpoint(tmp_path).tokenizer()
    theirs.tokenizer.pad_token = theirs.tokenizer.pad_token or "[PAD]"
    if any(theirs.tokenizer(*pair)["input_ids"] != ids(tokenizer.encode([pair], TokenRule(512))[0]) for pair in PAIRS):
        pytest.skip("transformers reads other tokens from these files")
    expected = theirs.predict(PAIRS, activation_fn=None, batch_size=1)
    found = np.concatenate(results(tmp_path, PAIRS))
    import torch

    assert np.abs(torch.sigmoid(torch.tensor(found)).numpy() - expected).max() < 1e-4
    assert np.ptp(found) > 0.01


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_yes_no_is_the_score_of_logits(family: str, tmp_path: Path) -> None:
    import torch
    import transformers
    from sentence_transformers.cross_encoder.modules import LogitScore

    vocabulary = tiny_tokens.write(tmp_path, "bert")
    path = tmp_path / "tokenizer.json"
    made = json.loads(path.read_text())
    words = made["model"]["vocab"]
    for word, answer in (("water", "yes"), ("mill", "no")):
        words[answer] = words.pop(word)
    path.write_text(json.dumps(made))
    save(tmp_path, family, kind="CausalLM", vocab_size=vocabulary, max_position_embeddings=1024)
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    score = LogitScore(true_token_id=words["yes"], false_token_id=words["no"])
    backend = read_checkpoint(tmp_path).tokenizer().backend
    found = np.concatenate(results(tmp_path, PAIRS, pooling="yes-no", max_length=1024))
    for (query, document), own in zip(PAIRS, found, strict=True):
        text = JUDGE_PAIR.format(instruction=JUDGE_INSTRUCTION, query=query, document=document)
        parts = backend.encode_batch([JUDGE_BEFORE, text, JUDGE_AFTER], add_special_tokens=False)
        with torch.no_grad():
            logits = network(torch.tensor([[number for part in parts for number in part.ids]])).logits
        assert abs(float(score({"causal_logits": logits})["scores"].flatten()[0]) - own) < 1e-3
    assert np.ptp(found) > 0.01
