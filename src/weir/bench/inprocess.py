"""A model in this process as a target of load: what serving costs without a network."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from weir.bench.target import OK, TIMES, Counts, LedgerTarget, decode_items, read_payloads
from weir.catalog.loading import make_service, new_service
from weir.catalog.sources import ModelToServe, default_name, platform_of_target
from weir.errors import InvalidRequest, SettingsError, WeirError
from weir.messages import Reason
from weir.model import Example, Model, is_tensor_model
from weir.serving.calls import Call
from weir.serving.service import Service
from weir.telemetry.recorder import Metrics


class InProcessTarget(LedgerTarget):
    """Calls `Service.infer` of a service in this process, in the event loop that sends. There is no backpressure, so a full queue
    refuses requests as a server's does.

    Arguments:
        model: a class, a text such as module:Class, or a description that settings.py has read.
        data: as for HttpTarget.
        name: the name in tables; by default that of the service.
        settings: settings of Service.
        params: arguments for the model's constructor.
        timeout: seconds per request.
        clock: returns the time in seconds.
    """

    connections = None

    def __init__(
        self,
        model: str | ModelToServe | type[Model] | type[Service],
        data: str | Sequence[Any] | None = None,
        *,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = Metrics()
        own = {"timeout": timeout, **(settings or {}), "backpressure": False}
        self._service = _service(model, dict(params or {}), own, self._metrics)
        super().__init__(name or self._service.name, clock)
        items = _examples(self._service) if data is None else decode_items(read_payloads(data))
        self._items = [_input_of(self._service.facts.model, item) for item in items]

    async def open(self) -> None:
        """Start the workers, and check that they answer. Raises SettingsError."""
        await self._service.start()
        try:
            await self._service.infer(self._items[0])
        except WeirError as error:
            raise SettingsError(f"{self.name}: {type(error).__name__}: {error.message}") from error

    def send(self, index: int) -> None:
        """See Target."""
        items = self._items
        self._ledger.sent[index] = self._clock()
        self._service.infer(items[index % len(items)]).add_done_callback(partial(self._ended, index))

    def _ended(self, index: int, call: Call) -> None:
        error = call.exception()
        self._ledger.end(index, self._clock(), OK if error is None else type(error).__name__)

    async def counts(self) -> Counts | None:
        """Return what the service has reported to its observer."""
        record = self._metrics.of(self._service.name)
        rows = record.rows
        return Counts(
            rows=rows.sum,
            reasons={reason.name.lower(): float(record.batches[reason]) for reason in Reason},
            sizes=dict(zip((*rows.bounds, float("inf")), map(float, rows.counts), strict=True)),
            seconds={name: getattr(record, name).sum for name in TIMES},
            times={name: float(sum(getattr(record, name).counts)) for name in TIMES},
        )

    async def close(self) -> None:
        """Stop the workers."""
        await self._service.stop(0.0)


def _service(
    model: str | ModelToServe | type[Model] | type[Service],
    params: dict[str, Any],
    settings: dict[str, Any],
    metrics: Metrics,
) -> Service:
    if isinstance(model, str):
        model = ModelToServe(model, default_name(model), {}, [], {}, platform=platform_of_target(model))
    if isinstance(model, ModelToServe):
        model = model._replace(params={**model.params, **params}, settings={**model.settings, **settings})
        return make_service(model, [metrics])
    return new_service(model, params=params, observers=[metrics], **settings)


def _input_of(model: type[Model], item: Any) -> Any:
    """Return `item` as `Service.infer` takes it: arrays for a tensor model. Raises SettingsError if it does not fit."""
    if not is_tensor_model(model):
        return item
    from weir.wire.tensors import to_arrays  # only tensor models need numpy

    try:
        return to_arrays(item, model.inputs)
    except InvalidRequest as error:
        raise SettingsError(f"data: {error.message}") from error


def _examples(service: Service) -> list[Any]:
    items = [each.item if isinstance(each, Example) else each for each in service.facts.model.examples]
    if not items:
        raise SettingsError(f"{service.name}: has no examples to send; give something with --data")
    return items
