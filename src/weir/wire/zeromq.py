"""The frames of bert-as-service over ZeroMQ, and Weir's own dialect of them, in which every failure is an answer.

A request of four frames is bert-as-service's: identity, texts or a command, the request's number, how many texts. With a fifth, a
JSON object (`Wishes`), it is Weir's: its answers go to a topic of their own, so that no other client ever sees them, and are
errors too. docs/reference/zeromq.md has the tables.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy
from numpy.typing import NDArray

from weir.errors import InvalidRequest, WeirError, bounded
from weir.wire.surrogates import find_half, without_halves, without_nul, words_without_nul
from weir.wire.values import UNREADABLE, UNWRITABLE, writable

SHOW_CONFIG, SHOW_STATUS, TERMINATION = b"SHOW_CONFIG", b"SHOW_STATUS", b"TERMINATION"
PENDING, CANCEL = b"PENDING", b"CANCEL"  # Weir's own: which of these do you not know? forget these
COMMANDS = frozenset((SHOW_CONFIG, SHOW_STATUS, TERMINATION, PENDING, CANCEL))

MAX_FRAMES = 5
MAX_IDENTITY = 255  # bytes
MOST_PRIORITY = 10**9 - 1
_MAX_DIGITS = 20
_MAX_COMMAND = max(map(len, COMMANDS))  # bytes
_MAX_WISHES = 64 << 10  # bytes: the numbers of thousands of requests
_PIECE = 1 << 20  # bytes of a list of texts that are read at once: a few milliseconds
_NOTHING = b","  # what stands in a piece between two commas that have nothing between them: no list has that
_LOOKED_AT = 1 << 16  # bytes outside of texts in which the end of an element is looked for
_MOST_SHOWN = 500  # characters of an error in a refusal
_OWN = b"\0weir\0"  # before the identity in the topic of Weir's own answers

# One text; two that belong together; words already cut; token ids.
Text = str | tuple[str, str] | list[str] | list[int]


class Wishes(msgspec.Struct, omit_defaults=True):
    """The fifth frame. `timeout` is in seconds; `priority` higher first; `tokens` asks for the texts as they were read; `prompt` is to stand before each; `token` is the
    control token; `ids` the requests that a command is about."""

    timeout: float | None = None
    model: str = ""
    priority: Annotated[int, msgspec.Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    tokens: bool = False
    prompt: str | None = None
    token: str | None = None
    ids: list[int] = []


class Ask(NamedTuple):
    """A request. `wishes` is the fifth frame as it came; None in the dialect of bert-as-service."""

    identity: bytes
    payload: bytes | bytearray
    id: bytes
    size: int  # how many texts
    wishes: bytes | None = None

    @property
    def command(self) -> bytes:
        """The command that it is; empty for texts."""
        return bytes(self.payload) if len(self.payload) <= _MAX_COMMAND and bytes(self.payload) in COMMANDS else b""

    @property
    def topic(self) -> bytes:
        """Under which its answers go."""
        return self.identity if self.wishes is None else own_topic(self.identity)


class Failed(msgspec.Struct, omit_defaults=True):
    """An error: its class in weir.errors, its text, the HTTP status that stands for it, and when to ask again."""

    type: str
    message: str
    status: int = 500
    retry_after: float | None = None


class Said(msgspec.Struct, omit_defaults=True):
    """The second frame of an answer in Weir's dialect: of vectors (`dtype`, `shape`, what was `truncated`, `tokens`, how many texts were
    `foreign` token ids), or one of `error`, `facts` and `unknown`."""

    dtype: str = ""
    shape: list[int] = []
    truncated: list[int] = []
    tokens: list[list[str]] | None = None
    foreign: int = 0
    error: Failed | None = None
    facts: dict[str, Any] | None = None
    unknown: list[int] | None = None


class Answer(NamedTuple):
    """An answer: to which request, what it says, and the vectors if it has some."""

    topic: bytes
    id: int
    said: Said
    vectors: NDArray[Any] | None


class _Pair(msgspec.Struct):
    text: str
    second: str


_COMMA = ord(",")
_TEXTS = msgspec.json.Decoder(list[str | list[str | int] | _Pair])
_WISHES = msgspec.json.Decoder(Wishes)
_SAID = msgspec.json.Decoder(Said)
_ENCODE = msgspec.json.Encoder(enc_hook=writable).encode


def own_topic(identity: bytes) -> bytes:
    """Return the topic of Weir's own answers to a client."""
    return _OWN + identity + b"\0"


# Requests.


