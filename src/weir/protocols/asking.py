"""One request whose answer is awaited: what a door needs that has a task for each of its callers."""

import asyncio
from typing import TYPE_CHECKING, Any

from weir.batching.request_state import RequestBase
from weir.errors import WeirError
from weir.messages import JSON, Dispatch
from weir.serving.delivery import discard, is_block

if TYPE_CHECKING:
    from weir.serving.service import Service


class Asked(RequestBase):
    """`answer` resolves to the output, or raises the error that is the end."""

    __slots__ = ("answer",)

    def __init__(self, payload: Any, arrival: float, timeout: float, **said: Any) -> None:
        super().__init__(payload, arrival, timeout, **said)
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Resolve."""
        if self.answer.done():
            discard(output)
        else:
            self.answer.set_result(output)

    def fail(self, error: WeirError) -> None:
        """Raise in whoever awaits."""
        if not self.answer.done():
            self.answer.set_exception(error)


async def ask(
    service: "Service", item: bytes, *, door: str, content_type: str = JSON, accept: str = JSON,
    within: float | None = None, priority: int = 0,
) -> bytes:  # fmt: skip
    """Put one encoded item into the line of `service` and return the encoded answer.

    `within` is its timeout in seconds (None: the service's setting). Raises every WeirError that can be its end. Cancelling whoever
    awaits withdraws the request.
    """
    limit = service.settings.timeout if within is None else within
    request = Asked(
        item, service.now(), limit, content_type=content_type, accept=accept, priority=priority, door=door
    )  # fmt: skip
    service.submit(request)
    try:
        output = await request.answer
    except asyncio.CancelledError:
        service.cancel(request)
        raise
    return as_bytes(output)


def as_bytes(output: Any) -> bytes:
    """Return the bytes of an encoded answer; a Block is given back."""
    if not is_block(output):
        return bytes(output)
    try:
        return bytes(output.view)
    finally:
        output.release()
