"""A request of the Open Inference Protocol to the line and back: what its doors share that have a task for each caller."""

from typing import TYPE_CHECKING, Any

from weir.errors import ModelNotFound, Unsupported, WeirError
from weir.manager.delivery import discard
from weir.protocols.asking import Asked
from weir.protocols.contents import response_of, schedule_of, works_of
from weir.protocols.describing import config as config
from weir.protocols.describing import metadata as metadata
from weir.protocols.describing import server_metadata as server_metadata
from weir.protocols.payloads import Work
from weir.wire.inference import InferenceRequest, InferenceResponse

if TYPE_CHECKING:
    from weir.manager.registry import Registry
    from weir.manager.service import Service


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
) -> InferenceResponse:
    """Put `request` into the line of `service` and return the answer.

    `timeout` is the caller's, in seconds (None: the service's setting); a parameter `timeout` of the request can only
    shorten it. Cancelling the task that awaits this withdraws the request. Raises every WeirError that can be its end, and
    Unsupported if the model streams.
    """
    try:
        if getattr(service, "streaming", False):
            raise Unsupported(f"model {service.label!r} streams its answers: ask it where streams are offered")
        schedule = schedule_of(request.parameters)
        works = works_of(service, request)
    except WeirError as error:
        for observer in service.observers:
            observer.refused(service.label, door, error)
        raise
    limits = [limit for limit in (timeout, schedule.timeout) if limit is not None]
    limit = min(limits) if limits else service.settings.timeout
    outputs = await _ended(service, works, limit, schedule.priority, door)
    return response_of(service, request, [work.kind for work in works], outputs)


async def _ended(service: "Service", works: list[Work], limit: float, priority: int, door: str) -> list[Any]:
    """Run `works` and return their outputs, in order. Raises the first error; the others are withdrawn then."""
    requests: list[Asked] = []
    try:
        for work in works:
            asked = _asked(service, work, limit, priority, door)
            service.submit(asked)
            requests.append(asked)
        return [await asked.answer for asked in requests]
    except BaseException:
        for asked in requests:
            _withdraw(service, asked)
        raise


def _asked(service: "Service", work: Work, timeout: float, priority: int, door: str) -> Asked:
    return Asked(
        work.payload, service.now(), timeout, kind=work.kind, content_type=work.content_type, accept=work.accept,
        rows=work.rows, cost=work.cost, key=work.key, large=work.large, priority=priority, door=door,
    )  # fmt: skip


def _withdraw(service: "Service", asked: Asked) -> None:
    """Cancel a request, or drop the answer that it has already."""
    service.cancel(asked)
    if not asked.answer.cancel() and not asked.answer.cancelled() and asked.answer.exception() is None:
        discard(asked.answer.result())
