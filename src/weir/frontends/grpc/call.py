"""One gRPC call: bytes in, bytes out, errors as status codes.

Handlers get and return encoded messages. So the size of a message is known without protobuf, a malformed message is refused as an invalid request, and
large tensors need not pass through protobuf.
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
from weir.protocols.offloading import LONG_RESPONSE
from weir.protocols.response import error_value, retry_after
from weir.wire.inference import ERROR_NAME
from weir.wire.kserve_grpc import Method
from weir.wire.status import grpc_code

if TYPE_CHECKING:
    from weir.frontends.grpc.core import Completions, Unsent
    from weir.protocols.account import Account


def _private() -> Any:
    try:
        return import_module("grpc._cython.cygrpc")
    except ImportError:  # aio.py does not need it
        return None


cygrpc = _private()  # the core on which both servers of grpcio are built; see core.py
# It logs a traceback for each value in the metadata that is not UTF-8, and goes on.
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: not str(record.msg).startswith("Invalid encoding"))
# The names of the core that are used. They are not public, so a later grpcio may lack some.
NEEDED = (
    "CompletionQueue",
    "CompletionType",
    "ReceiveCloseOnServerOperation",
    "ReceiveMessageOperation",
    "SendInitialMetadataOperation",
    "SendMessageOperation",
    "SendStatusFromServerOperation",
    "Server",
    "channelz_get_server_sockets",
    "channelz_get_servers",
)

Trailers = tuple[tuple[str, str], ...]

_LONGEST = 1e8  # seconds: a call whose deadline is later has none
_OK, _UNIMPLEMENTED = 0, 12

# A response of more bytes than this is charged until it has been sent.
_COUNTED_ABOVE = 4 << 10


def lacking() -> list[str]:
    """Return the names of NEEDED that the installed grpcio lacks."""
    return [name for name in NEEDED if not hasattr(cygrpc, name)]


class Left(Exception):
    """The caller has left, so nothing can be written."""


class IncomingCall:
    """A call as its handler sees it. It belongs to one event loop.

    The client may take `patience` seconds to read a message. `metadata` are pairs of name and value. `caller` says whose API key it has. `forwarded` is the caller's address, if another process has passed the call on; "" otherwise. `on_left` is called once if the call is watched and its caller leaves, or its deadline passes, before its end.
    `ended` is called, with an event, when the core has finished the call.
    """

    _watched = False
    _held = 0  # bytes charged until the call ends
    _raw: Any = None
    forwarded = caller = ""
    on_left: Callable[[], object] | None = None
    over = False  # it has ended, or its caller has left

    def __init__(
        self, event: Any, events: "Completions", account: "Account", unsent: "Unsent", ended: Callable[[Any], None]
    ) -> None:
        self._ended = ended
        self._events = events
        self.account = account
        self._unsent = unsent
        self.patience = unsent.patience
        self._raw = event.call
        self._head: tuple[Any, ...] = (cygrpc.SendInitialMetadataOperation((), 0),)  # until it is sent
        self.metadata: tuple[tuple[str, str | bytes], ...] = event.invocation_metadata
        # gRPC tells it by the wall clock, which may jump.
        self.deadline: float = time.monotonic() + (event.call_details.deadline - time.time())

    @property
    def peer(self) -> str:
        """The caller's address, as gRPC writes it: `ipv4:127.0.0.1:5000`."""
        return self.forwarded or ("" if self._raw is None else self._raw.peer().decode("latin-1"))

    def time_remaining(self, *, exact: bool = False) -> float | None:
        """Return the seconds until the deadline; None if there is none. Unless `exact`, many are whole hundredths: so calls of one timeout share a form."""
        left = self.deadline - time.monotonic()
        if left >= _LONGEST:
            return None
        return max(0.0, left) if exact or left < 1.0 else left // 0.01 / 100.0

    def end(self, code: int = _OK, text: str = "", trailers: Trailers = (), body: bytes | None = None) -> None:
        """End the call, with `body` as its last message. Nothing happens if it is over."""
        if self.over:
            return
        messages = [] if body is None else [cygrpc.SendMessageOperation(body, 0)]
        status = cygrpc.SendStatusFromServerOperation(trailers, code, text.encode(), 0)
        operations = *self._head, *messages, status
        heard: Callable[[Any], None] = _nothing
        if not self._watched:
            # The core then reports the end of the call and the sent status in one event instead of two.
            self._watched = True
            operations, heard = (*operations, cygrpc.ReceiveCloseOnServerOperation(0)), self._ended
        if body is not None and len(body) > _COUNTED_ABOVE:
            heard = self._when_sent(len(body), heard)
        try:
            self._events.start(self._raw, operations, heard)
        except Left:
            heard(None)
        self._close()

    def respond(self, body: bytes, trailers: Trailers = ()) -> None:
        """End the call with its only response. Raises what Account.take raises if that is long, and there is no room: what its client does not read is
        charged afterwards."""
        if len(body) > LONG_RESPONSE:
            self.charge(len(body))
        self.end(trailers=trailers, body=body)

    def charge(self, size_bytes: int, *, refusing: bool = True) -> None:
        """Charge `size_bytes` to the call until it ends. Raises what Account.take raises, unless another server is the one that refuses."""
        if not self.over:
            take = self.account.take if refusing else self.account.add
            take(size_bytes)
            self._held += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give back `size_bytes` of what the call was charged."""
        if not self.over:
            self.account.give(size_bytes)
            self._held -= size_bytes

    def cancel(self) -> None:
        """Abort the call without a status, because its client does not read."""
        if self._raw is not None:
            self._raw.cancel()

    def _when_sent(self, size_bytes: int, then: Callable[[Any], None]) -> Callable[[Any], None]:
        unsent = self._unsent
        number = unsent.add(self._raw, size_bytes)

        def sent(event: Any) -> None:
            unsent.remove(number)
            then(event)

        return sent

    def watch(self) -> None:
        """From now on, notice when the caller leaves. Idempotent."""
        if not self._watched and not self.over:
            self._watched = True
            with suppress(Left):
                self._events.start(self._raw, (cygrpc.ReceiveCloseOnServerOperation(0),), self._closed)

    def _closed(self, event: Any) -> None:
        self._ended(event)
        if event.batch_operations[0].cancelled():
            self._leave()

    async def write(self, body: bytes) -> None:
        """Send a message. Return when gRPC accepts the next one; only one may be sent at a time.

        Raises Left; if the client does not read for `patience` seconds, the call is aborted first.
        """
        try:
            async with asyncio.timeout(self.patience):
                await self.put(body)
        except TimeoutError:
            self.cancel()
            raise Left from None

    async def put(self, body: bytes) -> None:
        """Send a message, however long that takes. Raises Left."""
        head, self._head = self._head, ()
        if self.over or not await self._done((*head, cygrpc.SendMessageOperation(body, 0)), _success):
            raise Left

    async def read(self, *, refusing: bool = True) -> bytes | None:
        """Return the next message; None if the client sends no more. Only one read may wait at a time.

        The call is charged for it, until the call ends or `release`. Raises what `charge` raises.
        """
        body = None if self.over else await self.following()
        if body is not None:
            self.charge(len(body), refusing=refusing)
        return body

    def following(self) -> Awaitable[bytes | None]:
        """Return the next message, without a charge; None if the client sends no more."""
        return self._done((cygrpc.ReceiveMessageOperation(0),), message_in)

    def await_message(self, heard: Callable[[Any], None]) -> None:
        """Call `heard` with the event of the client's only message, see `message_in`."""
        self._events.start(self._raw, (cygrpc.ReceiveMessageOperation(0),), heard)

    def lacks_message(self) -> None:
        """End a unary call whose client sent no message."""
        self.end(_UNIMPLEMENTED, "the call requires exactly one request message")

    def _leave(self) -> None:
        on_left = None if self.over else self.on_left
        self._close()
        if on_left is not None:
            on_left()

    def _close(self) -> None:
        # The core counts a call until its last reference is gone, so no reference cycle may keep it.
        self.over = True
        self._raw = self.on_left = None
        if self._held:
            self.account.give(self._held)
            self._held = 0

    async def _done(self, operations: tuple[Any, ...], outcome: Callable[[Any], Any]) -> Any:
        future = asyncio.get_running_loop().create_future()

        def heard(event: Any) -> None:
            if not future.done():
                future.set_result(outcome(event))

        self._events.start(self._raw, operations, heard)
        return await future


