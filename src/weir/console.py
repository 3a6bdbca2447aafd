"""What a person sees in the terminal: progress while models load, the table of what is served, the results of a check."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from weir.app import App, run
from weir.checking import ModelReport, check_model_runs
from weir.errors import ModelError, SettingsError, WeirError
from weir.frontends.frontend import Product
from weir.messages import JSON
from weir.model import Example
from weir.serving.service import Service
from weir.settings import Settings
from weir.telemetry.logs import get_logger, logging_to
from weir.telemetry.recorder import SilentObserver
from weir.wire.values import UNWRITABLE, encode

_LONGEST_EXAMPLE = 200  # characters of JSON that still fit into a line to be copied
_LONGEST_VALUE = 40


def serve(settings: Settings, product: Product | None = None) -> None:
    """Serve until a signal; see App.run for what is raised."""
    machine = settings.telemetry.log_format == "json"
    with logging_to(settings.telemetry, captures=True), errors_logged(settings):
        loading = Loading()
        app = App(settings, [loading], product)

        def ready() -> None:
            loading.close()
            if machine:  # the log has said that it is ready, with what, and where
                return
            lines = _curl_lines(app) if product is None else product.to_try(*_address(app))
            _print(_served(app), "", *lines, *_other_frontends(app))

        try:
            loading.show(list(app.registry.services.values()))
            run(app, ready)
        finally:
            loading.close()


@contextmanager
def errors_logged(settings: Settings) -> Iterator[None]:
    """Log the exception that ends the block where log lines are JSON, and end the program: a person does not read more."""
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
        sys.exit(2 if isinstance(error, SettingsError) else 1)  # as cli.py has it


def check(settings: Settings) -> bool:
    """Check every model, one after another; False if anything is wrong with one."""
    good = True
    with logging_to(settings.telemetry):
        for model in settings.models:
            report = check_model_runs(model, settings.models)
            _print(*_reported(report))
            good &= report.good
    return good


def _print(*parts: Any) -> None:
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str) or None, markup=False)


class Loading(SilentObserver):
    """An Observer that shows how many workers have loaded, while they do and if stderr is a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("loading {task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(
            *columns, TextColumn("workers"), TimeElapsedColumn(), console=console, transient=True,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._rows: dict[str, Any] = {}

    def show(self, services: Sequence[Service]) -> None:
        """Begin to show."""
        for service in services:
            self._rows[service.name] = self._progress.add_task(service.name, total=service.workers.workers)
        self._progress.start()

    def close(self) -> None:
        """Show nothing any more. Idempotent."""
        self._progress.stop()

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """Count a worker that is ready."""
        if state == "ready" and model in self._rows:
            self._progress.advance(self._rows[model])


class MeasuringProgress:
    """Shows how far the measurement of models has come; where stderr is no terminal, the log says that it takes place."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            SpinnerColumn(),
            TextColumn("measuring {task.description}"),
            BarColumn(),
            TextColumn("{task.fields[what]}"),
        )
        self._progress = Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def of(self, name: str) -> Callable[[float, str], None]:
        """Return what hears of the model called so: a share, and what is measured. It is shown once it has heard something."""
        task: list[TaskID] = []

        def heard(share: float, what: str) -> None:
            if not task and self._progress.disable:
                get_logger("weir").info("measuring how large batches should be, once", model=name)
            if not task:
                task.append(self._progress.add_task(name, total=1.0, what=what))
            self._progress.update(task[0], completed=share, what=what)

        return heard


def _served(app: App) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("model", "workers", "policy", "max batch", "routes", "url"):
        table.add_column(column, overflow="fold", no_wrap=column == "url")  # nothing is cut off in a narrow terminal
    for name, service in app.registry.services.items():
        routes = [f"/infer/{name}", *(path for path, routed in app.registry.routes.items() if routed is service)]
        workers = f"{service.workers.workers} {service.workers.executor}"
        size = str(service.batching.max_batch_size)
        table.add_row(name, workers, _policy_of(service), size, " ".join(routes), app.server.address)
    return table


def _policy_of(service: Service) -> str:
    """Return what the policy is, and of a solved one the limits that it goes by."""
    explained, text = service.explain_policy(), str(service.batching.policy)
    if explained["solved"] is None:
        return text
    limits = explained["solved"]["limits"]
    if limits is None:
        return f"{text} (greedy, learning)"
    return f"{text} (limits {min(limits)}-{max(limits)})"


def _address(app: App) -> tuple[str, str]:
    """Return how curl is called for this server, and its URL. A key is not shown."""
    curl, uds = "curl", app.settings.http.uds
    if app.access.required:
        curl += ' -H "Authorization: Bearer $KEY"'
    if uds:
        return f"{curl} --unix-socket {shlex.quote(uds)}", "http://localhost"
    return curl, app.server.address.replace("0.0.0.0", "localhost").replace("[::]", "localhost")


def _curl_lines(app: App) -> list[str]:
    curl, base = _address(app)
    return [
        f"  {curl} -d {_example_of(service)} {base}/infer/{name}" for name, service in app.registry.services.items()
    ]


def _other_frontends(app: App) -> list[str]:
    addresses = [frontend.address for frontend in app.frontends if frontend is not app.server]
    return ["", "also at " + ", ".join(addresses)] if addresses else []


def _example_of(service: Service) -> str:
    """Return an item to try, quoted for a shell: the model's first example where it can be written."""
    for example in service.model.examples[:1]:
        try:
            text = encode(example.item if isinstance(example, Example) else example, JSON).decode()
        except UNWRITABLE:
            break
        if len(text) <= _LONGEST_EXAMPLE:
            return shlex.quote(text)
    return "JSON"


def _reported(report: ModelReport) -> list[Any]:
    table = Table("item", "answer", "size", "time", "", box=None, pad_edge=False)
    for outcome in report.outcomes:
        wrong = Text(outcome.wrong, style="red") if outcome.wrong else Text("ok", style="green")
        table.add_row(
            _short(outcome.item), _short(outcome.answer), _size(outcome.size_bytes), _duration(outcome.seconds), wrong
        )
    lines: list[Any] = [f"{report.name}: loaded and warmed up in {_duration(report.start_seconds)}"]
    lines += [table] if report.outcomes else ["it has no examples to run (Model.examples)"]
    if report.batch_seconds:
        rate = report.batch_size / report.batch_seconds
        lines.append(f"{report.batch_size} at once in {_duration(report.batch_seconds)}: {rate:,.0f} items/s")
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
