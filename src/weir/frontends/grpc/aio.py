"""Runs on grpc.aio, grpcio's public server and client: the server for a grpcio whose private core has changed, and the Relay.

Handlers, limits of messages and calls, TLS, deadlines and draining of the server are those of core.py. There are three differences: a message
is charged to the account after it has been received, only gRPC itself limits the responses that a client does not read, and each call takes
more time.

A Relay passes calls on to another server of this machine, message by message, with the address of their caller. Who listens for calls but does
not answer all of them has one. The server behind it takes the addresses from metadata, which count only together with the secret that both know.
"""

import asyncio
import hmac
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from weir.errors import WeirError
from weir.frontends.grpc.call import Handler, IncomingCall, Left, Trailers, in_task
from weir.workers.timer import resolve

if TYPE_CHECKING:
    from weir.protocols.account import Account

_OK = 0
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_LONGEST = 1e9  # seconds from now: the deadline of a call that has none


class AioCall(IncomingCall):
    """A call that grpc.aio passes to its handler with `context`. `done` is set when the call has ended."""

    def __init__(self, context: Any, account: "Account", patience: float) -> None:
        self._context = context
        self.patience = patience
        self.account = account
        self.metadata = tuple(context.invocation_metadata() or ())
        left = context.time_remaining()
        self.deadline = time.monotonic() + (_LONGEST if left is None else left)
        self.done: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    @property
    def peer(self) -> str:
        """The caller's address, as gRPC writes it."""
        return self.forwarded or str(self._context.peer())

    def end(self, code: int = _OK, text: str = "", trailers: Trailers = (), body: bytes | None = None) -> None:
        """See IncomingCall."""
        if self.over:
            return
        self._context.set_trailing_metadata(trailers)
        self._context.set_code(_CODES[code])
        self._context.set_details(text)
        self._close()
        resolve(self.done, body)

    def cancel(self) -> None:
        """See IncomingCall."""
        self.end(grpc.StatusCode.CANCELLED.value[0])

    def watch(self) -> None:
        """Do nothing: grpc.aio cancels the handler when the caller leaves."""

    def leave(self) -> None:
        """End the call: the caller has left, or the deadline has passed."""
        self._leave()

    async def put(self, body: bytes) -> None:
        """See IncomingCall."""
        if self.over:
            raise Left
        try:
            await self._context.write(body)
        except Exception:  # of several types, some of them private; the call is over in any case
            raise Left from None

    async def following(self) -> bytes | None:
        """See IncomingCall."""
        message = await self._context.read()
        return message if isinstance(message, bytes) else None  # grpc.aio.EOF


class AioCore(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # the class takes no type argument at run time
    """A gRPC server on grpc.aio, with the interface of core.Core."""

    def __init__(
        self,
        handlers: dict[str, Handler],
        options: Sequence[tuple[str, int]],
        admit: Callable[[str, IncomingCall], bool],
        refuse: Callable[[WeirError, IncomingCall], None],
        account: "Account",
        *,
        max_message_size: int,
        patience: float,
        has_clients: bool = True,
    ) -> None:
        self._handlers = handlers
        self._admit = admit
        self._refuse = refuse
        self._account = account
        self._patience = patience
        self._calls = 0
        if has_clients:
            account.counters.append(lambda: self._calls)
        self._server = grpc.aio.server(options=list(options), maximum_concurrent_rpcs=account.max_connections)
        self._server.add_generic_rpc_handlers((self,))

    def listen(self, address: str, credentials: Any) -> int:
        """Listen at `address`. Return the port, or 0 if the address is in use or invalid. `credentials` None: without TLS."""
        try:
            if credentials is None:
                return int(self._server.add_insecure_port(address))
            return int(self._server.add_secure_port(address, credentials))
        except RuntimeError:
            return 0

    async def start(self) -> None:
        """Accept calls from now on."""
        await self._server.start()

    def discard(self) -> None:
        """Free a server that was not started."""

    async def stop(self, grace: float) -> None:
        """Accept no more calls. Return when the calls in flight have ended; after `grace` seconds they are cancelled."""
        await self._server.stop(grace)

    def service(self, details: Any) -> Any:
        """grpc.aio: return the handler of a call, or None."""
        path = details.method
        found = self._handlers.get(path)
        if found is None:
            return None

        async def serve(_: Any, context: Any) -> None:
            await self._serve(path, found, context)

        return grpc.stream_stream_rpc_method_handler(serve)

    async def _serve(self, path: str, handler: Handler, context: Any) -> None:
        call = AioCall(context, self._account, self._patience)
        self._calls += 1
        try:
            if self._admit(path, call):
                await self._begin(handler, call)
            body = await call.done
        except asyncio.CancelledError:
            call.leave()
            raise
        finally:
            self._calls -= 1
        if body is not None:
            with suppress(Exception):  # the caller has left
                await context.write(body)

    async def _begin(self, handler: Handler, call: AioCall) -> None:
        if handler.takes_stream:
            handler.begin(call, b"")
            return
        try:
            body = await call.read()
        except WeirError as error:
            self._refuse(error, call)
            return
        if body is None:
            call.lacks_message()
        else:
            handler.begin(call, body)


_SECRET, _PEER = "weir-relay-secret", "weir-relay-peer"
_OWN = ("grpc-", ":")  # names that gRPC sets itself begin with these
_NOT_PASSED = frozenset(("user-agent", "te", "content-type", _SECRET, _PEER))
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]


