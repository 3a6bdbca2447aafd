"""The output for people in a terminal: the progress while models load, the table of served models; and the check that tries each model with one worker."""

import asyncio
import itertools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from weir.app import App, folder_of, run
from weir.catalog.chains import missing
from weir.catalog.loading import make_service
from weir.catalog.registry import Registry
from weir.catalog.repository.folder import FolderRepository
from weir.catalog.sources import CombinedRepository, ModelToServe, names_to_start
from weir.config import as_size, parse_size
from weir.errors import ModelError, SettingsError, WeirError, counted
from weir.frontends.frontend import Product
from weir.frontends.http.application import request_to_try
from weir.fronts.dispatcher import why_passed_on
from weir.messages import JSON
from weir.model import Example
from weir.policy.residency import Room, why_too_large
from weir.profiling.machine import memory_of
from weir.protocols.entries import QueueEntry
from weir.protocols.exchange import Exchange, QueuedRequest
from weir.serving.service import Service, same
from weir.settings import Settings
from weir.telemetry.logs import get_logger, logging_to
from weir.telemetry.recorder import SilentObserver
from weir.workers import source
from weir.workers.settings import ONE_WORKER

_LONGEST_VALUE = 40  # characters of a value in a table


@dataclass
class ExampleOutcome:
    """The result of one example. `wrong` says what is wrong, or is "". `size_bytes` is the size of the response as it would be sent."""

    item: Any
    seconds: float
    response: Any = None
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
        response = await _response(service, example.item)
        outcome = ExampleOutcome(example.item, time.perf_counter() - started, response)
        outcome.size_bytes = await _sent_size(service, example.item, response)
    except WeirError as error:
        return ExampleOutcome(
            example.item, time.perf_counter() - started, wrong=f"{type(error).__name__}: {error.message}"
        )
    if example.expected is not ... and not same(response, example.expected):
        outcome.wrong = f"expected {example.expected!r:.200}"
    return outcome


async def _run_batch(service: Service, examples: list[Example], report: ModelReport) -> None:
    size = service.facts.batching.max_batch_size
    items = [example.item for example in itertools.islice(itertools.cycle(examples), size)]
    started = time.perf_counter()
    if service.facts.streaming:
        await asyncio.gather(*(_response(service, item) for item in items))
    else:
        await service.infer_many(items)
    report.batch_size, report.batch_seconds = size, time.perf_counter() - started


async def _response(service: Service, item: Any) -> Any:
    """Return the response to `item`; for a streaming model, the list of responses."""
    if service.facts.streaming:
        return [response async for response in service.infer_stream(item)]
    return await service.infer(item)


async def _sent_size(service: Service, item: Any, response: Any) -> int | None:
    """Return the size in bytes of the response as HTTP would send it, or None for a streaming model. Raises ModelError if the worker
    cannot encode the response."""
    if service.facts.streaming:
        return None  # the responses are sent one by one
    if service.facts.takes_tensors:
        return int(sum(array.nbytes for array in response.values()))
    accept = service.facts.model.content_types[0] if service.facts.model.content_types else JSON
    ended: asyncio.Future[QueuedRequest] = asyncio.get_running_loop().create_future()
    exchange = Exchange(service, frontend="check")
    exchange.submit(QueueEntry(exchange.form(accept=accept), item), ended.set_result)
    request = await ended
    if request.error is not None:
        raise request.error
    if isinstance(request.output, bytes):
        return len(request.output)
    size: int = request.output.view.nbytes
    request.output.release()
    return size


