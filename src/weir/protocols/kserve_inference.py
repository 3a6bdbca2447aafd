"""A request of the Open Inference Protocol to the line and back: what its doors share that have a task for each caller."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.errors import InvalidRequest, ModelNotFound, Unsupported, WeirError
from weir.messages import Kind
from weir.protocols.asking import Asked
from weir.protocols.metadata import config as config
from weir.protocols.metadata import metadata as metadata
from weir.protocols.metadata import server_metadata as server_metadata
from weir.protocols.payload import response_of, schedule_of, works_of
from weir.protocols.payloads import QueueEntry
from weir.serving.calls import Streamed
from weir.serving.delivery import discard
from weir.wire.inference import InferenceRequest, InferenceResponse

if TYPE_CHECKING:
    from weir.catalog.registry import Registry
    from weir.serving.service import Service


def find(registry: "Registry", name: str, version: str = "") -> "Service":
    """Return the service of a model; `version` "" is the default one.

    Raises ModelNotFound in the words that clients of the protocol look for.
    """
    try:
        return registry.get(name, version)
    except ModelNotFound:
        there_are = ", ".join(registry.services) or "no models"
        which = f" version {version!r}" if version else ""
        raise ModelNotFound(f"Request for unknown model: {name!r}{which} is not found; there are {there_are}") from None


async def infer(
    service: "Service",
    request: InferenceRequest,
    *,
    door: str,
    timeout: float | None = None,  # noqa: ASYNC109 - the line's
    trace: Any = None,
) -> InferenceResponse:
    """Put `request` into the line of `service` and return the answer.

    `timeout` is the caller's, in seconds (None: the service's setting); a parameter `timeout` of the request can only
    shorten it; `trace` is the caller's `traceparent` or a Trace. Cancelling the task that awaits this withdraws the request. Raises every WeirError that can be its end, and
    Unsupported if the model streams.
    """
    if service.deputy is not None:
        answer: InferenceResponse = await service.deputy.infer(service, request, door=door, within=timeout, trace=trace)
        return answer
    works, limit, priority = works_for_one_answer(service, request, door, timeout)
    outputs = await _ended(service, works, limit, priority, door, trace)
    return response_of(service, request, [work.kind for work in works], outputs)


def works_for_one_answer(
    service: "Service", request: InferenceRequest, door: str, timeout: float | None
) -> tuple[list[QueueEntry], float, int]:  # fmt: skip
    """Return what `request` is to the line of a model that gives one answer, its timeout and its priority. Raises as `infer`
    does; the observers have been told."""
    if service.streaming:
        error = Unsupported(f"model {service.label!r} streams its answers: ask it where streams are offered")
        raise told(service, door, error)
    return _read(service, request, door, timeout)


class StreamPart(NamedTuple):
    """One of several answers. `last`: the model said that it is; the end may also come without that."""

    response: InferenceResponse
    last: bool


async def stream(
    service: "Service",
    request: InferenceRequest,
    *,
    door: str,
    timeout: float | None = None,  # noqa: ASYNC109 - the line's
    trace: Any = None,
) -> AsyncGenerator[StreamPart, None]:
    """Yield the answers to `request`; of a model that does not stream, its one.

    Leaving (`aclose`, or cancelling the task) ends the request at the model too. For the rest see `infer`.
    """
    if not service.streaming:
        yield StreamPart(await infer(service, request, door=door, timeout=timeout, trace=trace), True)
        return
    works, limit, priority = _read(service, request, door, timeout)
    if len(works) > 1 or (works[0].kind is Kind.ITEMS and works[0].rows > 1):
        rows = sum(work.rows for work in works)
        raise told(service, door, InvalidRequest(f"tensor 'input': has {rows} items, a stream is for one"))
    item = works[0].payload[0] if works[0].kind is Kind.ITEMS else works[0].payload
    work = works[0]._replace(kind=Kind.ITEM, payload=item)  # tensors too: a stream is not divided
    buffer = service.settings.stream_buffer
    streamed = Streamed(
        work.payload, service.now(), limit, buffer, service.cancel, service.now, **_said(work, priority, door, trace)
    )
    service.submit(streamed)
    try:
        while True:
            try:
                output, last = await streamed.read()
            except StopAsyncIteration:
                return
            yield StreamPart(response_of(service, request, [work.kind], [output]), last)
    finally:
        streamed.close()


def _read(
    service: "Service", request: InferenceRequest, door: str, timeout: float | None
) -> tuple[list[QueueEntry], float, int]:  # fmt: skip
    """Return what `request` is to the line, its timeout and its priority."""
    try:
        schedule = schedule_of(request.parameters)
        works = works_of(service, request)
    except WeirError as error:
        raise told(service, door, error) from None
    limits = [limit for limit in (timeout, schedule.timeout) if limit is not None]
    return works, min(limits) if limits else service.settings.timeout, schedule.priority


def told(service: "Service", door: str, error: WeirError) -> WeirError:
    """Return `error`, of which those who listen to the service have been told: a request for it was refused."""
    for observer in (*service.observers, service.statistics):
        observer.refused(service.label, door, error)
    return error


async def _ended(
    service: "Service", works: list[QueueEntry], limit: float, priority: int, door: str, trace: Any
) -> list[Any]:
    """Run `works` and return their outputs, in order. Raises the first error; the others are withdrawn then."""
    requests: list[Asked] = []
    try:
        for work in works:
            # The first has the span that the caller hears of; the others are beside it.
            own = trace if not requests else getattr(trace, "traceparent", trace)
            asked = Asked(work.payload, service.now(), limit, **_said(work, priority, door, own))
            service.submit(asked)
            requests.append(asked)
        return [await asked.answer for asked in requests]
    except BaseException:
        for asked in requests:
            _withdraw(service, asked)
        raise


def _said(work: QueueEntry, priority: int, door: str, trace: Any) -> dict[str, Any]:
    return {
        "kind": work.kind, "content_type": work.content_type, "accept": work.accept, "rows": work.rows,
        "cost": work.cost, "key": work.key, "large": work.large, "priority": priority, "door": door,
        "trace": trace,
    }  # fmt: skip


def _withdraw(service: "Service", asked: Asked) -> None:
    """Cancel a request, or drop the answer that it has already."""
    service.cancel(asked)
    if not asked.answer.cancel() and not asked.answer.cancelled() and asked.answer.exception() is None:
        discard(asked.answer.result())