def message_in(event: Any) -> bytes | None:
    """Return the message that has been received; None if the client has sent none, or has left."""
    body: bytes | None = event.batch_operations[0].message()
    return body


def _success(event: Any) -> bool:
    return bool(event.success)


def _nothing(event: Any) -> None:
    """Ignore that a status has been sent."""


FRONTEND = "grpc"
Respond = Callable[[Any, IncomingCall], Awaitable[Any]]

# A status is sent in the trailers, of which clients accept 8 KiB in total. A byte that is not printable ASCII is percent-encoded there and
# takes three (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md, "Status-Message").
_MAX_STATUS = 4096  # bytes

_log = logging.getLogger("weir.grpc")


class Handler(NamedTuple):
    """The handler of one method. `begin` is called on the event loop with the message of a unary call; with b"" if the client sends a stream."""

    begin: Callable[[IncomingCall, bytes], None]
    takes_stream: bool = False


def unary(method: Method, respond: Respond, *, development: bool) -> Handler:
    """Return the handler of a unary call. `respond` takes the request message and returns the response message."""

    async def run(call: IncomingCall, body: bytes) -> None:
        message = await respond(parse(method, body), call)
        call.respond(message.SerializeToString())

    return Handler(in_task(run, development=development))


def in_task(
    run: Callable[[IncomingCall, bytes], Awaitable[None]], *, development: bool
) -> Callable[[IncomingCall, bytes], None]:
    """Return a function that starts `run` in a task, which is cancelled when the caller leaves.

    An exception of `run` ends the call with its status. Otherwise the call ends with status OK.
    """

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
    """Return the message in `body`. Raises InvalidRequest if it is not of the type that `method` takes."""
    try:
        return method.request.FromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"body: must be a {method.request.DESCRIPTOR.full_name} ({error})") from None


