"""The values that pass between the protocols of texts and the encoder, and what they need of it."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Protocol

from msgspec import Meta
from numpy.typing import NDArray

from weir.batching import BatchingSettings
from weir.errors import InvalidRequest, WeirError
from weir.images import Picture
from weir.messages import Dispatch, Origin, Trace
from weir.numerics import sigmoid, softmax
from weir.text_models.packing import unit_vectors
from weir.text_models.texts import Text, TextOutput, TokenDetail

TEXTS_FIELD = "texts"  # the list of texts in errors, until a protocol gives it its own name


def texts_bytes(texts: Sequence[Text]) -> int:
    """Return about how many bytes of memory texts take: an object for each, and for each word and token id; and the bytes of pictures."""
    return sum([_OBJECT_BYTES + _bytes_of(text) for text in texts])


def _bytes_of(text: Any) -> int:
    if isinstance(text, Picture):
        return len(text.data)
    if isinstance(text, str) or not isinstance(text, Sequence):  # what is no text is refused later
        return len(text) if isinstance(text, str) else 0
    first = text[0] if len(text) else 0
    return sum([_OBJECT_BYTES + _bytes_of(each) for each in text]) if isinstance(first, str) else _ID_BYTES * len(text)


_OBJECT_BYTES, _ID_BYTES = 56, 40
Truncated = Annotated[list[int], Meta(description="indices of the texts that were cut")]


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
        further: if the request asked for several outputs, the second and further ones: for each text its vector, its terms or the vectors of its tokens.
        details: the tokens of each text with their positions in it, if they were asked for.
        decoded: the text of each list of token ids, if that was asked for.
        images: how many of the texts are pictures.
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
    further: Mapping[TextOutput, list[NDArray[Any]]] = MappingProxyType({})
    written: bytes | None = None
    details: list[list[TokenDetail]] | None = None
    decoded: list[str] | None = None
    images: int = 0

    @property
    def cut(self) -> list[int]:
        """The indices of the texts that were cut."""
        return [index for index, is_cut in enumerate(self.truncated) if is_cut]

    def output(self, row: int) -> NDArray[Any]:
        """Return the vector of the text `row`, its terms [terms, 2], or the vectors of its tokens, by the kind of the model."""
        numbers: NDArray[Any] = self.vectors[row]
        return numbers if self.lengths is None else numbers[: self.lengths[row]]

    def outputs(self, wanted: Sequence[TextOutput], row: int) -> dict[TextOutput, NDArray[Any]]:
        """Return the results of the text `row` for the outputs that the request asked for: a vector, terms [terms, 2], or the vectors of tokens."""
        return {wanted[0]: self.output(row), **{output: rows[row] for output, rows in self.further.items()}}

    def terms(self, row: int) -> list[tuple[int, float]]:
        """Return the terms of the text `row`, which a sparse vector consists of: the id of a token of the vocabulary, and its weight."""
        return [(int(index), weight) for index, weight in self.output(row).tolist()]


class TextTask(StrEnum):
    """A task that a model of texts can be called for. The value is its name in errors and descriptions."""

    EMBED = "embed"  # one vector for each text
    EMBED_ALL = "embed_all"  # one vector for each token
    EMBED_SPARSE = "embed_sparse"  # weights of a text's terms
    RERANK = "rerank"  # how well a document answers a query
    PREDICT = "predict"  # labels of a text or a pair, with their scores
    PREDICT_TOKENS = "predict_tokens"  # labels of the tokens of a text


class WorkersUse(NamedTuple):
    """The resources that the workers of a model take.

    Attributes:
        workers: how many there are at most.
        threads: how many threads each computes with.
        memory_bytes: what each of their processes has in memory now; a page that several processes share counts in parts.
    """

    workers: int
    threads: int
    memory_bytes: list[int]


class VisionFacts(NamedTuple):
    """How a model with a vision tower compares a text with a picture: its logit is the cosine of their vectors times `scale`, plus `bias`.

    With `independent` each logit says by itself whether the two belong together; otherwise one of several does.
    """

    scale: float
    bias: float
    independent: bool

    def logits(self, vectors: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
        """Return the logits [n, m] of n vectors with m others."""
        found: NDArray[Any] = self.scale * (unit_vectors(vectors) @ unit_vectors(others).T) + self.bias
        return found

    def cosines(self, logits: NDArray[Any]) -> NDArray[Any]:
        """Return the cosines of vectors with these logits."""
        found: NDArray[Any] = (logits - self.bias) / self.scale
        return found

    def probabilities(self, logits: NDArray[Any]) -> NDArray[Any]:
        """Return the probabilities of logits [n, m]: that the two belong together, or that it is this one of the m."""
        return sigmoid(logits) if self.independent else softmax(logits)


def no_images(name: str) -> InvalidRequest:
    """Return the error for a picture that is sent to the model `name`, which reads none."""
    return InvalidRequest(
        f"model {name!r} reads no images, as it has no vision tower, or no file that says how images are prepared: name one that has both"
    )


class TextFacts(NamedTuple):
    """The facts that a server tells of a text model, in addition to its name and its sizes.

    Attributes:
        id: its id on the hub, without a revision; "" for the model of a directory.
        listed: the name that lists and responses have; "" for its own.
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
        similarity: how two of its vectors are compared: cosine, dot, euclidean or manhattan; those of late interaction by maxsim or meanmaxsim.
        unscaled: whether its vectors may have other lengths than 1, so that a protocol whose vectors have length 1 must scale them.
        ranges: the least and the greatest number of each dimension, float32 [2, dimensions], for int8 and uint8; None if they are not given.
        use: returns what its workers take; None if nobody knows.
        waiting: returns how many texts wait; None if nobody knows.
        ready: returns whether the model accepts requests.
        vision: how texts are compared with pictures; None for a model that reads none.
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
    similarity: str = "cosine"
    ranges: NDArray[Any] | None = None
    unscaled: bool = False
    use: Callable[[], WorkersUse] | None = None
    waiting: Callable[[], int] | None = None
    ready: Callable[[], bool] = lambda: True
    vision: VisionFacts | None = None


