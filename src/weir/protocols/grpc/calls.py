"""One call: bytes in, bytes out, errors as status codes.

Handlers take and give bytes, so that what a message weighs is known without asking protobuf, a malformed one is refused
as an invalid request, and large tensors need not pass through it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from weir.errors import CapacityError, InvalidRequest, WeirError
from weir.protocols.answers import error_value, retry_after
from weir.protocols.status import grpc_code
from weir.wire.inference import ERROR_NAME
from weir.wire.protobuf import Method

DOOR = "grpc"
Context = Any  # grpc.aio.ServicerContext[bytes, bytes]
Trailers = tuple[tuple[str, str], ...]
Answer = Callable[[Any, Context], Awaitable[Any]]

_log = logging.getLogger("weir.grpc")


def unary(method: Method, answer: Answer, *, development: bool) -> Any:
    """Return the handler of a unary call: `answer` takes its message and returns the message that answers it."""

    async def handle(body: bytes, context: Context) -> bytes:
        try:
            message = await answer(parse(method, body), context)
            answered: bytes = message.SerializeToString()
            return answered
        except Exception as error:
            await refuse(error, context, development=development)

    return grpc.unary_unary_rpc_method_handler(handle)


def parse(method: Method, body: bytes) -> Any:
    """Return the message in `body`. Raises InvalidRequest if it is not the one that the method takes."""
    try:
        return method.request.FromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"body: must be a {method.request.DESCRIPTOR.full_name} ({error})") from None


async def refuse(
    error: Exception, context: Context, trailers: Trailers = (), *, development: bool
) -> NoReturn:  # fmt: skip
    """End the call with the status of `error`, and with `trailers` as metadata."""
    note(error)
    if name := name_of(error):
        trailers = (*trailers, (ERROR_NAME, name))
    if isinstance(error, CapacityError):  # how long clients with a retry policy wait
        trailers = (*trailers, ("grpc-retry-pushback-ms", str(1000 * retry_after(error))))
    try:
        await context.abort(code_of(error), text_of(error, development=development), trailers)
    except grpc.aio.InternalError:  # the client has left
        raise asyncio.CancelledError from None
    raise AssertionError("abort raises")


def note(error: Exception) -> None:
    """Log an exception that is none of ours: its caller reads of an internal error only."""
    if not isinstance(error, WeirError):
        _log.error("a call of gRPC failed", exc_info=error)


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the status code of `error`."""
    return grpc.StatusCode[grpc_code(error)]


def text_of(error: BaseException, *, development: bool) -> str:
    """Return what a caller reads of `error`; with `development`, its traceback too."""
    value = error_value(error, None, development=development)
    details = value["details"]
    traceback = details.get("traceback") if isinstance(details, dict) else None
    return f"{value['message']}\n{traceback}" if traceback else str(value["message"])


def name_of(error: BaseException) -> str:
    """Return the name of the class of `error`; "" of one that is none of ours."""
    return type(error).__name__ if isinstance(error, WeirError) else ""


def headers_of(context: Context) -> list[tuple[bytes, bytes]]:
    """Return the metadata of a call as the headers that they were; its token is `authorization: Bearer`."""
    metadata = context.invocation_metadata() or ()
    return [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in metadata]
