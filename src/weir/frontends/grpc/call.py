"""One call of gRPC: bytes in, bytes out, errors as status codes.

Handlers take and give bytes, so that what a message weighs is known without asking protobuf, a malformed one is refused as an invalid request, and large tensors need not
pass through it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from weir.errors import CapacityError, InvalidRequest, WeirError
from weir.protocols.account import CLAIM
from weir.protocols.response import error_value, retry_after
from weir.protocols.status import grpc_code
from weir.wire.inference import ERROR_NAME
from weir.wire.kserve_grpc import Method

if TYPE_CHECKING:
    from weir.frontends.grpc.core import Unsent
    from weir.protocols.account import Account


def _private() -> Any:
    try:
        return import_module("grpc._cython.cygrpc")
    except ImportError:  # aio.py does without
        return None


cygrpc = _private()  # what both servers of grpcio are made on; see core.py
# All that is used of it. It is not public: a grpcio of tomorrow may lack some.
NEEDED = (
    "CompletionQueue", "CompletionType", "ReceiveCloseOnServerOperation", "ReceiveMessageOperation",
    "SendInitialMetadataOperation", "SendMessageOperation", "SendStatusFromServerOperation", "Server", "channelz_get_server_sockets",
    "channelz_get_servers",
)  # fmt: skip

Trailers = tuple[tuple[str, str], ...]

_LONGEST = 1e8  # seconds; a call without a deadline waits for ever
_OK, _UNIMPLEMENTED = 0, 12

# Answers larger than this many bytes are counted until they have been sent.
_COUNTED_ABOVE = 4 << 10


def lacking() -> list[str]:
    """Return what the installed grpcio lacks of NEEDED."""
    return [name for name in NEEDED if not hasattr(cygrpc, name)]


class Left(Exception):
    """The caller has left: there is nobody to write to."""


class GrpcGate:
    """Lets operations into the core's queue until that is shut: one that came later would abort the process."""

    __slots__ = ("_closed",)

    def __init__(self) -> None:
        self._closed = False

    def start(self, call: Any, operations: tuple[Any, ...], heard: Callable[[Any], None]) -> None:
        """Start operations on one of the core's calls; `heard` is called at their end. Raises Left when the gate is closed."""
        if self._closed:
            raise Left
        call.start_server_batch(operations, heard)

    def close(self) -> None:
        """Let no more in."""
        self._closed = True


