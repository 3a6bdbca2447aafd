"""Log lines (text for people, JSON for machines, a file next to the terminal) and recordings of arrivals.

All lines go through the standard library's root logger, so those of uvicorn, of models and of any library look like
Weir's own. A value whose key sounds like a secret is never written.
"""

import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import structlog
from structlog.stdlib import BoundLogger, ProcessorFormatter
from structlog.types import EventDict, ExcInfo, Processor, WrappedLogger

from weir.errors import (
    CapacityError,
    DeadlineExceeded,
    ModelError,
    SettingsError,
    WeirError,
    printable,
    printable_lines,
)
from weir.messages import CURRENT_TRACE, Request, Trace
from weir.telemetry import TelemetrySettings
from weir.telemetry.output import (
    Capture,
    Outlet,
    OutletHandler,
    StderrHandler,
    file_outlet,
    standard_outlets,
    write_all,
)
from weir.telemetry.recorder import SilentObserver

_SECRET_WORDS = ("secret", "token", "password", "passwd", "authorization", "api_key", "apikey", "credential", "cookie")
_OF_A_WORKER = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[(debug|info|warning|error|critical) *\] (.*) \[(\S+)\] worker=(\S+)"
)

MOST_OF_A_KIND, PERIOD = 5, 60.0  # errors of a kind that have a line, in as many seconds
MOST_KINDS = 1000  # kinds of errors that are counted: a model may make types without end

_LEVEL_OF_STATE = {"lost": logging.WARNING, "failed": logging.ERROR, "ready": logging.INFO}


def get_logger(name: str) -> BoundLogger:
    """Return a logger that takes `event, key=value...` and passes them to the standard logger `name`."""
    processors: list[Processor] = [structlog.stdlib.filter_by_level, ProcessorFormatter.wrap_for_formatter]
    logger: BoundLogger = structlog.wrap_logger(
        logging.getLogger(name), processors=processors, wrapper_class=BoundLogger, cache_logger_on_first_use=True
    )
    return logger


@contextmanager
def logging_to(settings: TelemetrySettings, stream: TextIO | None = None, *, captures: bool = False) -> Iterator[None]:
    """Send every log line of this process to `stream` (default: stderr), and to `log_file`, while the block runs.

    With `captures`, no reader, file or disk can block or fail this process or its children. If lines are JSON or also go
    to a file, text that they write to stdout and stderr directly becomes log lines too: prints, warnings, messages of
    libraries in C, all output of the workers.

    Afterwards the root logger is as before. Raises SettingsError when the file cannot be written.
    """
    formatter = _formatter(settings.log_format, colors=(stream or sys.stderr).isatty())
    handlers: list[logging.Handler] = []
    with ExitStack() as stack:
        stack.enter_context(_root_handlers(handlers, settings))
        others = [] if settings.log_file is None else [stack.enter_context(_file_handler(settings.log_file))]
        if captures:
            handlers.append(stack.enter_context(_captured(settings.log_format, formatter, others)))
        else:
            handlers.append(_PresentStderr() if stream is None else logging.StreamHandler(stream))
            handlers[0].setFormatter(formatter)
        handlers += others
        yield


@contextmanager
def _captured(
    log_format: str, formatter: logging.Formatter, others: Sequence[logging.Handler]
) -> Iterator[logging.Handler]:
    """Capture what is written to stdout and stderr: as JSON, if that is the format; and, line by line, for `others`. Give the log's handler."""
    as_json = log_format == "json"
    with standard_outlets() as outlets:
        shown = {name: OutletHandler(outlet, formatter) for name, outlet in outlets.items()}

        def tell(stream: str, line: str) -> None:
            record = _record_of(line, stream)
            for handler in (*([shown[stream]] if as_json else ()), *others):
                handler.handle(record)

        with Capture(outlets, tell if as_json or others else None, replaces=as_json):
            yield shown["stderr"] if as_json else StderrHandler(outlets["stderr"], formatter)


# They write a line for each request that they send, at the level info: the hub's package uses them.
_CHATTY = ("httpx", "httpx2")


