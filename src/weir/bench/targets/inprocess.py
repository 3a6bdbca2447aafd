"""A model in this process under test: what serving costs without a network."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from weir.bench.target import OK, TIMES, Counts, LedgerTarget
from weir.bench.targets.payloads import decode_items, read_payloads
from weir.catalog.loading import make_service
from weir.catalog.sources import ModelToServe
from weir.errors import InvalidRequest, SettingsError, WeirError
from weir.messages import Reason
from weir.model import Example, Model, is_tensor_model
from weir.serving.calls import Call
from weir.serving.service import Service
from weir.settings import default_name
from weir.telemetry.recorder import Metrics


class InProcessTarget(LedgerTarget):
    """Asks a Service of this process, in the loop that sends: `Service.infer`, without backpressure, so that a full line
    refuses as a server's does.

    `model` is a class, a text such as module:Class, or what settings.py has read of one; `settings` are those of Service,
    and `data` as for HttpTarget.
    """

    connections = None

    def __init__(
        self, model: str | ModelToServe | type[Model] | type[Service], data: str | Sequence[Any] | None = None, *,
        name: str | None = None, settings: Mapping[str, Any] | None = None, params: Mapping[str, Any] | None = None,
        timeout: float = 10.0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._metrics = Metrics()
        said = {"timeout": timeout, **(settings or {}), "backpressure": False}
        self._service = _service(model, dict(params or {}), said, self._metrics)
        super().__init__(name or self._service.name, clock)
        items = _examples(self._service) if data is None else decode_items(read_payloads(data))
        self._items = [as_given(self._service.model, item) for item in items]

    async def open(self) -> None:
        """Start the workers, and see that they answer."""
        await self._service.start()
        try:
            await self._service.infer(self._items[0])
        except WeirError as error:
            raise SettingsError(f"{self.name}: {type(error).__name__}: {error.message}") from error

    def send(self, index: int) -> None:
        """Ask."""
        items = self._items
        self._ledger.sent[index] = self._clock()
        self._service.infer(items[index % len(items)]).add_done_callback(partial(self._ended, index))

    def _ended(self, index: int, call: Call) -> None:
        error = call.exception()
        self._ledger.end(index, self._clock(), OK if error is None else type(error).__name__)

    async def counts(self) -> Counts | None:
        """Return what the service has told its observer."""
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
    model: str | ModelToServe | type[Model] | type[Service], params: dict[str, Any], settings: dict[str, Any],
    metrics: Metrics,
) -> Service:  # fmt: skip
    if isinstance(model, str):
        model = ModelToServe(model, default_name(model), {}, [], {})
    if isinstance(model, ModelToServe):
        said = model._replace(params={**model.params, **params}, settings={**model.settings, **settings})
        return make_service(said, [metrics])
    if issubclass(model, Service):
        return model(params=params, observers=[metrics], **settings)
    return Service(model, params=params, observers=[metrics], **settings)


def as_given(model: type[Model], item: Any) -> Any:
    """Return an item as a program has it: that of a tensor model is arrays. Raises SettingsError if it cannot be."""
    if not is_tensor_model(model):
        return item
    from weir.wire.tensors import to_arrays  # only tensor models need numpy

    try:
        return to_arrays(item, model.inputs)
    except InvalidRequest as error:
        raise SettingsError(f"data: {error.message}") from error


def _examples(service: Service) -> list[Any]:
    items = [each.item if isinstance(each, Example) else each for each in service.model.examples]
    if not items:
        raise SettingsError(f"{service.name}: has no examples to send; say what with --data")
    return items