class IncomingCall:
    """What a handler has of its call; to be used on the event loop.

    `metadata` are pairs. `on_left` is called, once, when the caller of a call that is watched leaves or its deadline passes before the
    end. `ended` is called when the core is done with the call.
    """

    __slots__ = (
        "_begun", "_ended", "_gate", "_held", "_raw", "_unsent", "_watched", "account", "deadline", "metadata", "on_left",
        "over",
    )  # fmt: skip

    def __init__(
        self, event: Any, gate: GrpcGate, account: "Account", unsent: "Unsent", ended: Callable[[], None]
    ) -> None:
        self._ended = ended
        self._watched = False
        self._gate = gate
        self.account = account
        self._unsent = unsent
        self._held = 0  # bytes that are charged as long as the call goes on
        self._raw: Any = event.call
        self._begun = False
        self.metadata: tuple[tuple[str, str | bytes], ...] = event.invocation_metadata
        self.deadline: float = event.call_details.deadline
        self.on_left: Callable[[], object] | None = None
        self.over = False  # it has had its end, or its caller has left

    @property
    def peer(self) -> str:
        """Where the caller is, in gRPC's form: `ipv4:127.0.0.1:5000`."""
        return "" if self._raw is None else _text(self._raw.peer())

    def time_remaining(self) -> float | None:
        """Return the seconds to its deadline; None if it has none."""
        left = self.deadline - time.time()
        return max(0.0, left) if left < _LONGEST else None

    def end(self, code: int = _OK, text: str = "", trailers: Trailers = (), body: bytes | None = None) -> None:
        """Give the call its end, with `body` as the last message; nothing happens if it has had one."""
        if self.over:
            return
        messages = [] if body is None else [cygrpc.SendMessageOperation(body, 0)]
        status = cygrpc.SendStatusFromServerOperation(trailers, code, text.encode(), 0)
        large = body is not None and len(body) > _COUNTED_ABOVE
        heard = self._when_sent(len(body)) if body is not None and large else _nothing
        operations = *self._head(), *messages, status
        if not self._watched:
            # The core reports the end of the call and its status in one event where there would be two.
            self._watched = True
            operations, heard = (*operations, cygrpc.ReceiveCloseOnServerOperation(0)), self._when_ended(heard)
        try:
            self._start(operations, heard)
        except Left:
            heard(None)
        self._close()

    def charge(self, size_bytes: int) -> None:
        """Charge bytes to the call as long as it goes on. Raises what Account.take raises."""
        if not self.over:
            self.account.take(size_bytes)
            self._held += size_bytes

    def cancel(self) -> None:
        """End the call without a word: its client does not read."""
        if self._raw is not None:
            self._raw.cancel()

    def _when_sent(self, size_bytes: int) -> Callable[[Any], None]:
        unsent = self._unsent
        number = unsent.add(self._raw, size_bytes)
        return lambda event: unsent.remove(number)

    def _when_ended(self, heard: Callable[[Any], None]) -> Callable[[Any], None]:
        ended = self._ended

        def both(event: Any) -> None:
            ended()
            heard(event)

        return both

    def watch(self) -> None:
        """Hear from now on when the caller leaves. Nothing happens if it was called before."""
        if not self._watched and not self.over:
            self._watched = True
            with suppress(Left):
                self._start((cygrpc.ReceiveCloseOnServerOperation(0),), self._closed)

    def _closed(self, event: Any) -> None:
        self._ended()
        if event.batch_operations[0].cancelled():
            self._leave()

    async def write(self, body: bytes) -> None:
        """Send a message, one at a time; return when gRPC would take the next one. Raises Left."""
        if self.over or not await self._done((*self._head(), cygrpc.SendMessageOperation(body, 0)), _success):
            raise Left

    async def read(self) -> bytes | None:
        """Return the next message, one at a time; None if the client sends no more."""
        if self.over:
            return None
        body: bytes | None = await self._done((cygrpc.ReceiveMessageOperation(0),), _message)
        return body

    def await_message(self, heard: Callable[["IncomingCall", bytes | None], None]) -> None:
        """Have `heard` called with the one message that the client sends; None if it sends none, or leaves."""
        self._start((cygrpc.ReceiveMessageOperation(0),), lambda event: heard(self, _message(event)))

    def lacks_message(self) -> None:
        """End a unary call that came without its message."""
        self.end(_UNIMPLEMENTED, "the call requires exactly one request message")

    def _leave(self) -> None:
        on_left = None if self.over else self.on_left
        self._close()
        if on_left is not None:
            on_left()

    def _close(self) -> None:
        # The core counts a call until the last who knows it lets go, so no circle may hold it.
        self.over = True
        self._raw = self.on_left = None
        if self._held:
            self.account.give(self._held)
            self._held = 0

    def _head(self) -> tuple[Any, ...]:
        begun, self._begun = self._begun, True
        return () if begun else (cygrpc.SendInitialMetadataOperation((), 0),)

    async def _done(self, operations: tuple[Any, ...], outcome: Callable[[Any], Any]) -> Any:
        future = asyncio.get_running_loop().create_future()

        def heard(event: Any) -> None:
            if not future.done():
                future.set_result(outcome(event))

        self._start(operations, heard)
        return await future

    def _start(self, operations: tuple[Any, ...], heard: Callable[[Any], None]) -> None:
        self._gate.start(self._raw, operations, heard)


def _message(event: Any) -> bytes | None:
    body: bytes | None = event.batch_operations[0].message()
    return body


