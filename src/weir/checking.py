"""Tries a model with one worker: runs its examples, and reports the answers, their sizes and times."""

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weir.catalog.chains import missing
from weir.catalog.loading import make_service
from weir.catalog.registry import Registry
from weir.catalog.sources import ModelToServe
from weir.errors import WeirError
from weir.fronts.dispatcher import why_passed_on
from weir.messages import JSON, OBJECT, Kind
from weir.model import Example
from weir.profiling.machine import memory_of
from weir.protocols.entries import QueueEntry, Schedule
from weir.protocols.exchange import Exchange, QueuedRequest
from weir.serving.service import Service, same
from weir.workers import source
from weir.workers.settings import ONE_WORKER


@dataclass
class ExampleOutcome:
    """The result of one example. `wrong` says what is wrong, or is "". `size_bytes` is the size of the answer as it would be sent."""

    item: Any
    seconds: float
    answer: Any = None
    size_bytes: int | None = None
    wrong: str = ""


@dataclass
class ModelReport:
    """The results of one model. `batch_seconds` is the time for `batch_size` items at once; both are 0 if that was not tried. `passed_on` is why fronts pass
    its requests on, or "". `memory_bytes` is what the worker takes; None if nobody knows.
    """

    name: str
    start_seconds: float
    outcomes: list[ExampleOutcome] = field(default_factory=list)
    batch_size: int = 0
    batch_seconds: float = 0.0
    passed_on: str = ""
    memory_bytes: int | None = None

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return not any(outcome.wrong for outcome in self.outcomes)


def check_model_runs(model: ModelToServe, others: Sequence[ModelToServe] = ()) -> ModelReport:
    """Start one worker of `model`, run its examples one by one and then a full batch of them, and stop the worker. The steps of a
    chain are looked up in `others`, and get one worker each.

    Raises ModelError with the worker's traceback if the model cannot be loaded, and SettingsError. An example that fails is part
    of the report.
    """
    services = {model.name: _one_worker(model)}
    while steps := [each for each in others if each.name in missing(services.values(), services)]:
        services.update({each.name: _one_worker(each) for each in steps})
    return asyncio.run(_check(services[model.name], Registry(list(services.values()))))


def _one_worker(model: ModelToServe) -> Service:
    as_served = make_service(model, ())  # raises what `weir serve` would, of the workers that are not tried
    service = make_service(model._replace(settings={**model.settings, **ONE_WORKER}), ())
    source.release(as_served.generation)
    return service


async def _check(service: Service, registry: Registry) -> ModelReport:
    started = time.perf_counter()
    await registry.start()
    try:
        report = ModelReport(service.name, time.perf_counter() - started, passed_on=why_passed_on(service))
        examples = [each if isinstance(each, Example) else Example(each) for each in service.facts.model.examples]
        report.outcomes = [await _run(service, example) for example in examples]
        if report.outcomes and report.good:
            await _run_batch(service, examples, report)
        pid = next((state.pid for state in service.executor.states()), None)
        report.memory_bytes = None if pid is None or pid == os.getpid() else memory_of(pid)
    finally:
        await registry.stop()
    return report


async def _run(service: Service, example: Example) -> ExampleOutcome:
    started = time.perf_counter()
    try:
        answer = await _answer(service, example.item)
        outcome = ExampleOutcome(example.item, time.perf_counter() - started, answer)
        outcome.size_bytes = await _sent_size(service, example.item, answer)
    except WeirError as error:
        return ExampleOutcome(
            example.item, time.perf_counter() - started, wrong=f"{type(error).__name__}: {error.message}"
        )
    if example.expected is not ... and not same(answer, example.expected):
        outcome.wrong = f"expected {example.expected!r:.200}"
    return outcome


async def _run_batch(service: Service, examples: list[Example], report: ModelReport) -> None:
    size = service.facts.batching.max_batch_size
    items = [example.item for example in itertools.islice(itertools.cycle(examples), size)]
    started = time.perf_counter()
    if service.facts.streaming:
        await asyncio.gather(*(_answer(service, item) for item in items))
    else:
        await service.infer_many(items)
    report.batch_size, report.batch_seconds = size, time.perf_counter() - started


async def _answer(service: Service, item: Any) -> Any:
    """Return the answer to `item`; for a streaming model, the list of answers."""
    if service.facts.streaming:
        return [answer async for answer in service.infer_stream(item)]
    return await service.infer(item)


async def _sent_size(service: Service, item: Any, answer: Any) -> int | None:
    """Return the size in bytes of the answer as HTTP would send it, or None for a streaming model. Raises ModelError if the worker
    cannot encode the answer."""
    if service.facts.streaming:
        return None  # the answers are sent one by one
    if service.facts.takes_tensors:
        return int(sum(array.nbytes for array in answer.values()))
    accept = service.facts.model.content_types[0] if service.facts.model.content_types else JSON
    ended: asyncio.Future[QueuedRequest] = asyncio.get_running_loop().create_future()
    entry = QueueEntry(item, Kind.ITEM, OBJECT, accept, 1, 1.0, None, False)
    Exchange(service, frontend="check").submit(entry, Schedule(0, None), ended.set_result)
    request = await ended
    if request.error is not None:
        raise request.error
    if isinstance(request.output, bytes):
        return len(request.output)
    size: int = request.output.view.nbytes
    request.output.release()
    return size
