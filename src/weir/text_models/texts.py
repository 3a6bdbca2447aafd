"""The values that pass between endpoints, tokenizer, queue and model: texts, tokens, vectors, and the options of tokenization and prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from weir.text_models.late_interaction import LateInteraction
from weir.wire.schema import any_of

# A text, a pair of texts, a list of words, or a list of token ids that includes all special tokens.
Text = str | tuple[str, str] | Sequence[str] | Sequence[int]

# The fields of requests and answers, as OpenAPI describes them. Some rules are only described here: what reads the field says more of them.
PlainText = Annotated[str, Meta(min_length=1, description="a text")]
Words = Annotated[list[str], Meta(min_length=1, description="a text as words")]
Ids = Annotated[
    list[Annotated[int, Meta(ge=0)]],
    Meta(min_length=1, description="a text as token ids, special ones included"),
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
    """What a model makes of a text. The value is its name in requests, answers and errors."""

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


class TokenizeOptions(NamedTuple):
    """How the texts of one request are tokenized, where that differs from the server's options.

    Attributes:
        prompt: the text that is put before every string that is not part of a pair; None for the server's prompt.
        whole_words: treat each given word as one token, the unknown token if the vocabulary lacks it, and split a list of words into a pair at the
            word `|||`, as bert-as-service does.
        truncate_left: a text that is too long loses its beginning, not its end.
    """

    prompt: str | None = None
    whole_words: bool = False
    truncate_left: bool = False


NO_TOKENIZE_OPTIONS = TokenizeOptions()


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
    """

    lowercase: bool | None = None
    lowercase_text: bool = False
    special_tokens: bool = True
    word_special_tokens: bool = True
    pair_separator: str | None = None
    whole_words: bool = False
    prompt: str | None = None
    judges: bool = False
    late: LateInteraction | None = None


NO_TOKENIZER_OPTIONS = TokenizerOptions()