def serve(settings: Settings, product: Product | None = None, kinds: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Serve until a signal ends the server. Raises what App.run raises. For the arguments, see App."""
    logs_json = settings.telemetry.log_format == "json"
    with logging_to(settings.telemetry, captures=True), errors_logged(settings):
        loading = Loading()
        app = App(settings, [loading], product, kinds)

        def ready() -> None:
            loading.close()
            if logs_json:  # the log already has this information
                return
            lines = _curl_lines(app) if product is None else product.to_try(*_address(app))
            _print(*([_served(app), ""] if app.registry.services else []), *lines, "", _ready_line(app))

        try:
            loading.show(app.registry.all)
            run(app, ready)
        finally:
            loading.close()


@contextmanager
def errors_logged(settings: Settings) -> Iterator[None]:
    """If the log is JSON, log an exception that ends the block, and end the program; otherwise let it pass."""
    try:
        yield
    except Exception as error:
        if settings.telemetry.log_format != "json":
            raise
        text = error.message if isinstance(error, WeirError) else str(error) or type(error).__name__
        if isinstance(error, ModelError):
            get_logger("weir").critical(text, exception=error.remote_traceback)
        else:
            get_logger("weir").critical(text, exc_info=not isinstance(error, (WeirError, OSError)))
        sys.exit(2 if isinstance(error, SettingsError) else 1)  # the exit codes of cli.py


def check(settings: Settings) -> bool:
    """Check every model, one after another; return whether all are good. Of a repository, those that cannot be loaded are named, and the others checked."""
    with logging_to(settings.telemetry):
        good = True
        for model in settings.models:
            report = check_model_runs(model, settings.models)
            _print(*_reported(report))
            good &= report.good
        folder = folder_of(settings)
        return good if folder is None else _check_folder(folder, settings) and good


def _check_folder(folder: FolderRepository, settings: Settings) -> bool:
    """Check the models of a repository, and whether each fits into the memory for all together."""
    models, wrong, room = list[ModelToServe](), 0, settings.repository.room
    names = names_to_start(CombinedRepository([folder]), settings.repository.load)
    if not names:
        where = settings.repository.model_repository
        raise SettingsError(
            f"model_repository={where!r}: has no model to check; each folder in it is one (see weir serve --help)"
        )
    for name in names:
        try:
            models += folder.read(name).versions
        except WeirError as error:
            wrong += 1
            _print(Text(f"{name}: {error.message}", style="red"))
    for model in models:
        try:
            report = check_model_runs(model, [*models, *settings.models])
        except WeirError as error:
            wrong += 1
            _print(Text(f"{model.label}: {error.message}", style="red"))
            continue
        _print(*_reported(report))
        stated = [parse_size(model.settings.get(f"needs_{kind}") or 0) or 0 for kind in ("memory", "gpu_memory")]
        needed = Room(float(max(stated[0], report.memory_bytes or 0)), float(stated[1]))
        if too_large := why_too_large(needed, room):
            _print(Text(f"{model.label}: {too_large}", style="red"))
        wrong += bool(too_large) or not report.good
    return not wrong


def _print(*parts: Any) -> None:
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    for part in parts:
        if isinstance(part, Table) and (width := _width(part)) > console.width:
            if console.is_terminal:
                part = _stacked(part)
            else:
                console.width = width  # a file, a pipe or a log has room
        console.print(part, soft_wrap=isinstance(part, str) or None, markup=False)


def _bars(verb: str, *columns: ProgressColumn) -> Progress:
    """Return bars for stderr that show what is done, with further `columns`, if that is a terminal."""
    console, name = Console(stderr=True), TextColumn(f"{verb} {{task.description}}")
    every = (SpinnerColumn(), name, BarColumn(), *columns, TimeElapsedColumn())
    return Progress(*every, console=console, transient=True, disable=not console.is_terminal)


class Loading(SilentObserver):
    """An Observer that shows on stderr, if that is a terminal, how many workers have loaded."""

    def __init__(self) -> None:
        self._progress = _bars("loading", MofNCompleteColumn(), TextColumn("workers"))
        self._rows: dict[str, Any] = {}

    def show(self, services: Sequence[Service]) -> None:
        """Begin to show the workers of `services`."""
        for service in services:
            self._rows[service.label] = self._progress.add_task(service.label, total=service.workers.first_workers)
        self._progress.start()

    def close(self) -> None:
        """Stop showing. Idempotent."""
        self._progress.stop()

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """Count a worker that is ready."""
        if state == "ready" and model in self._rows:
            self._progress.advance(self._rows[model])


@contextmanager
def measuring_progress() -> Iterator[Callable[[str], Callable[[float, str], None]]]:
    """Show the progress of measuring models on stderr during the block. If that is not a terminal, each quarter is logged.

    The block gets a function from the name of a model to one that is called with the share that is done, from 0 to 1, and what is being measured.
    """
    with _bars("measuring", TextColumn("{task.fields[what]}")) as progress:
        yield partial(_progress_of, progress)


def _progress_of(progress: Progress, name: str) -> Callable[[float, str], None]:
    task: list[TaskID] = []
    logged: set[int] = set()

    def update(share: float, what: str) -> None:
        if progress.disable and (quarter := int(4 * share)) not in logged:
            logged.add(quarter)
            text = "measuring how large batches should be, once for this model and machine"
            get_logger("weir").info(text, model=name, done=f"{share:.0%}", now=what)
        if not task:
            task.append(progress.add_task(name, total=1.0, what=what))
        progress.update(task[0], completed=share, what=what)

    return update


def _width(table: Table) -> int:
    """Return the columns of the terminal that `table` needs if none of its own may be folded; 0 if they may."""
    if not all(column.no_wrap for column in table.columns):
        return 0
    wide = Console(width=10_000)
    return wide.measure(table).maximum


def _stacked(table: Table) -> str:
    """Return each row of `table` as a line of its first column, and a line of each other one."""
    heads = [str(column.header) for column in table.columns]
    lines = []
    for first, *others in zip(*(column.cells for column in table.columns), strict=True):
        lines.append(f"{heads[0]} {first}")
        lines += [f"  {head}: {cell}" for head, cell in zip(heads[1:], others, strict=True)]
    return "\n".join(lines)


def _served(app: App) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("model", "workers", "policy", "max batch", "routes", "url"):
        table.add_column(column, no_wrap=True)  # names and addresses can be copied
    for name, service in app.registry.services.items():
        routes = [f"/infer/{name}", *(path for path, routed in app.registry.routes.items() if routed is service)]
        executor = service.workers.executor
        workers = counted(service.worker_count, executor if executor in ("process", "thread") else f"{executor} worker")
        if service.workers.scale is not None:
            workers += f" of {service.workers.workers}"
        size = str(service.facts.batching.max_batch_size)
        table.add_row(name, workers, _policy_of(service), size, " ".join(routes), app.server.address)
    return table


def _policy_of(service: Service) -> str:
    """Return a text that names the policy; for a solved policy, also its control limits."""
    explained, text = service.explain_policy(), str(service.facts.batching.policy)
    if explained["solved"] is None:
        return text
    limits = explained["solved"]["limits"]
    if limits is None:
        return f"{text} (greedy, learning)"
    return f"{text} (limits {min(limits)}-{max(limits)})"


def _address(app: App) -> tuple[str, str]:
    """Return the curl command for this server, without the key itself, and the server's URL."""
    curl, uds = "curl", app.settings.http.uds
    if app.site.access.required:
        curl += ' -H "Authorization: Bearer $KEY"'
    if uds:
        return f"{curl} --unix-socket {shlex.quote(uds)}", "http://localhost"
    return curl, app.server.address.replace("0.0.0.0", "localhost").replace("[::]", "localhost")


def _curl_lines(app: App) -> list[str]:
    curl, base = _address(app)
    lines = [f"  {request_to_try(service, curl, base)}" for service in app.registry.services.values()]
    unread = sorted(set(app.registry.on_demand) - app.registry.services.keys())
    if unread:
        lines.append(
            f"on demand: {counted(len(unread), 'model')}, for example: {curl} -d ITEM {base}/infer/{unread[0]}"
        )
    return lines


def _ready_line(app: App) -> str:
    """Return the last line that is printed: until then, requests are refused."""
    others = [frontend.address for frontend in app.frontends if frontend is not app.server]
    return f"Ready at {app.server.address}" + (f", also at {', '.join(others)}" if others else "")


def _reported(report: ModelReport) -> list[Any]:
    table = Table("item", "result", "size", "time", "", box=None, pad_edge=False)
    for outcome in report.outcomes:
        wrong = Text(outcome.wrong, style="red") if outcome.wrong else Text("ok", style="green")
        table.add_row(
            _short(outcome.item), _short(outcome.response), _size(outcome.size_bytes), _duration(outcome.seconds), wrong
        )
    lines: list[Any] = [f"{report.name}: loaded and warmed up in {_duration(report.start_seconds)}"]
    lines += [table] if report.outcomes else ["it has no examples to run (Model.examples)"]
    if report.batch_seconds:
        rate = report.batch_size / report.batch_seconds
        lines.append(f"{report.batch_size} at once in {_duration(report.batch_seconds)}: {rate:,.0f} items/s")
    if report.memory_bytes is not None:
        lines.append(f"its worker takes {as_size(report.memory_bytes)} of memory")
    if report.passed_on:
        lines.append(f"--fronts would not help: {report.passed_on}, so the server process reads its requests")
    return lines


def _short(value: Any) -> str:
    text = "" if value is None else " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return ""
    return f"{size_bytes} B" if size_bytes < 10_000 else f"{size_bytes / 1000:,.0f} kB"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
