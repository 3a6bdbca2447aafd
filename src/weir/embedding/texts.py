"""The values that pass between endpoints, tokenizer, queue and model: texts, tokens, vectors, and the options of tokenization and prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Protocol

from msgspec import Meta, Struct
from numpy.typing import NDArray

from weir.embedding.late_interaction import LateInteraction
from weir.errors import InvalidRequest, SettingsError, WeirError
from weir.messages import Dispatch
from weir.telemetry.tracecontext import Origin, Trace
from weir.wire.schema import any_of

TEXTS_FIELD = "texts"  # the list of texts in errors, until a protocol gives it its own name

# A text, a pair of texts, a list of words, or a list of token ids that includes all special tokens.
Text = str | tuple[str, str] | Sequence[str] | Sequence[int]


def texts_bytes(texts: Sequence[Text]) -> int:
    """Return about how many bytes of memory texts take: an object for each, and for each word and token id."""
    return sum([_OBJECT_BYTES + _bytes_of(text) for text in texts])


def _bytes_of(text: Any) -> int:
    if isinstance(text, str) or not isinstance(text, Sequence):  # what is no text is refused later
        return len(text) if isinstance(text, str) else 0
    first = text[0] if len(text) else 0
    return sum([_OBJECT_BYTES + _bytes_of(each) for each in text]) if isinstance(first, str) else _ID_BYTES * len(text)


_OBJECT_BYTES, _ID_BYTES = 56, 40

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


class Phases(NamedTuple):
    """How long a request was tokenized, waited in the queue, and was computed, and how long it took in all, in seconds.

    Tokenization and queue are those of its first texts.
    """

    tokenize: float = 0.0
    queue: float = 0.0
    compute: float = 0.0
    total: float = 0.0


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
        phases: how long the request took.
        written: the only vector as JSON, if that was asked for and its worker has written it; `vectors` and `phases` are empty then.
        beside: if the request asked for several outputs, the second and further ones: for each text its vector, its terms or the vectors of its tokens.
    """

    vectors: NDArray[Any]
    counts: list[int]
    truncated: list[bool]
    tokens: list[list[str]] | None = None
    lengths: list[int] | None = None
    errors: list[WeirError | None] | None = None
    dispatch: tuple[Dispatch, float] | None = None
    foreign: int = 0
    phases: Phases = Phases()
    beside: Mapping[TextOutput, list[NDArray[Any]]] = MappingProxyType({})
    written: bytes | None = None


class TextTask(StrEnum):
    """What a model of texts can be called for. The value is its name in errors and descriptions."""

    EMBED = "embed"  # one vector for each text
    EMBED_ALL = "embed_all"  # one vector for each token
    EMBED_SPARSE = "embed_sparse"  # weights of a text's terms
    RERANK = "rerank"  # how well a document answers a query
    PREDICT = "predict"  # labels of a text or a pair, with their scores
    PREDICT_TOKENS = "predict_tokens"  # labels of the tokens of a text


class WorkersUse(NamedTuple):
    """What the workers of a model take.

    Attributes:
        workers: how many there are at most.
        threads: how many threads each computes with.
        memory_bytes: what each of their processes has in memory now; a page that several processes share counts in parts.
    """

    workers: int
    threads: int
    memory_bytes: list[int]


