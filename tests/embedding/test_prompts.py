"""What is put before a text: by name, or said in full."""

import pytest

from weir.embedding.prompts import prompt_of_server, prompt_text
from weir.errors import InvalidRequest, SettingsError

PROMPTS = {"query": "query: ", "document": "passage: "}


@pytest.mark.parametrize(
    ("said", "text"),
    [("query", "query: "), ("document", "passage: "), ("search for: ", "search for: "), ("q:", "q:"), ("", "")],
)
def test_a_name_or_the_text_itself(said: str, text: str) -> None:
    assert prompt_text(said, PROMPTS) == text
    assert prompt_of_server(said, PROMPTS) == text


def test_what_is_neither_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InvalidRequest, match="prompt='qury': the model has none of this name, it has query, document"):
        prompt_text("qury", PROMPTS)
    with pytest.raises(SettingsError, match="it has none; a text to put before others ends with a space or a colon"):
        prompt_of_server("query", {})


def test_nothing_said_is_what_the_model_says() -> None:
    assert prompt_of_server(None, PROMPTS) is None
