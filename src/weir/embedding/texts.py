"""The values that pass between endpoints, tokenizer, queue and model: texts, tokens, vectors, and the options of tokenization and prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

from msgspec import Meta, Struct
from numpy.typing import NDArray

from weir.errors import InvalidRequest, SettingsError, WeirError
from weir.messages import Dispatch
from weir.telemetry.tracecontext import Trace
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
Truncated = Annotated[list[int], Meta(description="places of the texts that were cut")]


class TextItem(Struct, forbid_unknown_fields=True):
    """A text, or two that belong together; at a server of texts also what is wanted of them."""

    text: Annotated[Any, any_of(PlainText, Words, Ids)]
    pair: Annotated[str | None, Meta(description="a second text, which belongs to the first")] = None
    is_tokenized: Annotated[bool | None, Meta(description="true: words are tokens as they are")] = None
    dimensions: Dimensions = None
    truncate: Truncate = None
    prompt: Prompt = None


TOO_LONG = "max_length"  # the key in an error's details for the limit that a text exceeds, which may not be cut


class Tokens(NamedTuple):
    """The tokens of one text, as an item that waits in the queue for the model.

    `ids` are int32, little-endian, special tokens included. `second` is the index of the first token of a pair's second text, 0 for a single text.
    """

    ids: bytes
    second: int = 0

    def as_plain(self) -> bytes | tuple[bytes, int]:
        """Return the form that is sent to a worker. Bytes are the cheapest to serialize."""
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
    """

    prompt: str | None = None
    whole_words: bool = False


NO_TOKENIZE_OPTIONS = TokenizeOptions()


class Encoded(NamedTuple):
    """The vectors of n texts, in order.

    Attributes:
        vectors: float32 [n, dimensions]; for a model with a vector for each token [n, tokens, dimensions], with zeros after shorter texts.
        counts: how many tokens of each text were computed.
        truncated: whether each text was cut.
        tokens: the tokens of each text as strings, if requested.
        lengths: how many vectors each text has, if there is one for each token.
        errors: the error of each text that has no vector, if errors of single texts do not end the request; None if there are none.
        dispatch: the batch of the text that was answered first, and the time at which that text entered the queue.
        foreign: how many texts were sent as token ids that seem to be those of another model.
    """

    vectors: NDArray[Any]
    counts: list[int]
    truncated: list[bool]
    tokens: list[list[str]] | None = None
    lengths: list[int] | None = None
    errors: list[WeirError | None] | None = None
    dispatch: tuple[Dispatch, float] | None = None
    foreign: int = 0


class Encodes(Protocol):
    """A served text encoder, as endpoints use it."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""

    @property
    def max_length(self) -> int:
        """The most tokens of a text that the model reads, special tokens included."""

    async def encode(
        self, texts: Sequence[Text], *, door: str, client: str = "", priority: int = 0, timeout: float | None = None,
        dimensions: int | None = None, truncate: bool | None = None, want_tokens: bool = False,
        prompt: str | None = None, whole_words: bool = False, each: bool = False,
        trace: str | Trace | None = None,
    ) -> Encoded:  # fmt: skip
        """Return the vectors of `texts`, in order. Cancelling the call takes the texts out of the queue.

        Args:
            texts: one or more texts.
            door: the name of the frontend, for metrics and logs.
            client: who sends the texts. Requests of one client share one fair share of the queue; with "" the request has a share of its own.
            priority: texts of a higher priority are computed first.
            timeout: seconds until the request fails; None for the server's setting.
            dimensions: keep so many numbers at the start of each vector; None for all.
            truncate: whether texts that are too long are cut or refused; None for the server's setting.
            want_tokens: also return the tokens as strings.
            prompt: the name of a prompt of the model, or the text of a prompt, to put before every text; None for the server's prompt.
            whole_words: see TokenizeOptions.
            each: an invalid text does not end the request; its error is in `Encoded.errors`.
            trace: the `traceparent` that the caller sent, or the Trace that the endpoint has begun.

        Raises InvalidRequest naming the place of the text and the rule, and the errors of the queue: Overloaded, DeadlineExceeded, Draining.
        """


MAX_PROMPT_CHARACTERS = 4096  # of a prompt that a request states in full, as each of its texts is tokenized with it

_PROMPT_ENDS = (" ", ":", "\n")  # the text of a prompt ends with one of these; a name does not


def prompt_text(name: str, prompts: Mapping[str, str]) -> str:
    """Return the text of the prompt called `name`, or `name` itself if it is the text of a prompt: empty, or ending in a space, colon or new line.

    Raises InvalidRequest naming the prompts of the model, or the greatest length of a prompt.
    """
    if name in prompts:
        return prompts[name]
    if len(name) > MAX_PROMPT_CHARACTERS:
        rule = f"prompt: has {len(name)} characters, must have at most {MAX_PROMPT_CHARACTERS}"
        raise InvalidRequest(rule, details={"param": "prompt"})
    if not name or name.endswith(_PROMPT_ENDS):
        return name

    raise InvalidRequest(
        f"prompt={name!r:.80}: there is no prompt of this name; there are {', '.join(prompts) or 'none'}; the text of a prompt ends with a space or a colon",
        details={"param": "prompt"},
    )


def server_prompt(name: str | None, prompts: Mapping[str, str]) -> str | None:
    """Return the text of the prompt in a server's settings, as `prompt_text` does; None if the settings state none. Raises SettingsError."""
    try:
        return None if name is None else prompt_text(name, prompts)
    except InvalidRequest as error:
        raise SettingsError(error.message) from None


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
    """

    lowercase: bool | None = None
    lowercase_text: bool = False
    special_tokens: bool = True
    word_special_tokens: bool = True
    pair_separator: str | None = None
    whole_words: bool = False
    prompt: str | None = None


NO_TOKENIZER_OPTIONS = TokenizerOptions()
