"""What is put before a text: by name, or said in full."""

import pytest

from weir.embedding.texts import MAX_PROMPT_CHARACTERS, prompt_text, server_prompt
from weir.errors import InvalidRequest, SettingsError

PROMPTS = {"query": "query: ", "document": "passage: "}


@pytest.mark.parametrize(
    ("said", "text"),
    [("query", "query: "), ("document", "passage: "), ("search for: ", "search for: "), ("q:", "q:"), ("", "")],
)
def test_a_name_or_the_text_itself(said: str, text: str) -> None:
    assert prompt_text(said, PROMPTS) == text
    assert server_prompt(said, PROMPTS) == text


def test_what_is_neither_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        InvalidRequest, match="prompt='qury': there is no prompt of this name; there are query, document"
    ):
        prompt_text("qury", PROMPTS)
    with pytest.raises(SettingsError, match="there are none; the text of a prompt ends with a space or a colon"):
        server_prompt("query", {})


def test_a_prompt_is_read_for_every_text_and_is_no_longer_than_that_allows() -> None:
    longest = "x" * (MAX_PROMPT_CHARACTERS - 1) + ":"
    assert prompt_text(longest, {}) == longest
    assert prompt_text("long", {"long": f"x{longest}"}) == f"x{longest}"
    with pytest.raises(InvalidRequest, match="prompt: has 4097 characters, must have at most 4096"):
        prompt_text(f"x{longest}", {})


def test_nothing_said_is_what_the_model_says() -> None:
    assert server_prompt(None, PROMPTS) is None
