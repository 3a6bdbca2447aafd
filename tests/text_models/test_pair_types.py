"""The types of the tokens of a pair are those that the model's tokenizer gives, as in transformers: not every model is given any."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text_models import tiny, tiny_tokens
from tests.text_models.opening import opened

from weir.errors import SettingsError
from weir.text_models import ComputingSettings, Pooling, Recipe
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.model import TokenIds, padded_inputs
from weir.text_models.runtime import Inputs, open_runtime
from weir.text_models.tokenizer import Tokenizer

NO_TYPES = {"model_input_names": ["input_ids", "attention_mask"]}


def retyped(directory: Path, change: dict[str, int]) -> Path:
    """Make the tokenizer put special tokens and a second text of these types around a pair."""
    path = directory / "tokenizer.json"
    made = json.loads(path.read_text())
    names = made["model"]["vocab"]
    special = {name: {"id": name, "ids": [names[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")}

    def piece(name: str, kind: str = "SpecialToken", place: str = "") -> dict[str, Any]:
        return {kind: {"id": name, "type_id": change.get(place or name, 0)}}

    made["post_processor"] = {
        "type": "TemplateProcessing", "special_tokens": special,
        "single": [piece("[CLS]"), piece("A", "Sequence"), piece("[SEP]")],
        "pair": [piece("[CLS]"), piece("A", "Sequence"), piece("[SEP]", place="middle"), piece("B", "Sequence"), piece("[SEP]", place="end")],
    }  # fmt: skip
    path.write_text(json.dumps(made))
    return directory


@pytest.mark.parametrize(
    ("tokens", "settings", "lead"),
    [
        ("bert", {}, 0), ("bert", {"tokenizer_class": "BertTokenizerFast"}, 0), ("bert", {"tokenizer_class": None}, 0), ("bert", NO_TYPES, None),
        ("bert", {"tokenizer_class": "PreTrainedTokenizerFast"}, None), ("bert", {"tokenizer_class": "AlbertTokenizer"}, None),
        ("bert", {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]}, 0),
        ("roberta", {}, None), ("xlm-roberta", {}, None), ("mpnet", {}, None),
    ],
)  # fmt: skip
def test_a_class_of_tokenizers_gives_types_or_does_not(
    tokens: str, settings: dict[str, Any], lead: int | None, tmp_path: Path
) -> None:
    tiny.model(tmp_path, tokenizer=False)
    tiny_tokens.write(tmp_path, tokens)
    assert Tokenizer(tiny.change(tmp_path / "tokenizer_config.json", **settings)).type_lead == lead


def test_the_separator_before_the_second_text_may_have_its_type(tmp_path: Path) -> None:
    directory = retyped(tiny.model(tmp_path), {"middle": 1, "B": 1, "end": 1})
    assert Tokenizer(directory).type_lead == 1
    text = TokenIds(np.array([2, 5, 3, 6, 3], np.int32), 3)
    for lead, types in ((1, [0, 0, 1, 1, 1]), (0, [0, 0, 0, 1, 1]), (None, [0] * 5)):
        assert padded_inputs([text], pad_id=0, mask_special=False, type_lead=lead).types.tolist() == [types]


def test_other_types_are_refused_when_the_model_is_read(tmp_path: Path) -> None:
    directory = retyped(tiny.model(tmp_path), {"B": 1})
    with pytest.raises(SettingsError, match=r"types of a pair of texts are \[0, 0, 0, 1, 0\]: must be 0 and then 1"):
        Tokenizer(directory)


@pytest.mark.parametrize("settings", [{}, NO_TYPES])
def test_a_score_is_computed_with_these_types(settings: dict[str, Any], tmp_path: Path) -> None:
    directory = tiny.change(tiny.model(tmp_path / "model", labels=1) / "tokenizer_config.json", **settings)
    model = opened(directory, tmp_path / "cache")
    (read,) = model.preprocess_batch([("first do it", "then do it right")])
    ids = read.ids[None]
    types = np.zeros_like(ids) if settings else (np.arange(len(read.ids)) >= read.second).astype(np.int32)[None]
    runtime = open_runtime(
        read_checkpoint(directory), Recipe(Pooling.LOGITS), ComputingSettings(cache=str(tmp_path / "cache"))
    )
    (expected,) = runtime.run(Inputs(ids, np.ones_like(ids), types, np.ones(ids.shape, np.float32)))
    np.testing.assert_array_equal(model.predict([read])[0], expected[0])
