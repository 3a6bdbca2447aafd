"""The values that pass between endpoints, tokenizer, queue and model: texts, tokens, and the options of tokenization and prompts.

A text as callers give it is checked before anything is tokenized. One that breaks a rule becomes an error that names the rule; the caller adds which text it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from weir.errors import InvalidRequest, SettingsError
from weir.images import Picture
from weir.text_models.late_interaction import LateInteraction
from weir.wire.schema import any_of

# A text, a pair of texts, a list of words, or a list of token ids that includes all special tokens; or an image, where the model reads images.
Text = str | tuple[str, str] | Sequence[str] | Sequence[int] | Picture

# The fields of requests and responses, as OpenAPI describes them. Some rules are only described here: what reads the field says more of them.
PlainText = Annotated[str, Meta(min_length=1, description="a text")]
Words = Annotated[list[str], Meta(min_length=1, description="a text as words")]
Ids = Annotated[
    list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, description="a text as token ids, special ones included")
]
Dimensions = Annotated[
    int | None, Meta(description="keeps the first numbers of each vector", extra_json_schema={"minimum": 1})
]
Truncate = Annotated[bool | None, Meta(description="false refuses a text that is longer than the model reads")]
Prompt = Annotated[
    str | None,
    Meta(
        description="put before every text: the name of one of the model's prompts, or the text itself, which ends with a space or a colon"
    ),
]
DIRECTIONS = ("left", "right")


class TextOptionFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a request that say how its texts are read and what is kept of their vectors. One that is null counts as not given."""

    dimensions: Dimensions = None
    truncate: Truncate = None
    truncation_direction: Annotated[
        str | None,
        Meta(
            description="the end at which a text is cut that is too long: right if it is not given",
            extra_json_schema={"enum": [*DIRECTIONS, None]},
        ),
    ] = None
    prompt: Prompt = None
    prompt_name: Annotated[str | None, Meta(description="the name of one of the model's prompts")] = None
    input_type: Annotated[
        str | None,
        Meta(
            description="query or document, or another name of a task: chooses the model's prompt for it, if it has one"
        ),
    ] = None
    instruction: Annotated[
        str | None, Meta(description="what the query is to find, for models that read an instruction before a query")
    ] = None


class TextOutput(StrEnum):
    """A kind of result that a model makes of a text. The value is its name in requests, responses and errors."""

    DENSE = "dense"  # one vector
    SPARSE = "sparse"  # terms: ids of words, and their weights
    TOKENS = "tokens"  # one vector for each token


Outputs = Annotated[
    list[str] | None,
    Meta(
        description="what is made of each text, in one pass; the model's own output if it is not given",
        extra_json_schema={"items": {"enum": [*TextOutput]}},
    ),
]


class ImageItem(TextOptionFields, forbid_unknown_fields=True):
    """An image, and what is wanted of it: for a server's model that reads images."""

    image: Annotated[Any, any_of(str), Meta(description="base64, a data: URL or a URL; in msgpack also bytes")]
    outputs: Outputs = None


class TextItem(TextOptionFields, forbid_unknown_fields=True):
    """A text, or two that belong together; at a server of texts also what is wanted of them."""

    text: Annotated[Any, any_of(PlainText, Words, Ids)]
    pair: Annotated[str | None, Meta(description="a second text, which belongs to the first")] = None
    is_tokenized: Annotated[bool | None, Meta(description="true: words are tokens as they are")] = None
    outputs: Outputs = None


TOO_LONG = "max_length"  # the key in an error's details for the limit that a text exceeds, which may not be cut


class Tokens(NamedTuple):
    """The tokens of one text, as an item that waits in the queue for the model.

    `ids` are int32, little-endian, special tokens included. `second` is the index of the first token of a pair's second text, 0 for a single text.
    It is QUERY for a query of late interaction.
    `outputs` are the TextOutputs that the model makes of it, none for the model's own alone.
    """

    ids: bytes
    second: int = 0
    outputs: tuple[str, ...] = ()

    def as_plain(self) -> "bytes | tuple[bytes, int] | tuple[bytes, int, tuple[str, ...]]":
        """Return the form that is sent to a worker. Bytes are the cheapest to serialize."""
        if self.outputs:
            return self.ids, self.second, self.outputs
        return (self.ids, self.second) if self.second else self.ids


