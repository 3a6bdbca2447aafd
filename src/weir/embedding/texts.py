"""What can be encoded and what comes of it: the values that pass between endpoints, tokenizer, queue and model.

Also how texts are read: the choices of the server and of a request, and the prompts that stand before a text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from weir.errors import InvalidRequest, SettingsError, WeirError
from weir.messages import Dispatch
from weir.telemetry.tracecontext import Trace

# One text; two that belong together; words already cut; token ids with all special tokens.
Text = str | tuple[str, str] | Sequence[str] | Sequence[int]


TOO_LONG = "max_length"  # among an error's details: the text has more tokens than that, and may not be cut


class Tokens(NamedTuple):
    """One text ready to be computed: what waits in the queue for the model, as an item.

    `ids` are int32, little-endian, special tokens included; `second` is the place where the second text of a pair begins, 0 if there is one text.
    """

    ids: bytes
    second: int = 0

    def as_plain(self) -> bytes | tuple[bytes, int]:
        """Return what it travels to a worker as: bytes cost nothing to pack."""
        return (self.ids, self.second) if self.second else self.ids


class Tokenized(NamedTuple):
    """One text's tokens: `ids` as in Tokens (int32, little-endian), where the second text begins, and whether any were cut off. `foreign`: the
    caller gave token ids that this tokenizer would not make of the text that they stand for."""

    ids: bytes
    second: int = 0
    truncated: bool = False
    foreign: bool = False


class TokenizeOptions(NamedTuple):
    """How the texts of a request are read, other than the server reads all. `prompt` stands before every string that is one text (None: what the
    server puts there); with `whole_words` words are tokens as bert-as-service takes them: each is one, the unknown token if the
    vocabulary has it not, and the word `|||` stands between two texts."""

    prompt: str | None = None
    whole_words: bool = False


AS_THE_SERVER = TokenizeOptions()


class Encoded(NamedTuple):
    """What came of `n` texts, in order.

    `vectors` is float32: (n, dimensions), or (n, tokens, dimensions) where each token has one, with zeros behind the shorter texts. `counts` are the
    tokens of each text as it was computed; `truncated` says which were cut. `tokens` are they as texts, if wanted; `lengths` says how many vectors
    a text has, where each token has one. Where each text has an end of its own, `errors` has those of them that have no vector.
    `dispatch` is the batch that the first of them was in, and when that came into the queue. `foreign` texts came as token ids that the model's tokenizer
    would not make of the text that they stand for: those of another model, as it seems.
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
    """What an endpoint needs of a served model of texts."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""

    @property
    def max_length(self) -> int:
        """The most tokens of a text that are read, special ones included."""

    async def encode(
        self, texts: Sequence[Text], *, door: str, client: str = "", priority: int = 0, timeout: float | None = None,
        dimensions: int | None = None, truncate: bool | None = None, want_tokens: bool = False,
        prompt: str | None = None, whole_words: bool = False, each: bool = False,
        trace: str | Trace | None = None,
    ) -> Encoded:  # fmt: skip
        """Return the vectors of `texts`, in order.

        `client` says whose they are, so that no caller takes more than a fair share; `dimensions` keeps the first numbers of each vector;
        `truncate` False refuses a text that is too long (None: the server's setting). `prompt` is the name of one of the model's, or the text itself that
        is to stand before every text; for `whole_words` see TokenizeOptions; with `each` a text that is wrong has its
        error among the answer's, and the others go on; `trace` is the
        caller's `traceparent`, or the Trace that the endpoint has begun. Raises InvalidRequest naming the place of the
        text and the rule, and whatever the queue raises: Overloaded, DeadlineExceeded, Draining. Cancelling it takes all out of the queue.
        """


MOST_CHARACTERS = 4096  # of a prompt that is given in full: it is read once for every text

_ENDS = (" ", ":", "\n")  # what the text itself ends with, and no name


def prompt_text(name: str, prompts: Mapping[str, str]) -> str:
    """Return the text of the prompt called `name`, or `name` itself if it ends as a prompt does: with a space, a colon or a new line. "" is none.

    Raises InvalidRequest naming the prompts that the model has, or saying how long one may be.
    """
    if name in prompts:
        return prompts[name]
    if len(name) > MOST_CHARACTERS:
        rule = f"prompt: has {len(name)} characters, must have at most {MOST_CHARACTERS}"
        raise InvalidRequest(rule, details={"param": "prompt"})
    if not name or name.endswith(_ENDS):
        return name
    there_are = f"it has {', '.join(prompts)}" if prompts else "it has none"
    raise InvalidRequest(
        f"prompt={name!r:.80}: the model has none of this name, {there_are}; a text to put before others ends with a space or a colon",
        details={"param": "prompt"},
    )


def prompt_of_server(name: str | None, prompts: Mapping[str, str]) -> str | None:
    """Return the text of the prompt that a server puts before every text by its settings, None if they name none. Raises SettingsError."""
    try:
        return None if name is None else prompt_text(name, prompts)
    except InvalidRequest as error:
        raise SettingsError(error.message) from None


@dataclass(frozen=True)
class TokenizerOptions:
    """Choices that hold for all texts of a served model.

    `lowercase` overrides what the model's files say (None). `lowercase_text` lowers texts before the tokenizer sees them, as some
    sentence-transformers models ask. Without `special_tokens` none are added, without `word_special_tokens` none to one list of words that
    are tokens. `pair_separator`, such as "|||", cuts a text in two that
    belong together where it stands between spaces, or as a word of its own in a list of words. With `whole_words`, every given word
    is one token, and one that is not in the vocabulary the unknown token. `prompt` is put before every string that is one text (None:
    the one that the model's files put before every text, if any; "" for none).
    """

    lowercase: bool | None = None
    lowercase_text: bool = False
    special_tokens: bool = True
    word_special_tokens: bool = True
    pair_separator: str | None = None
    whole_words: bool = False
    prompt: str | None = None


AS_THE_FILES_SAY = TokenizerOptions()