def read_ask(frames: Sequence[bytes | bytearray]) -> Ask:
    """Return the request in `frames`; texts and wishes are not looked into. Raises InvalidRequest if it is none."""
    if len(frames) not in (4, 5):
        raise InvalidRequest(f"frames: {len(frames)}; a request has 4, or 5")
    identity, payload, number, count = bytes(frames[0]), frames[1], bytes(frames[2]), bytes(frames[3])
    if not 0 < len(identity) <= MAX_IDENTITY:
        raise InvalidRequest(f"identity: {len(identity)} bytes; 1 to {MAX_IDENTITY} are allowed")
    if identity.startswith(_OWN[:1]):
        raise InvalidRequest("identity: must not begin with a zero byte")
    for name, digits in (("id", number), ("count", count)):
        if not (digits.isdigit() and len(digits) <= _MAX_DIGITS):
            raise InvalidRequest(f"{name}: {digits[:_MAX_DIGITS]!r}; must be a number of at most {_MAX_DIGITS} digits")
    return Ask(identity, payload, number, int(count), bytes(frames[4]) if len(frames) == 5 else None)


def read_wishes(data: bytes) -> Wishes:
    """Return the fifth frame. Raises InvalidRequest."""
    if len(data) > _MAX_WISHES:
        raise InvalidRequest(f"wishes: {len(data)} bytes; {_MAX_WISHES} are allowed")
    try:
        return _WISHES.decode(data)
    except UNREADABLE as error:
        raise InvalidRequest(f"wishes: must be a JSON object as documented ({error})") from None


def read_texts(ask: Ask) -> list[Text]:
    """Return the texts of a request. It takes milliseconds at a time, however many there are, so that other threads are let in between.

    In the dialect of bert-as-service ` ||| ` parts the two of a pair, and characters that are no text are left out as there: NUL, and halves of
    surrogate pairs. Raises InvalidRequest if they are not as many as was said, or one of them is no text.
    """
    stock = ask.wishes is None
    found: list[Any] = []
    for piece in _pieces(ask.payload):
        found += _read_piece(piece, stock, len(found))
    if len(found) != ask.size:
        raise InvalidRequest(f"count: {ask.size}, but there are {len(found)} texts")
    if not found:
        raise InvalidRequest("texts: must not be empty")
    return [_text(place, each, stock) for place, each in enumerate(found)]


def _read_piece(piece: bytes | bytearray, stock: bool, before: int) -> list[Any]:
    """Return the texts in a piece of the list, which has so many `before` it."""
    try:
        return _TEXTS.decode(piece)
    except UNREADABLE as error:
        half = find_half(piece)
        made = without_halves(piece) if stock else None
        if half is not None and made is None:
            where = re.sub(r"^\[(\d+)\]", lambda found: f"texts[{before + int(found[1])}]", half.where)
            raise InvalidRequest(f"{where or 'texts'}: {half.rule}") from None
        if made is None:
            raise InvalidRequest(f"texts: must be a JSON list of texts ({error})") from None
    try:
        return _TEXTS.decode(made)
    except UNREADABLE as error:
        raise InvalidRequest(f"texts: must be a JSON list of texts ({error})") from None


