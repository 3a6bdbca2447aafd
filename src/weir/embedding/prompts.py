"""Texts that are put before a text, such as 'query: ': by the names that sentence-transformers' files give them, or said in full."""

from collections.abc import Mapping

from weir.errors import InvalidRequest, SettingsError

MOST_CHARACTERS = 4096  # of a prompt that is said in full: it is read once for every text

_ENDS = (" ", ":", "\n")  # what the text itself ends with, and no name


def prompt_text(said: str, prompts: Mapping[str, str]) -> str:
    """Return the text of the prompt called `said`, or `said` itself if it ends as a prompt does: with a space, a colon or a new line. "" is none.

    Raises InvalidRequest naming the prompts that the model has, or saying how long one may be.
    """
    if said in prompts:
        return prompts[said]
    if len(said) > MOST_CHARACTERS:
        rule = f"prompt: has {len(said)} characters, must have at most {MOST_CHARACTERS}"
        raise InvalidRequest(rule, details={"param": "prompt"})
    if not said or said.endswith(_ENDS):
        return said
    there_are = f"it has {', '.join(prompts)}" if prompts else "it has none"
    raise InvalidRequest(
        f"prompt={said!r:.80}: the model has none of this name, {there_are}; a text to put before others ends with a space or a colon",
        details={"param": "prompt"},
    )


def prompt_of_server(said: str | None, prompts: Mapping[str, str]) -> str | None:
    """Return the text of the prompt that a server was told to put before every text, None if it was told nothing. Raises SettingsError."""
    try:
        return None if said is None else prompt_text(said, prompts)
    except InvalidRequest as error:
        raise SettingsError(error.message) from None
