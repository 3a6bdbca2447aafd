"""Prompts: the text that is put before a text, chosen by name, by the kind of text or by an instruction."""

from collections.abc import Mapping

from weir.errors import InvalidRequest, SettingsError

MAX_PROMPT_CHARACTERS = 4096  # of a prompt that a request states in full, as each of its texts is tokenized with it

_PROMPT_ENDS = (" ", ":", "\n")  # the text of a prompt ends with one of these; a name does not


def prompt_text(name: str, prompts: Mapping[str, str]) -> str:
    """Return the text of the prompt called `name`, or `name` itself if it is the text of a prompt: empty, or ending in a space, colon or new line.

    Raises InvalidRequest naming the prompts of the model, or the greatest length of a prompt.
    """
    if name in prompts:
        return prompts[name]
    if len(name) > MAX_PROMPT_CHARACTERS:
        rule = f"has {len(name)} characters, must have at most {MAX_PROMPT_CHARACTERS}"
        raise InvalidRequest(rule).of("prompt")
    if not name or name.endswith(_PROMPT_ENDS):
        return name

    known = ", ".join(prompts) or "none"
    rule = f"unknown prompt; available: {known}; the text of a prompt ends with a space or a colon"
    raise InvalidRequest(rule).of("prompt", f"{name!r:.80}")


# The names that models have for their prompts, by the kinds of texts that callers name. The first that the model has is taken.
_QUERY = ("query", "search_query", "retrieval.query", "s2p_query", "web_search_query")
_DOCUMENT = ("document", "passage", "corpus", "search_document", "retrieval.passage", "text")
INPUT_TYPES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("query", "search_query", "retrieval.query"), _QUERY),
    **dict.fromkeys(("document", "passage", "search_document", "retrieval.passage"), _DOCUMENT),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering", "separation"),
    "separation": ("separation", "clustering", "Clustering"),
    "text-matching": ("text-matching", "similarity", "STS", "s2s_query"),
}
_QUERY_TYPES = ("query", "search_query", "retrieval.query")
_INSTRUCTION = "Instruct: "
_BEHIND_INSTRUCTION = "\nQuery:"


def chosen_prompt(
    prompts: Mapping[str, str],
    *,
    prompt: str | None = None,
    prompt_name: str | None = None,
    input_type: str | None = None,
    instruction: str | None = None,
) -> str | None:
    """Return the name or the text of the prompt that these fields of a request choose, None for the server's.

    A model without a prompt for an `input_type` reads all kinds of texts alike. An `instruction` is put before queries only, in the form of the
    model's own prompt for queries. Raises InvalidRequest naming the field and the prompts of the model.
    """
    stated = [
        name
        for name, value in (("prompt", prompt), ("prompt_name", prompt_name), ("instruction", instruction))
        if value is not None
    ]
    if len(stated) > 1:
        raise InvalidRequest(f"{', '.join(stated)}: only one of them may be given").about(stated[1])
    if input_type is not None and input_type not in INPUT_TYPES and input_type not in prompts:
        known = ", ".join(dict.fromkeys((*INPUT_TYPES, *prompts)))
        raise InvalidRequest(f"must be one of {known}").of("input_type", f"{input_type!r:.80}")
    if prompt is not None:
        return prompt
    if prompt_name is not None:
        if prompt_name not in prompts:
            known = ", ".join(prompts) or "none"
            raise InvalidRequest(f"unknown prompt; available: {known}").of("prompt_name", f"{prompt_name!r:.80}")
        return prompt_name
    if instruction is not None and input_type in (None, *_QUERY_TYPES):
        return _instructed(prompts, instruction)
    names = (input_type, *INPUT_TYPES.get(input_type, ())) if input_type is not None else ()
    return next((name for name in names if name in prompts), None)


def _instructed(prompts: Mapping[str, str], instruction: str) -> str:
    """Return the text of the prompt with `instruction`. What stands behind it is that of the model's own prompt for queries, if that has an instruction."""
    if not instruction.strip():
        raise InvalidRequest("must not be empty").of("instruction")
    if len(instruction) > MAX_PROMPT_CHARACTERS // 2:
        rule = f"has {len(instruction)} characters, must have at most {MAX_PROMPT_CHARACTERS // 2}"
        raise InvalidRequest(rule).of("instruction")
    own = next((prompts[name] for name in _QUERY if name in prompts), "")
    start = own.rfind(_BEHIND_INSTRUCTION) if own.startswith(_INSTRUCTION) else -1
    ending = own[start:] if start >= 0 else f"{_BEHIND_INSTRUCTION} "
    return f"{_INSTRUCTION}{instruction}{ending}"


def server_prompt(name: str | None, prompts: Mapping[str, str]) -> str | None:
    """Return the text of the prompt in a server's settings, as `prompt_text` does; None if the settings state none. Raises SettingsError."""
    try:
        return None if name is None else prompt_text(name, prompts)
    except InvalidRequest as error:
        raise SettingsError(error.message) from None


# What Qwen3-Reranker was trained with: the text around a pair, the pair itself, and the instruction where none is given.
JUDGE_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer can only be "
    '"yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
JUDGE_PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
JUDGE_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
JUDGE_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
