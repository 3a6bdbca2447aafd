"""Passes calls on to another server of this machine, message by message, with the address of their caller.

Who listens for calls but does not answer all of them has a Relay. The server behind it takes the addresses from metadata, which count only together with the
secret that both know.
"""

import asyncio
import hmac
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from weir.frontends.grpc.call import Handler, IncomingCall, in_task

_SECRET, _PEER = "weir-relay-secret", "weir-relay-peer"
_OWN = ("grpc-", ":")  # names that gRPC sets itself begin with these
_OF_CHANNEL = frozenset(("user-agent", "te", "content-type"))
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
            timeout=call.time_remaining(), metadata=self._metadata(call), wait_for_ready=True
        )
        sending = asyncio.ensure_future(_send(call, onward, body))
        try:
            with suppress(grpc.aio.AioRpcError):  # its status follows
                async for message in onward:
                    await call.write(message)
            code, text = await onward.code(), await onward.details()
            trailers = tuple((name, value) for name, value in await onward.trailing_metadata() or ())
            call.end(code.value[0], text or "", trailers)
        finally:
            sending.cancel()
            onward.cancel()

    def _metadata(self, call: IncomingCall) -> list[tuple[str, Any]]:
        own = [(_SECRET, self._secret), (_PEER, call.peer)]
        kept = [pair for pair in call.metadata if not pair[0].startswith(_OWN) and pair[0] not in _OF_CHANNEL]
        return [*(pair for pair in kept if pair[0] not in (_SECRET, _PEER)), *own]


async def _send(call: IncomingCall, onward: Any, body: bytes | None) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the other end has ended the call
        if body is not None:
            await onward.write(body)
        else:
            while (message := await call.read()) is not None:
                await onward.write(message)
                call.release(len(message))
        await onward.done_writing()


def take_peer(call: IncomingCall, secret: str) -> bool:
    """Take the address of the caller from the metadata of a call that a Relay has passed on. Return False, with nothing done, for another call."""
    found = {name: value for name, value in call.metadata if name in (_SECRET, _PEER)}
    if not hmac.compare_digest(str(found.get(_SECRET, "")).encode(), secret.encode()):
        return False
    call.forwarded = str(found.get(_PEER, ""))
    call.metadata = tuple(pair for pair in call.metadata if pair[0] not in (_SECRET, _PEER))
    return True
