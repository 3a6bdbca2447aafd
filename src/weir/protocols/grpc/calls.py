"""One call: bytes in, bytes out, errors as status codes.

Handlers take and give bytes, so that what a message weighs is known without asking protobuf, a malformed one is refused
as an invalid request, and large tensors need not pass through it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from weir.errors import CapacityError, InvalidRequest, WeirError
from weir.protocols.account import CLAIM
from weir.protocols.grpc.call import Call, Left, Trailers
from weir.protocols.grpc.core import Handler
from weir.protocols.response import error_value, retry_after
from weir.protocols.status import grpc_code
from weir.wire.inference import ERROR_NAME
from weir.wire.protobuf import Method

DOOR = "grpc"
Answer = Callable[[Any, Call], Awaitable[Any]]

# A status travels in the trailers, of which clients take 8 KiB together; in them a byte that is not printable ASCII takes three.
_MAX_STATUS = 4096  # bytes

_log = logging.getLogger("weir.grpc")


def unary(method: Method, answer: Answer, *, development: bool) -> Handler:
    """Return the handler of a unary call: `answer` takes its message and returns the message that answers it."""

    async def run(call: Call, body: bytes) -> None:
        message = await answer(parse(method, body), call)
        call.end(body=message.SerializeToString())

    return Handler(in_task(run, development=development))


def in_task(
    run: Callable[[Call, bytes], Awaitable[None]], *, development: bool
) -> Callable[[Call, bytes], None]:  # fmt: skip
    """Return what begins `run` in a task of its own, which is cancelled when the caller leaves. What it raises is the end of the
    call, or else it ends well."""

    async def ran(call: Call, body: bytes) -> None:
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

    def begin(call: Call, body: bytes) -> None:
        if not call.over:
            call.on_left = asyncio.create_task(ran(call, body)).cancel

    return begin


def parse(method: Method, body: bytes) -> Any:
    """Return the message in `body`. Raises InvalidRequest if it is not the one that the method takes."""
    try:
        return method.request.FromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"body: must be a {method.request.DESCRIPTOR.full_name} ({error})") from None


def refuse(error: BaseException, call: Call, trailers: Trailers = (), *, development: bool) -> None:
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


def headers_of(call: Call) -> list[tuple[bytes, bytes]]:
    """Return the metadata of a call as the headers that they were; its token is `authorization: Bearer`."""
    return [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in call.metadata]