def _success(event: Any) -> bool:
    return bool(event.success)


def _nothing(event: Any) -> None:
    """Nobody waits for the end to be sent."""


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


FRONTEND = "grpc"
Answer = Callable[[Any, IncomingCall], Awaitable[Any]]

# A status travels in the trailers, of which clients take 8 KiB together; in them a byte that is not printable ASCII takes three.
_MAX_STATUS = 4096  # bytes

_log = logging.getLogger("weir.grpc")


class Handler(NamedTuple):
    """What answers calls of one method: `begin` is called on the event loop, with the message of a unary request, or with
    none if the client sends a stream."""

    begin: Callable[[IncomingCall, bytes], None]
    takes_stream: bool = False


def unary(method: Method, answer: Answer, *, development: bool) -> Handler:
    """Return the handler of a unary call: `answer` takes its message and returns the message that answers it."""

    async def run(call: IncomingCall, body: bytes) -> None:
        message = await answer(parse(method, body), call)
        call.end(body=message.SerializeToString())

    return Handler(in_task(run, development=development))


def in_task(
    run: Callable[[IncomingCall, bytes], Awaitable[None]], *, development: bool
) -> Callable[[IncomingCall, bytes], None]:  # fmt: skip
    """Return what begins `run` in a task of its own, which is cancelled when the caller leaves. What it raises is the end of the
    call, or else it ends well."""

    async def ran(call: IncomingCall, body: bytes) -> None:
        with call.account.claim() as claim:
            CLAIM.set(claim)
            try:
                await run(call, body)
            except Left:
                return
            except Exception as error:
                refuse(error, call, development=development)
            else:
                call.end()

    def begin(call: IncomingCall, body: bytes) -> None:
        if not call.over:
            call.on_left = asyncio.create_task(ran(call, body)).cancel

    return begin


def parse(method: Method, body: bytes) -> Any:
    """Return the message in `body`. Raises InvalidRequest if it is not the one that the method takes."""
    try:
        return method.request.FromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"body: must be a {method.request.DESCRIPTOR.full_name} ({error})") from None


def refuse(error: BaseException, call: IncomingCall, trailers: Trailers = (), *, development: bool) -> None:
    """End the call with the status of `error`, and with `trailers` as metadata."""
    note(error)
    if name := name_of(error):
        trailers = (*trailers, (ERROR_NAME, name))
    if isinstance(error, CapacityError):  # how long clients with a retry policy wait
        trailers = (*trailers, ("grpc-retry-pushback-ms", str(1000 * retry_after(error))))
    code: Any = code_of(error).value[0]
    call.end(code, text_of(error, development=development), trailers)


def note(error: BaseException) -> None:
    """Log an exception that is none of ours: its caller reads of an internal error only."""
    if not isinstance(error, WeirError):
        _log.error("a call of gRPC failed", exc_info=error)


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the status code of `error`."""
    return grpc.StatusCode[grpc_code(error)]


def text_of(error: BaseException, *, development: bool) -> str:
    """Return what a caller reads of `error`, as much as trailers can carry; with `development`, its traceback too."""
    value = error_value(error, None, development=development)
    details = value["details"]
    traceback = details.get("traceback") if isinstance(details, dict) else None
    return _cut(f"{value['message']}\n{traceback}" if traceback else str(value["message"]))


def _cut(text: str) -> str:
    """Return as much of `text` as takes `_MAX_STATUS` bytes where gRPC writes it."""
    room = _MAX_STATUS
    for place, character in enumerate(text):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode("utf-8", "replace"))
        if room < 0:
            return f"{text[:place]}..."
    return text


def name_of(error: BaseException) -> str:
    """Return the name of the class of `error`; "" of one that is none of ours."""
    return type(error).__name__ if isinstance(error, WeirError) else ""


def headers_of(call: IncomingCall) -> list[tuple[bytes, bytes]]:
    """Return the metadata of a call as the headers that they were; its token is `authorization: Bearer`."""
    return [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in call.metadata]