class TextOptions(NamedTuple):
    """The options that the body of a request may state about its texts.

    Attributes:
        dimensions: keep so many numbers at the start of each vector; None for all.
        truncate: whether texts that are too long are cut or refused; None for the server's setting.
        prompt: the name of a prompt of the model, or the text of a prompt, to put before every text; None for the server's prompt.
        whole_words, truncate_left: see TokenRule.
        max_tokens: cut each text to so many tokens, special ones included; None for as many as the model reads.
        want_tokens: also return the tokens as strings.
        outputs: what is to be made of each text, in one pass; none for the model's own output.
    """

    dimensions: int | None = None
    truncate: bool | None = None
    prompt: str | None = None
    whole_words: bool = False
    want_tokens: bool = False
    truncate_left: bool = False
    max_tokens: int | None = None
    outputs: tuple[TextOutput, ...] = ()


NO_OPTIONS = TextOptions()


class TextQuery(NamedTuple):
    """The options for texts from the body of the request, and who asks.

    Attributes:
        frontend: the name of the frontend, for metrics and logs.
        options: the options from the body.
        client: who sends the texts. Requests of one client share one fair share of the queue; with "" the request has a share of its own.
        priority: texts of a higher priority are computed first.
        timeout: seconds until the request fails; None for the server's setting.
        trace: the request's Origin, or the Trace that the endpoint has begun.
        each: an invalid text does not end the request; its error is in `Encoded.errors`.
        as_json: the only text's worker may write the vector, see Encoded.written.
        waited: how many seconds of the timeout have passed already.
        route: the path of the endpoint; "" if the texts did not come over HTTP.
    """

    frontend: str
    options: TextOptions = NO_OPTIONS
    client: str = ""
    priority: int = 0
    timeout: float | None = None
    trace: Trace | Origin = None
    each: bool = False
    as_json: bool = False
    waited: float = 0.0
    route: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether `Encodes.encode_one` can do what is asked for one text: a vector or scores, for a client without a name."""
        options = self.options
        return not (self.client or options.whole_words or options.want_tokens or options.outputs)


class Encodes(Protocol):
    """A served text encoder, as endpoints use it."""

    @property
    def facts(self) -> TextFacts:
        """The facts that a server tells of the model."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""

    @property
    def max_length(self) -> int:
        """The most tokens of a text that the model reads, special tokens included."""

    @property
    def batching(self) -> BatchingSettings:
        """The limits of the model's queue and of its batches, as they are now."""

    async def encode(self, texts: Sequence[Text], query: TextQuery) -> Encoded:
        """Return the vectors of one or more `texts`, in order. Cancelling the call takes the texts out of the queue.

        Raises InvalidRequest naming the index of the text and the rule, and the errors of the queue: Overloaded, DeadlineExceeded, Draining.
        """

    def encode_one(
        self, text: Text, query: TextQuery, done: Callable[[Encoded | WeirError], None]
    ) -> Callable[[], object] | None:
        """Encode one text as `encode` does, and call `done` with the vector or the error.

        Return a function that takes the text back; None if it must go to `encode`. Raises the errors of `encode` that come before the queue.
        """

    async def tokenize(
        self, texts: Sequence[str], *, special: bool, prompt: str | None, timeout: float | None = None
    ) -> list[list[TokenDetail]]:
        """Return the tokens of each text, none cut off; with `special` also the model's special tokens. For `prompt` and `timeout` see `encode`.

        Raises InvalidRequest naming the index of the text and the rule, and DeadlineExceeded.
        """

    async def decode(
        self, ids: Sequence[Sequence[int]], *, skip_special: bool, timeout: float | None = None
    ) -> list[str]:
        """Return the text of each list of token ids, with `skip_special` without the special tokens. For `timeout` see `encode`.

        Raises InvalidRequest for a number that is no id, and DeadlineExceeded.
        """


def listed_name(encoder: Encodes) -> str:
    """Return the name of a model as lists and responses have it."""
    return encoder.facts.listed or encoder.name