def _pieces(payload: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """Cut a JSON list between its elements into lists of about a megabyte. What is no list comes as it is."""
    start, size = payload.find(b"[") + 1, _PIECE
    if len(payload) <= _PIECE or payload[:start].strip() != b"[":
        yield payload
        return
    while len(payload) - start > size:
        cut = _last_comma(bytes(payload[start : start + size]))
        if cut is None:
            size *= 2  # one element is as large
            continue
        yield b"[" + (payload[start : start + cut].strip() or _NOTHING) + b"]"
        start, size = start + cut + 1, _PIECE
    rest = payload[start:].strip()
    yield b"[" + (_NOTHING + rest if rest == b"]" else rest)


def _last_comma(part: bytes) -> int | None:
    """Return where the last comma between two elements is in a `part` of a list that begins with an element; None if there is none."""
    # Escapes are made to be of no meaning, so that every quote is the begin or the end of a text.
    outside = part.replace(rb"\\", b"__").replace(rb"\"", b"__").split(b'"')
    end = len(part)
    if not len(outside) % 2:  # it ends within a text
        end -= len(outside.pop()) + 1
    structure = b"".join(outside[::2])
    depth = sum(map(structure.count, b"[{")) - sum(map(structure.count, b"]}"))
    looked_at = 0
    for place in range(len(outside) - 1, -1, -1):
        end -= len(outside[place])
        if not place % 2:
            for at in range(len(outside[place]) - 1, -1, -1):
                sign = outside[place][at]
                if sign == _COMMA and not depth:
                    return end + at
                depth += (sign in b"]}") - (sign in b"[{")
            looked_at += len(outside[place])
        end -= 1  # the quote before it
        if looked_at > _LOOKED_AT:
            return None
    return None


def _text(place: int, found: Any, stock: bool) -> Text:
    if isinstance(found, str):
        return _parted(without_nul(found)) if stock else found
    if isinstance(found, _Pair):
        return found.text, found.second
    if found and len({type(each) for each in found}) != 1:
        raise InvalidRequest(f"texts[{place}]: must be all words, or all token ids")
    return words_without_nul(found) if stock else list(found)


def _parted(text: str) -> Text:
    first, separator, second = text.rpartition(" ||| ")
    return (first, second) if separator and first.strip() and second.strip() else text


def write_texts(texts: Sequence[Text]) -> bytes:
    """Return `texts` as the payload of a request in Weir's dialect. Raises InvalidRequest for a text that has no form in JSON."""
    try:
        return _ENCODE([_Pair(*text) if isinstance(text, tuple) else text for text in texts])
    except UNWRITABLE:
        place = next(place for place, text in enumerate(texts) if not _has_form(text))
        raise InvalidRequest(f"texts[{place}]: has no form in UTF-8 (half of a surrogate pair)") from None


def _has_form(text: Text) -> bool:
    try:
        _ENCODE(text)
    except UNWRITABLE:
        return False
    return True


def write_ask(identity: bytes, payload: bytes, number: int, count: int, wishes: Wishes) -> list[bytes]:
    """Return a request in Weir's dialect."""
    return [identity, payload, b"%d" % number, b"%d" % count, _ENCODE(wishes)]


# Answers.


def write_vectors(
    ask: Ask, vectors: NDArray[Any], truncated: Sequence[int], tokens: list[list[str]] | None, foreign: int = 0
) -> list[bytes | memoryview]:
    """Return the answer of vectors to `ask`, in its dialect. `foreign` texts came as token ids that the model's tokenizer would not make."""
    array = numpy.ascontiguousarray(vectors)
    shape = list(array.shape)
    if ask.wishes is None:
        said = _ENCODE({"dtype": array.dtype.name, "shape": shape, "tokens": "" if tokens is None else tokens})
    else:
        said = _ENCODE(Said(array.dtype.name, shape, list(truncated), tokens, foreign))
    return [ask.topic, said, array.data.cast("B") if array.size else b"", ask.id]


def write_facts(ask: Ask, facts: dict[str, Any]) -> list[bytes | memoryview]:
    """Return the answer to a question about the server, in the dialect of `ask`."""
    if ask.wishes is None:
        return [ask.topic, _ENCODE(facts), ask.id]
    return write_said(ask, Said(facts=facts))


def write_said(ask: Ask, said: Said) -> list[bytes | memoryview]:
    """Return an answer without vectors in Weir's dialect."""
    return [ask.topic, _ENCODE(said), b"", ask.id]


def write_refusal(ask: Ask, error: Failed) -> list[bytes | memoryview]:
    """Return the answer that refuses a request in the dialect of bert-as-service, which has no form for an error.

    It is an array of a type that there is not: whoever makes an array of it, as its clients do, raises TypeError, which quotes the name
    of the type: what is wrong. Other clients find `error` beside it.
    """
    # With a comma it would be several types.
    name = bounded(f"{error.type}: {error.message}", _MOST_SHOWN).replace(",", ";")
    said = {"dtype": f"refused by the server: {name}", "shape": [], "tokens": "", "error": error}
    return [ask.topic, _ENCODE(said), b"", ask.id]


def failed(error: WeirError, status: int) -> Failed:
    """Return `error`, for which HTTP has `status`, ready to travel."""
    return Failed(type(error).__name__, bounded(error.message), status, getattr(error, "retry_after", None))


def read_answer(frames: Sequence[bytes]) -> Answer:
    """Return an answer in Weir's dialect. Raises InvalidRequest if it is none."""
    if len(frames) != 4 or not frames[3].isdigit() or len(frames[3]) > _MAX_DIGITS:
        raise InvalidRequest(f"answer: {len(frames)} frames; must be 4, the last a number")
    said = _read_said(frames[1])
    vectors = _vectors(said, frames[2]) if said.dtype else None
    return Answer(frames[0], int(frames[3]), said, vectors)


def read_stock_answer(frames: Sequence[bytes]) -> Answer | None:
    """Return an answer of vectors in the dialect of bert-as-service; None for its other answers. Raises InvalidRequest."""
    if len(frames) != 4:
        return None
    try:
        found = msgspec.json.decode(frames[1])
        said = msgspec.convert(
            {"dtype": found["dtype"], "shape": found["shape"], "tokens": found.get("tokens") or None}, Said
        )
    except (*UNREADABLE, msgspec.ValidationError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequest(f"answer: not of vectors ({error})") from None
    return read_answer([frames[0], _ENCODE(said), frames[2], frames[3]])


def _read_said(data: bytes) -> Said:
    try:
        return _SAID.decode(data)
    except UNREADABLE as error:
        raise InvalidRequest(f"answer: must be a JSON object as documented ({error})") from None


def _vectors(said: Said, body: bytes) -> NDArray[Any]:
    if said.dtype not in ("float32", "float16") or min(said.shape, default=0) < 0:
        raise InvalidRequest(f"answer: dtype {said.dtype!r:.20} and shape {said.shape!r:.40} are not those of vectors")
    array = numpy.frombuffer(body, said.dtype) if len(body) % numpy.dtype(said.dtype).itemsize == 0 else None
    try:
        if array is not None:
            return array.reshape(said.shape)
    except ValueError:
        pass
    raise InvalidRequest(f"answer: {len(body)} bytes are no {said.dtype} of shape {said.shape!r:.40}")