class TextFacts(NamedTuple):
    """What a server tells of a text model, beside its name and its sizes.

    Attributes:
        id: its id on the hub, without a revision; "" for the model of a directory.
        listed: the name that lists and answers have; "" for its own.
        tasks: what it can be called for.
        outputs: what it makes of a text, its own first; none for a model of labels or scores.
        prompts: texts to put before a text, by name.
        labels: the labels of a classifier, in the order of its scores.
        independent_labels: whether each label holds or not by itself, so that its score is a sigmoid; otherwise exactly one holds, and the
            scores are a softmax.
        pooling: how one vector is made from those of the tokens, by its name.
        dtype: the numbers in which it computes: float32, float16, bfloat16 or int8.
        device: cpu or gpu.
        truncates: whether texts that are too long are cut, for callers who do not state it.
        max_batch_size, max_batch_tokens: the most texts and tokens of a batch; None for no limit.
        max_waiting: how many texts may wait.
        similarity: how two of its vectors are compared: cosine, dot, euclidean or manhattan; those of late interaction by maxsim or meanmaxsim.
        unscaled: whether its vectors may have other lengths than 1, so that a protocol whose vectors have length 1 must scale them.
        ranges: the least and the greatest number of each dimension, float32 [2, dimensions], for int8 and uint8; None if they are not given.
        use: returns what its workers take; None if nobody knows.
        waiting: returns how many texts wait; None if nobody knows.
    """

    id: str = ""
    listed: str = ""
    tasks: tuple[TextTask, ...] = (TextTask.EMBED,)
    outputs: tuple[TextOutput, ...] = (TextOutput.DENSE,)
    prompts: Mapping[str, str] = MappingProxyType({})
    labels: tuple[str, ...] = ()
    independent_labels: bool = False
    pooling: str = "mean"
    dtype: str = "float32"
    device: str = "cpu"
    truncates: bool = True
    max_batch_size: int | None = None
    max_batch_tokens: int | None = None
    max_waiting: int = 0
    similarity: str = "cosine"
    ranges: NDArray[Any] | None = None
    unscaled: bool = False
    use: Callable[[], WorkersUse] | None = None
    waiting: Callable[[], int] | None = None


class Encodes(Protocol):
    """A served text encoder, as endpoints use it."""

    @property
    def facts(self) -> TextFacts:
        """What a server tells of the model."""

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
        prompt: str | None = None, whole_words: bool = False, truncate_left: bool = False, each: bool = False,
        trace: Trace | Origin = None, outputs: Sequence[TextOutput] = (),
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
            whole_words, truncate_left: see TokenizeOptions.
            each: an invalid text does not end the request; its error is in `Encoded.errors`.
            trace: the request's Origin, or the Trace that the endpoint has begun.
            outputs: what is to be made of each text, in one pass; none for the model's own output.

        Raises InvalidRequest naming the place of the text and the rule, and the errors of the queue: Overloaded, DeadlineExceeded, Draining.
        """

    def encode_one(
        self, text: Text, done: Callable[[Encoded | WeirError], None], *, door: str, priority: int = 0,
        timeout: float | None = None, dimensions: int | None = None, truncate: bool | None = None, prompt: str | None = None,
        truncate_left: bool = False, as_json: bool = False,
    ) -> Callable[[], object] | None:  # fmt: skip
        """Encode one text as `encode` does, for a client without a name, and call `done` with the answer or the error. `as_json`: see Encoded.written.

        Return a function that takes the text back; None if it must go to `encode`. Raises the errors of `encode` that come before the queue.
        """

    async def tokenize(
        self, texts: Sequence[str], *, special: bool, prompt: str | None, timeout: float | None = None
    ) -> list[list[TokenDetail]]:
        """Return the tokens of each text, none cut off; with `special` also the model's special tokens. For `prompt` and `timeout` see `encode`.

        Raises InvalidRequest naming the place of the text and the rule, and DeadlineExceeded.
        """

    async def decode(
        self, ids: Sequence[Sequence[int]], *, skip_special: bool, timeout: float | None = None
    ) -> list[str]:
        """Return the text of each list of token ids, with `skip_special` without the special tokens. For `timeout` see `encode`.

        Raises InvalidRequest for a number that is no id, and DeadlineExceeded.
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
    prompts: Mapping[str, str], *, prompt: str | None = None, prompt_name: str | None = None, input_type: str | None = None,
    instruction: str | None = None,
) -> str | None:  # fmt: skip
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
        raise InvalidRequest(f"{', '.join(stated)}: only one of them may be given", details={"param": stated[1]})
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