class Relay:
    """Passes calls on to the server at `target`."""

    def __init__(self, target: str, secret: str, *, development: bool) -> None:
        self._target = target
        self._secret = secret
        self._development = development
        self._channel: Any = None

    def handler(self, path: str, *, takes_stream: bool) -> Handler:
        """Return the handler that passes calls to `path` on."""

        async def run(call: IncomingCall, body: bytes) -> None:
            await self._pass(path, call, None if takes_stream else body)

        return Handler(in_task(run, development=self._development), takes_stream)

    async def stop(self) -> None:
        """Close the connection. Idempotent."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _pass(self, path: str, call: IncomingCall, body: bytes | None) -> None:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        onward = self._channel.stream_stream(path)(
            timeout=call.time_remaining(exact=True), metadata=self._metadata(call), wait_for_ready=True
        )
        sending = asyncio.ensure_future(_send(call, onward, body))
        returning = asyncio.ensure_future(_return(call, onward))
        try:
            await asyncio.wait((sending, returning), return_when=asyncio.FIRST_COMPLETED)
            if not returning.done():
                sending.result()  # raises what has ended it too soon: nothing else would end the call
            await returning
        finally:
            sending.cancel()
            returning.cancel()
            onward.cancel()

    def _metadata(self, call: IncomingCall) -> list[tuple[str, Any]]:
        kept = [pair for pair in call.metadata if not pair[0].startswith(_OWN) and pair[0] not in _NOT_PASSED]
        return [*kept, (_SECRET, self._secret), (_PEER, call.peer)]


async def _send(call: IncomingCall, onward: Any, body: bytes | None) -> None:
    # The other end has ended the call. InternalError: grpc.aio has not read its status yet.
    with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
        if body is not None:
            await onward.write(body)
        else:
            # The method refuses what is too much, in the form of the call.
            while (message := await call.read(refusing=False)) is not None:
                await onward.write(message)
                call.release(len(message))
        await onward.done_writing()


async def _return(call: IncomingCall, onward: Any) -> None:
    with suppress(grpc.aio.AioRpcError):  # its status follows
        async for message in onward:
            call.charge(len(message), refusing=False)
            await call.write(message)
            call.release(len(message))
    code, text = await onward.code(), await onward.details()
    trailers = tuple((name, value) for name, value in await onward.trailing_metadata() or ())
    call.end(code.value[0], text or "", trailers)


def take_peer(call: IncomingCall, secret: str) -> bool:
    """Take the address of the caller from the metadata of a call that a Relay has passed on. Return False, with nothing done, for another call."""
    found = {name: value for name, value in call.metadata if name in (_SECRET, _PEER)}
    if not hmac.compare_digest(str(found.get(_SECRET, "")).encode(), secret.encode()):
        return False
    call.forwarded = str(found.get(_PEER, ""))
    call.metadata = tuple(pair for pair in call.metadata if pair[0] not in (_SECRET, _PEER))
    return True
