"""tokenizer.py: token ids that the model's own tokenizer would not make of the text that they stand for."""

import pytest
from tests.text_models import tiny

from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.texts import Tokenized, TokenRule
from weir.text_models.tokenizer import Tokenizer


@pytest.fixture(name="tokenizer", scope="module", params=["bert", "roberta"])
def make_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Read the tokenizer of a small model."""
    return read_checkpoint(tiny.model(tmp_path_factory.mktemp("foreign"), request.param)).tokenizer()


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text, special ones included."""
    (found,) = tokenizer.encode([text], TokenRule(32))
    assert isinstance(found, Tokenized)
    assert not found.foreign
    return [int.from_bytes(found.ids[at : at + 4], "little") for at in range(0, len(found.ids), 4)]


def test_ids_that_the_tokenizer_has_made_are_its_own(tokenizer: Tokenizer) -> None:
    own = ids_of(tokenizer, "the river")
    special = len(tokenizer.template.first) + len(tokenizer.template.last)
    bare = own[len(tokenizer.template.first) : len(own) - len(tokenizer.template.last)]
    found = tokenizer.encode([own, bare, own[:-1], [*own, *own], own[:1]], TokenRule(64))
    assert special > 0
    assert [isinstance(each, Tokenized) and each.foreign for each in found] == [False] * 5


def test_ids_that_it_would_not_make_are_foreign(tokenizer: Tokenizer) -> None:
    first, last = list(tokenizer.template.first), list(tokenizer.template.last)
    known = tokenizer.vocabulary
    letters = [
        known["r"],
        *(known.get(f"##{letter}", known[letter]) for letter in "ight"),
    ]  # "right" is one token, or two
    found = tokenizer.encode([letters, [*first, *letters, *last]], TokenRule(64))
    assert [isinstance(each, Tokenized) and each.foreign for each in found] == [True, True]