@contextmanager
def _root_handlers(handlers: list[logging.Handler], settings: TelemetrySettings) -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers, root.level
    levels = {name: logging.getLogger(name).level for name in _CHATTY}
    root.handlers = handlers
    root.setLevel(settings.log_level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(
            max(root.level, logging.WARNING) if root.level > logging.DEBUG else logging.NOTSET
        )
    try:
        yield
    finally:
        root.handlers = before
        root.setLevel(level)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _file_handler(path: str) -> Iterator[logging.Handler]:
    with ExitStack() as stack:
        try:
            outlet = stack.enter_context(file_outlet(path))
        except OSError as error:
            raise SettingsError(f"log_file={path!r}: cannot be written: {error.strerror}") from error
        yield OutletHandler(outlet, _formatter("json", colors=False))


class _PresentStderr(logging.StreamHandler[TextIO]):
    """Writes to the present sys.stderr: a progress bar replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        self.stream = sys.stderr
        super().emit(record)


def _record_of(line: str, stream: str) -> logging.LogRecord:
    """Return the record of a written line. The lines of workers (workers/program.py) state their level, worker and
    logger.
    """
    level, name, text, extra = logging.INFO, "output", line, {"stream": stream}
    if (logged := _OF_A_WORKER.fullmatch(line)) is not None:
        level, text, name = logging.getLevelNamesMapping()[logged[1].upper()], logged[2], logged[3]
        extra["worker"] = logged[4]
    record = logging.LogRecord(name, level, "", 0, text, (), None)
    record.__dict__.update(extra)
    return record


def _formatter(log_format: str, *, colors: bool) -> logging.Formatter:
    machine = log_format == "json"
    timestamp = structlog.processors.TimeStamper(fmt="iso" if machine else "%Y-%m-%d %H:%M:%S", utc=machine)
    last: list[Processor] = [
        _make_printable,
        structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0, exception_formatter=_plain_traceback),
    ]
    if machine:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=repr)]
    return ProcessorFormatter(
        processors=[_add_record, _add_trace, ProcessorFormatter.remove_processors_meta, timestamp, redact, *last],
        foreign_pre_chain=[structlog.stdlib.ExtraAdder()],
        use_get_message=True,
    )


def _add_record(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    record: logging.LogRecord = event["_record"]
    event["level"] = record.levelname.lower()
    event["logger"] = record.name
    return event


def _add_trace(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Add the id of the trace that the running task belongs to, if there is one."""
    trace = CURRENT_TRACE.get()
    if trace is not None:
        event.setdefault("trace_id", trace.name)
    return event


def _make_printable(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Let no text begin a line of its own, or steer a terminal: callers' texts are in errors of models, and in paths."""
    for key, value in event.items():
        if key == "exception":
            event[key] = printable_lines(str(value))
        elif not key.startswith("_") and key != "exc_info":
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            event[key] = printable(text if isinstance(text, str) else repr(text))
    return event


def _plain_traceback(stream: TextIO, error: ExcInfo) -> None:
    text = io.StringIO()
    # The default also prints the values of variables: bodies, headers, passwords.
    structlog.dev.plain_traceback(text, error)
    stream.write(printable_lines(text.getvalue()))


def redact(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Replace every value, also inside dicts, whose key sounds like a secret."""
    return redacted(event)


def redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with *** for every value, also inside dicts, whose key sounds like a secret."""
    return {key: _redacted_value(key, value) for key, value in values.items()}


def _redacted_value(key: str, value: Any) -> Any:
    lowered = str(key).lower().replace("-", "_")
    if any(word in lowered for word in _SECRET_WORDS):
        return "***"
    return redacted(value) if isinstance(value, Mapping) else value


class RateLimit:
    """Passes the first MOST_OF_A_KIND events of each kind in every PERIOD. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[Hashable, tuple[float, int]] = {}  # by kind: when its period began, and how many came since

    def pass_on(self, kind: Hashable) -> int | None:
        """Return how many events of this kind were held back since the last that passed; None: hold this one back too."""
        now = self._clock()
        begun, count = self._begun.get(kind, (now, 0))
        held = 0
        if now - begun >= PERIOD:
            held, begun, count = max(0, count - MOST_OF_A_KIND), now, 0
        if len(self._begun) >= MOST_KINDS:
            self._begun.clear()
        self._begun[kind] = begun, count + 1
        return held if count < MOST_OF_A_KIND else None


class LogObserver(SilentObserver):
    """An Observer that writes a line when a worker changes, and for each error of a model, with its traceback.

    The number of errors of a kind is limited. Requests and batches have no lines: metrics show them.
    """

    def __init__(self, logger: BoundLogger, limit: RateLimit | None = None) -> None:
        self._logger = logger
        self._limit = limit or RateLimit()

    def refused(self, model: str, frontend: str, error: WeirError) -> None:
        """Write a line if the model is at fault."""
        if isinstance(error, ModelError):
            self.failed(model, [error], 0.0)

    def failed(self, model: str, errors: Sequence[ModelError], now: float) -> None:
        """Write a line for each error, up to a limit for each type of error of a model.

        The first line after that says how many were held back.
        """
        for error in errors:
            kind = error.original_type or type(error).__name__
            held = self._limit.pass_on((model, kind))
            if held is None:
                continue
            facts: dict[str, Any] = {"held_back": held} if held else {}
            if error.remote_traceback:
                facts["exception"] = error.remote_traceback
            self._logger.error("model error", model=model, type=kind, error=error.message, **facts)

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """Write a line: a warning if the worker was lost, an error if it failed."""
        level = _LEVEL_OF_STATE.get(state, logging.DEBUG)
        why = {"reason": reason} if reason else {}
        self._logger.log(level, f"worker {state}", model=model, worker=worker, **why)


class AccessLog(SilentObserver):
    """An Observer that writes a line for each request when it has ended, whatever protocol it came by.

    `code_of` returns the code of a response (None), or of an error of that type, at the frontend of that name.
    """

    def __init__(self, logger: BoundLogger, code_of: Callable[[str, type[WeirError] | None], str]) -> None:
        self._logger = logger
        self._code_of = code_of

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Write a line for each request."""
        for request in requests:
            facts: dict[str, Any] = {
                "rows": request.form.rows,
                "milliseconds": round((now - request.arrival) * 1000, 3),
            }
            if isinstance(request.trace, Trace):
                facts["trace_id"] = request.trace.name
            self._tell(model, request.form.frontend, error, facts)

    def refused(self, model: str, frontend: str, error: WeirError) -> None:
        """Write a line for a request that was not accepted."""
        self._tell(model, frontend, error, {})

    def _tell(self, model: str, frontend: str, error: WeirError | None, facts: dict[str, Any]) -> None:
        kind = None if error is None else type(error)
        if kind is not None:
            facts["error"] = kind.__name__
        self._logger.info("request", model=model, protocol=frontend, code=self._code_of(frontend, kind), **facts)


# Recordings of arrivals, from which a simulation or a load test can repeat the same traffic.
#
# The form is CSV with the header `arrival_s,rows`: seconds since the first arrival, and the rows of the request.


logger = logging.getLogger("weir")

# An observer is notified of requests at their end, which is not the order of their arrival. This many are kept to be sorted:
# more are seldom in progress at once.
KEPT = 8192
# Lines written at once, in about a millisecond of the event loop's time.
WRITTEN_AT_ONCE = 2048


class ArrivalLog(SilentObserver):
    """An Observer that writes the arrivals of one model to the file `path`.

    Every accepted request is in it once, and so is every request that was refused for lack of room or time, with one
    row. Invalid requests (malformed, unknown model) are not: they cause no work. `model` None: of all models. Lines
    ascend in time. A request that ends after more than `kept` later arrivals is written with the time of the line
    before it. `close` writes what is still kept. An outlet writes, so a slow, full or hung disk costs lines and nothing else.
    """

    def __init__(
        self,
        path: str | Path,
        model: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        kept: int = KEPT,
    ) -> None:
        self.path = Path(path)
        self._model = model
        self._clock = clock
        self._kept = kept
        self._arrivals: list[tuple[float, int]] = []
        self._first: float | None = None
        self._last = 0.0
        self._fd = -1
        self._outlet: Outlet | None = None

    def open(self) -> None:
        """Create the file. Raises SettingsError when it cannot be written."""
        try:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise SettingsError(f"record={str(self.path)!r}: cannot be written: {error.strerror}") from error
        self._outlet = Outlet("record", partial(write_all, self._fd), f"record={str(self.path)!r}")
        self._outlet.put(b"arrival_s,rows\n")

    def close(self) -> None:
        """Write what is kept, and close the file. Idempotent."""
        self._write(len(self._arrivals))
        outlet, self._outlet = self._outlet, None
        if outlet is not None and outlet.close():
            os.close(self._fd)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        """Note requests that had their end."""
        if self._model is None or model == self._model:
            self._note([(request.arrival, request.form.rows) for request in requests])

    def refused(self, model: str, frontend: str, error: WeirError) -> None:
        """Note a request for which there was no room, or no time."""
        if isinstance(error, (CapacityError, DeadlineExceeded)) and (self._model is None or model == self._model):
            self._note([(self._clock(), 1)])

    def _note(self, arrivals: list[tuple[float, int]]) -> None:
        if self._outlet is None:
            return
        self._arrivals += arrivals
        while len(self._arrivals) >= self._kept + WRITTEN_AT_ONCE:
            self._write(WRITTEN_AT_ONCE)

    def _write(self, count: int) -> None:
        """Write the `count` earliest arrivals."""
        if self._outlet is None or not count:
            return
        self._arrivals.sort()
        if self._first is None:
            self._first = self._arrivals[0][0]
        first, last = self._first, self._last
        lines = [f"{max(at - first, last):.6f},{rows}\n" for at, rows in self._arrivals[:count]]
        self._outlet.put("".join(lines).encode())
        self._last = max(self._arrivals[count - 1][0] - first, last)
        del self._arrivals[:count]


def recorders(path: str, models: Sequence[str]) -> list[ArrivalLog]:
    """Return an ArrivalLog for each of `models`: to `path` if there is one, else to PATH with the model's name before
    the ending.
    """
    if len(models) == 1:
        return [ArrivalLog(path, models[0])]
    whole = Path(path)
    named = {model: f"{whole.stem}.{model.replace('/', '--')}{whole.suffix}" for model in models}
    return [ArrivalLog(whole.with_name(file), model) for model, file in named.items()]