IMAGE = "image"


class EncodedImage(NamedTuple):
    """An encoded image, as an item that waits in the queue for the model.

    Attributes:
        data: the bytes of an image file.
        tokens: how many tokens the model computes for it: one for each patch, and one for the whole where the model has it.
        decoding: how many tokens could be computed in about the time in which it is decoded and resized.
    """

    data: bytes
    tokens: int
    decoding: float = 0.0

    def as_plain(self) -> tuple[str, bytes]:
        """Return the form that is sent to a worker."""
        return IMAGE, self.data


class Tokenized(NamedTuple):
    """The tokens of one text, or of a piece of it.

    Attributes:
        ids, second: as in Tokens.
        truncated: whether tokens were cut off.
        foreign: the caller sent token ids that seem to be those of another tokenizer.
    """

    ids: bytes
    second: int = 0
    truncated: bool = False
    foreign: bool = False


class TokenRule(NamedTuple):
    """How the texts of one request are tokenized.

    Attributes:
        max_length: the most tokens of a text that are kept, special tokens included.
        truncate: whether a longer text is cut at its end, a pair at the end of its longer text first; otherwise a longer text is an error.
        split: whether a longer text is read in pieces, see `Tokenizer.split`. `truncate` is set, too: token ids, which are not split, are cut.
        prompt: the text that is put before every string that is not part of a pair; None for the server's prompt.
        whole_words: treat each given word as one token, the unknown token if the vocabulary lacks it, and split a list of words into a pair at the
            word `|||`, as bert-as-service does.
        truncate_left: a text that is too long loses its beginning, not its end.
    """

    max_length: int
    truncate: bool = True
    split: bool = False
    prompt: str | None = None
    whole_words: bool = False
    truncate_left: bool = False


