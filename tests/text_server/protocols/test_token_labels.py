"""The labels of tokens over an encoder without a model: joined to entities, or each by itself."""

from typing import Any

import pytest
from tests.text_server.hashing import HashingEncoder
from tests.text_server.served_texts import post

from weir.text_server.texts import TextFacts, TextTask

LABELS = ("O", "B-PER", "I-PER", "LOC")


def namer(max_length: int = 20) -> HashingEncoder:
    """Return a model that labels tokens: the number of a word is that of its label."""
    encoder = HashingEncoder(
        "namer", max_length=max_length, facts=TextFacts(tasks=(TextTask.PREDICT_TOKENS,), labels=LABELS)
    )
    encoder.lists_width = len(LABELS)
    texts = {"Ada King met Bob in New York": [9, 1, 2, 0, 1, 0, 3, 3], "nobody": [9, 0], "Ada Bob": [9, 1, 1]}
    encoder.lists = {
        text: [[8.0 if place == number else 0.0 for place in range(4)] for number in numbers]
        for text, numbers in texts.items()
    }
    return encoder


def test_tokens_are_joined_to_entities() -> None:
    found = post("/predict_tokens", {"inputs": "Ada King met Bob in New York"}, HashingEncoder(), namer()).json()
    assert [(each["entity_group"], each["word"], each["start"], each["end"]) for each in found] == [
        ("PER", "Ada King", 0, 8), ("PER", "Bob", 13, 16), ("LOC", "New York", 20, 28),
    ]  # fmt: skip
    assert all(each["score"] == pytest.approx(0.998995, abs=1e-5) for each in found)


def test_each_token_may_be_wanted_and_none_left_out() -> None:
    said = {"inputs": ["Ada Bob", "nobody"], "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}
    first, second = post("/predict_tokens", said, namer()).json()
    assert [(each["entity"], each["word"]) for each in first] == [("B-PER", "Ada"), ("B-PER", "Bob")]
    assert [(each["entity"], each["word"]) for each in second] == [("O", "nobody")]
    assert post("/predict_tokens", {"inputs": ["nobody"]}, namer()).json() == [[]]


def test_the_last_token_of_a_text_that_was_cut_is_a_special_one() -> None:
    encoder = namer()
    assert encoder.lists is not None
    encoder.lists["Ada King met Bob in New York"] = encoder.lists["Ada King met Bob in New York"][:3]
    found = post("/predict_tokens", {"inputs": "Ada King met Bob in New York"}, encoder).json()
    assert [each["word"] for each in found] == ["Ada"]


@pytest.mark.parametrize(("document", "status", "rule"), [
    ({"inputs": 3}, 422, "inputs: must be a list of texts, is 3"), ({"inputs": ["a", ""]}, 400, "inputs[1]: must not be empty"),
    ({"inputs": "a", "parameters": {"aggregation_strategy": "max"}}, 422, "aggregation_strategy='max': must be one of simple, none"),
    ({"inputs": "a", "model": "hashing"}, 424, "model 'hashing': has no task predict_tokens; it has embed"),
])  # fmt: skip
def test_what_is_wrong_is_named(document: Any, status: int, rule: str) -> None:
    answer = post("/predict_tokens", document, namer(), HashingEncoder())
    assert answer.status_code == status and rule in answer.json()["error"]