def refuse(error: BaseException, call: IncomingCall, trailers: Trailers = (), *, development: bool) -> None:
    """End the call with the status of `error` and with `trailers` as metadata."""
    note(error)
    if name := name_of(error):
        trailers = (*trailers, (ERROR_NAME, name))
    if isinstance(error, CapacityError):  # clients with a retry policy wait this long (gRPC proposal A6)
        trailers = (*trailers, ("grpc-retry-pushback-ms", str(1000 * retry_after(error))))
    code: Any = code_of(error).value[0]
    call.end(code, text_of(error, development=development), trailers)


def note(error: BaseException) -> None:
    """Log an exception that is not Weir's: the caller gets only "internal error"."""
    if not isinstance(error, WeirError):
        _log.error("a gRPC call failed", exc_info=error)


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the status code of `error`."""
    return grpc.StatusCode[grpc_code(error)]


def text_of(error: BaseException, *, development: bool) -> str:
    """Return the text of `error` for a caller, cut to what trailers can carry; with `development` it includes the traceback."""
    value = error_value(error, None, development=development)
    details = value["details"]
    traceback = details.get("traceback") if isinstance(details, dict) else None
    return _cut(f"{value['message']}\n{traceback}" if traceback else str(value["message"]))


def _cut(text: str) -> str:
    """Return the beginning of `text` that takes at most `_MAX_STATUS` bytes in gRPC's encoding."""
    room = _MAX_STATUS
    for index, character in enumerate(text):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode("utf-8", "replace"))
        if room < 0:
            return f"{text[:index]}..."
    return text


def name_of(error: BaseException) -> str:
    """Return the class name of `error`; "" if it is not Weir's."""
    return type(error).__name__ if isinstance(error, WeirError) else ""


def headers_of(call: IncomingCall) -> list[tuple[bytes, bytes]]:
    """Return the metadata of a call as HTTP headers, so that its token is that of `authorization: Bearer`."""
    return [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in call.metadata]