class TokenDetail(NamedTuple):
    """One token of a text. `start` and `stop` are the characters of the text that it stands for; None for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@dataclass(frozen=True)
class TokenizerOptions:
    """How all texts of a served model are tokenized.

    Attributes:
        lowercase: whether the tokenizer lowercases; None for what the model's files state.
        lowercase_text: lowercase texts before they are tokenized, as some models of sentence-transformers require.
        special_tokens: add the model's special tokens.
        word_special_tokens: add them also to a list of words with `whole_words`.
        pair_separator: a separator such as "|||" that makes a pair of a text: in a string it stands between spaces, in a list it is a word.
        whole_words: treat each given word as one token, the unknown token if the vocabulary lacks it.
        prompt: the text that is put before every string that is not part of a pair; None for the default prompt of the model's files, "" for none.
        late: a text is a query or a document of late interaction, and a pair is one of each, with the tokens of both one after the other.
        judges: a pair is a query and a document, about which the model is asked whether one answers the other; see JUDGE_BEFORE.
        pair_text: the one text, with {query} and {document}, that a pair is read as; "": as two texts with special tokens.
        fill: texts are filled up to the greatest length with padding that counts as text, as SigLIP was trained.
    """

    lowercase: bool | None = None
    lowercase_text: bool = False
    special_tokens: bool = True
    word_special_tokens: bool = True
    pair_separator: str | None = None
    whole_words: bool = False
    prompt: str | None = None
    judges: bool = False
    pair_text: str = ""
    late: LateInteraction | None = None
    fill: bool = False


NO_TOKENIZER_OPTIONS = TokenizerOptions()

# Prompts: the text that is put before a text, chosen by name, by the kind of text or by an instruction.

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


def chosen_prompt(prompts: Mapping[str, str], fields: TextOptionFields) -> str | None:
    """Return the name or the text of the prompt that the fields of a request choose, None for the server's.

    A model without a prompt for an `input_type` reads all kinds of texts alike. An `instruction` is put before queries only, in the form of the
    model's own prompt for queries. Raises InvalidRequest naming the field and the prompts of the model.
    """
    prompt, prompt_name, input_type = fields.prompt, fields.prompt_name, fields.input_type
    stated = [name for name in ("prompt", "prompt_name", "instruction") if getattr(fields, name) is not None]
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
    if fields.instruction is not None and input_type in (None, *_QUERY_TYPES):
        return _instructed(prompts, fields.instruction)
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


SHOWN = 40  # the most characters of a text that an error quotes


class CheckedText(NamedTuple):
    """A valid input in one of three forms: one or two strings (`texts`), one or two lists of words (`words`), or token ids (`ids`)."""

    texts: tuple[str, ...] = ()
    words: tuple[list[str], ...] = ()
    ids: list[int] | None = None


def parse_text(text: Any, separator: str | None, vocab_size: int) -> CheckedText:
    """Check an input and return it in its form. A `separator` in a string or a list of words makes it a pair.

    Raises InvalidRequest naming the rule that the input breaks; token ids must be below `vocab_size`.
    """
    if isinstance(text, str):
        check_string(text, "the text")
        return CheckedText(texts=_cut_string(text, separator))
    if isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text):
        for part, name in zip(text, ("the first text of the pair", "the second text of the pair"), strict=True):
            check_string(part, name, may_be_empty=any(text))
        return CheckedText(texts=text)
    if isinstance(text, Sequence) and not isinstance(text, bytes | bytearray | memoryview):
        return _parse_list(text, separator, vocab_size)
    raise InvalidRequest(f"{_shown(text)} must be a string, a pair of strings, a list of words or a list of token ids")


def check_string(text: str, name: str, *, may_be_empty: bool = False) -> None:
    """Raise InvalidRequest if `text`, which the error calls `name`, is empty and may not be, has a NUL character, or is not valid Unicode."""
    if not (text or may_be_empty):
        raise InvalidRequest(f"{name} is empty: it must have at least one character")
    if "\0" in text:
        raise InvalidRequest(f"{name} has a NUL at character {text.index(chr(0))}: texts must have none")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{name} is not valid Unicode: character {error.start} is half of a surrogate pair"
            ) from None


def _parse_list(items: Sequence[Any], separator: str | None, vocab_size: int) -> CheckedText:
    if not items:
        raise InvalidRequest("the list is empty: it must have at least one word or token id")
    if isinstance(items[0], str):
        for index, word in enumerate(items):
            if not isinstance(word, str):
                raise InvalidRequest(f"word {index} is {_shown(word)}: all must be strings")
            check_string(word, f"word {index}")
        return CheckedText(words=_cut_words(list(items), separator))
    for index, number in enumerate(items):
        if type(number) is not int:
            raise InvalidRequest(
                f"token id {index} is {_shown(number)}: must be whole numbers, or words that are strings"
            )
        if not 0 <= number < vocab_size:
            raise InvalidRequest(f"token id {index} is {number}: the model's vocabulary has 0 to {vocab_size - 1}")
    return CheckedText(ids=list(items))


def _cut_string(text: str, separator: str | None) -> tuple[str, ...]:
    """Split at the last separator that stands between spaces, as bert-as-service does. Without text on both sides the string is one text."""
    if separator is None:
        return (text,)
    between = f" {separator} "
    begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
    index = text.rfind(between, begin + 1, max(end - 1, 0))
    return (text,) if index < 0 else (text[:index].strip(), text[index + len(between) :].strip())


def _cut_words(words: list[str], separator: str | None) -> tuple[list[str], ...]:
    if separator is None or separator not in words:
        return (words,)
    index = words.index(separator)
    parts = words[:index], words[index + 1 :]
    if not all(parts):
        raise InvalidRequest(
            f"word {index} is {separator!r}, which stands between two texts: there must be words on both sides"
        )
    return parts


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text[:SHOWN]}{'...' if len(text) > SHOWN else ''} ({type(value).__name__})"
