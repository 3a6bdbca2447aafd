"""What is put before a text: by name, or said in full."""

from typing import Any

import pytest
from tests.rings import subcases

from weir.errors import InvalidRequest, SettingsError
from weir.text_models.texts import MAX_PROMPT_CHARACTERS, TextOptionFields, chosen_prompt, prompt_text, server_prompt

PROMPTS = {"query": "query: ", "document": "passage: "}


@subcases(
    ("said", "text"),
    [("query", "query: "), ("document", "passage: "), ("search for: ", "search for: "), ("q:", "q:"), ("", "")],
)
def test_a_name_or_the_text_itself(said: str, text: str) -> None:
    assert prompt_text(said, PROMPTS) == text
    assert server_prompt(said, PROMPTS) == text


def test_what_is_neither_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InvalidRequest, match="prompt='qury': unknown prompt; available: query, document"):
        prompt_text("qury", PROMPTS)
    with pytest.raises(SettingsError, match="available: none; the text of a prompt ends with a space or a colon"):
        server_prompt("query", {})


def test_a_prompt_is_read_for_every_text_and_is_no_longer_than_that_allows() -> None:
    longest = "x" * (MAX_PROMPT_CHARACTERS - 1) + ":"
    assert prompt_text(longest, {}) == longest
    assert prompt_text("long", {"long": f"x{longest}"}) == f"x{longest}"
    with pytest.raises(InvalidRequest, match="prompt: has 4097 characters, must have at most 4096"):
        prompt_text(f"x{longest}", {})


def test_the_default_is_what_the_model_declares() -> None:
    assert server_prompt(None, PROMPTS) is None


NAMED = {"query": "Instruct: Given a question, find passages\nQuery:", "passage": "passage: ", "STS": "same: "}


@subcases(("said", "chosen"), [
    ({}, None), ({"prompt": "query: "}, "query: "), ({"prompt_name": "STS"}, "STS"), ({"input_type": "query"}, "query"),
    ({"input_type": "search_query"}, "query"), ({"input_type": "document"}, "passage"), ({"input_type": "retrieval.passage"}, "passage"),
    ({"input_type": "text-matching"}, "STS"), ({"input_type": "STS"}, "STS"), ({"input_type": "clustering"}, None),
    ({"instruction": "Find it"}, "Instruct: Find it\nQuery:"), ({"instruction": "x", "input_type": "query"}, "Instruct: x\nQuery:"),
    ({"instruction": "x", "input_type": "document"}, "passage"),
])  # fmt: skip
def test_a_prompt_is_chosen_by_the_type_of_the_text(said: dict[str, Any], chosen: str | None) -> None:
    assert chosen_prompt(NAMED, TextOptionFields(**said)) == chosen
    if chosen is not None:
        prompt_text(chosen, NAMED)  # which the encoder will read


def test_a_model_without_a_form_of_its_own_reads_the_usual_instruction() -> None:
    assert chosen_prompt({"query": "query: "}, TextOptionFields(instruction="Find it")) == "Instruct: Find it\nQuery: "
    assert chosen_prompt({}, TextOptionFields(input_type="query")) is None


@subcases(("said", "rule"), [
    ({"prompt_name": "qury"}, "prompt_name='qury': unknown prompt; available: query, passage, STS"),
    ({"input_type": "question"}, "input_type='question': must be one of query, search_query, "),
    ({"prompt": "a:", "prompt_name": "query"}, "prompt, prompt_name: only one of them may be given"),
    ({"instruction": " "}, "instruction: must not be empty"),
    ({"instruction": "x" * 3000}, "instruction: has 3000 characters, must have at most 2048"),
])  # fmt: skip
def test_what_chooses_no_prompt_is_refused(said: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidRequest, match=rule):
        chosen_prompt(NAMED, TextOptionFields(**said))
