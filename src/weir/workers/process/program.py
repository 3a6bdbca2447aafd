"""Runs a worker process from its first frame to its last: it builds the model, reports that it is ready, runs batches, and unloads.

A template process loads what the workers of a model share, once, and then forks a worker at each request of the server. entry.py runs both.
"""

import atexit
import errno
import gc
import importlib
import io
import json
import logging
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TextIO, TypeVar

from weir.errors import SettingsError, printable, printable_lines
from weir.messages import Batch
from weir.model import Model
from weir.wire.frames import FrameParser, Ready, Start, StartFailed, encode_control
from weir.workers.arena import Arena, Mapping, PayloadFetch, ResultPlaces
from weir.workers.process.channel import RECEIVE_BYTES, ChildChannel, ServerSocket
from weir.workers.process.entry import become_idle, prepare
from weir.workers.run.runner import HostedModels, HostedRunner, RunnableModel, Runner, load_shared
from weir.workers.run.steps import PreparedBatch, load_error
from weir.workers.source import unpack_source


def run_worker(
    end: int, request_fd: int, request_bytes: int, result_fd: int, result_bytes: int, *, refusal: SettingsError | None,
    shared: Model | None = None,
) -> int:  # fmt: skip
    """Serve on the socket with the descriptor `end` until the server says stop or leaves; return the exit code.

    The descriptors of the two arenas are -1 where there is no arena. `refusal` is why this process cannot start at all, if it cannot.
    `shared` is the model, if it has been made and has loaded what its workers share.
    """
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)
    channel, places, fetch = open_channel(ChildChannel, end, request_fd, request_bytes, result_fd, result_bytes)
    os.register_at_fork(after_in_child=channel.leave)
    start = channel.receive()
    if not isinstance(start, Start):
        return 0  # the server has left
    try:
        if refusal is not None:
            raise refusal
        sys.path[:] = start.options["path"]
        runner = load_runner(start, channel, places, fetch, shared)
        if start.options["bulk"]:
            become_idle()
    except BaseException as error:  # whatever the model raised, SystemExit too, is reported to the server
        channel.send(encode_control(start_failed(start, error)))
        return 1
    channel.send(encode_control(Ready(runner.measured())))
    run_batches(channel, runner, start.options["pipeline_depth"], start.options["concurrency"])
    runner.stop()
    return 0


class _Lossy(io.FileIO):
    """Writes to a descriptor, or loses what cannot be written: whoever reads it may have gone, and no `print` of a model fails for that."""

    def write(self, data: Any, /) -> int:
        """Return how much was written or lost."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _lossy(stream: TextIO) -> TextIO:
    """Return a stream that writes where `stream` does, line by line, so that what a model has printed is not lost when it is killed."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw = io.BufferedWriter(_Lossy(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


Kind = TypeVar("Kind", bound=ChildChannel)


def open_channel(
    kind: type[Kind], end: int, request_fd: int, request_bytes: int, result_fd: int, result_bytes: int
) -> tuple[Kind, ResultPlaces | None, PayloadFetch | None]:
    """Return the channel to the server, where large results go, and where large payloads come from. Programs that the model starts inherit
    none of the descriptors."""
    fetch = places = None
    os.set_inheritable(end, False)
    if request_fd >= 0:
        fetch = PayloadFetch(Mapping(request_fd, request_bytes, writable=False))
        os.close(request_fd)
    if result_fd >= 0:
        os.set_inheritable(result_fd, False)
        places = ResultPlaces(Arena(result_fd, result_bytes))
    return kind(ServerSocket(fileno=end), FrameParser(fetch), places), places, fetch


AnyRunner = Runner | HostedRunner


def load_runner(
    start: Start,
    channel: ChildChannel,
    places: ResultPlaces | None,
    fetch: PayloadFetch | None,
    shared: Model | None = None,
) -> AnyRunner:
    """Return the runner of build_runner for batches that come through `channel`: see open_channel."""
    # With several batches at once nobody could tell for which of them the model took memory.
    direct = None if places is None or start.options["concurrency"] > 1 else places.open
    runner = build_runner(start, direct, shared, channel.take_turn if start.options["takes_turns"] else None)
    if places is not None:
        places.close()  # nobody reads what the warm-up computed
    channel.spin = start.options["spin"]
    if fetch is not None:
        fetch.lends = runner.borrows
    return runner


def build_runner(
    start: Start,
    open_place: Callable[[int], memoryview | None] | None,
    shared: Model | None,
    take_turn: Callable[[bool], None] | None = None,
) -> AnyRunner:
    """Return the model's runner, loaded and warmed up. Raises what the model raises. `open_place` and `shared`: see Runner; `take_turn`:
    see ChildChannel."""
    options = start.options
    configure_logging(options["name"], options["index"])
    assert isinstance(start.target, bytes)
    model, params = unpack_source(start.target) if shared is None else (type(shared), {})
    runner: AnyRunner
    if issubclass(model, HostedModels):
        runner = HostedRunner(params, worker_index=options["index"], shared=shared)
    else:
        runs = RunnableModel(model, params, options["max_batch_size"], options["retry_in_halves"], options["name"])
        runner = Runner(runs, options["index"], open_place=open_place, shared=shared)
    for wanted in runner.starting():
        if take_turn is not None:
            take_turn(wanted)
    gc.collect()
    gc.freeze()  # what the model has loaded lives as long as the worker
    return runner


def start_failed(start: Start, error: BaseException) -> StartFailed:
    """Return the frame that tells the server why the worker did not load: whatever the model raised, SystemExit too."""
    what = f"starting worker {start.options['index']} of {start.options['name']!r}"
    return StartFailed(load_error(what, error))


def configure_logging(name: str, index: int | None) -> None:
    """Write what the model logs to stderr, with the name of the model and the worker's index, unless the model has configured logging.

    Lines have the form of the server's own.
    """
    worker = (name if index is None else f"{name}/{index}").replace("%", "%%")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Printable(f"%(asctime)s [%(level)-9s] %(message)s [%(name)s] worker={worker}", "%Y-%m-%d %H:%M:%S")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _Printable(logging.Formatter):
    """Formats a record as one line, below which its traceback is indented, whatever texts of callers are in it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line."""
        record.level = record.levelname.lower()
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return the traceback."""
        return printable_lines(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        """Return the stack that a record has instead of a traceback."""
        return printable_lines(super().formatStack(stack_info))


def run_batches(channel: ChildChannel, runner: AnyRunner, pipeline_depth: int, concurrency: int = 1) -> None:
    """Run the batches that come through `channel` until the server says stop or leaves. Raises SystemExit of the model, which is unloaded then."""
    batches, worker = BatchLoop(channel, runner), os.getpid()
    try:
        if concurrency > 1:
            batches.run_together(concurrency)
        elif pipeline_depth > 1:
            batches.run_ahead()
        else:
            batches.run()
    except BaseException as error:
        if os.getpid() == worker:  # else it ends a process that the model forked, and the model stays loaded here
            note_exit(error)
            runner.end(error)
        raise


def note_exit(error: BaseException) -> None:
    """Log where the model's code called sys.exit, if that is what `error` is."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, SystemExit) and not frame.filename.startswith(os.path.dirname(__file__)):
        logging.getLogger("weir").error(
            "sys.exit(%r) in %s, line %s, ends this worker", error.code, frame.filename, frame.lineno
        )


class BatchLoop:
    """Runs the batches that come through a channel until the server says stop or leaves."""

    def __init__(self, channel: ChildChannel, runner: AnyRunner) -> None:
        self._channel = channel
        self._runner = runner
        self._sending = threading.Lock()

    def run(self) -> None:
        """Receive, prepare and compute each batch in this thread."""
        while (prepared := self._next()) is not None:
            self._respond(prepared, self._channel.look)
            del prepared  # so that a large payload does not stay while the worker is idle

    def run_ahead(self) -> None:
        """Compute in this thread while another thread receives and prepares the next batch."""
        ahead: queue.SimpleQueue[PreparedBatch | None] = queue.SimpleQueue()
        threading.Thread(target=self._prepare_each, args=(ahead,), name="weir-ahead", daemon=True).start()
        while (prepared := ahead.get()) is not None:
            self._respond(prepared, lambda: None)  # the other thread reads cancellations
            del prepared

    def run_together(self, count: int) -> None:
        """Receive in this thread; prepare and compute up to `count` batches at once, each in a thread."""
        came: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        runners = [self._runner, *(self._runner.twin() for _ in range(count - 1))]
        threads = [
            threading.Thread(target=self._run_each, args=(came, runner), name=f"weir-batches-{number}", daemon=True)
            for number, runner in enumerate(runners)
        ]
        for thread in threads:
            thread.start()
        while isinstance(batch := self._channel.receive(), Batch):
            came.put(batch)
            del batch
        for _ in threads:
            came.put(None)
        for thread in threads:
            thread.join()

    def _run_each(self, came: "queue.SimpleQueue[Batch | None]", runner: AnyRunner) -> None:
        try:
            while (batch := came.get()) is not None:
                self._respond(runner.prepare(batch), lambda: None, runner)
                del batch
        except BaseException as error:  # it ends the process, as it does where batches run one at a time
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            note_exit(error)
            self._runner.end(error)
            logging.shutdown()
            _flush()
            os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)

    def _next(self) -> PreparedBatch | None:
        """Return the next batch, prepared; None when the server wants the worker to stop."""
        batch = self._channel.receive()
        if not isinstance(batch, Batch):
            return None
        prepared = self._runner.prepare(batch)
        self._channel.look()
        return prepared

    def _prepare_each(self, ahead: "queue.SimpleQueue[PreparedBatch | None]") -> None:
        try:
            while (prepared := self._next()) is not None:
                ahead.put(prepared)
                del prepared
            ahead.put(None)
        except BaseException:  # without this thread the worker would wait for ever
            traceback.print_exc()
            os._exit(1)

    def _respond(self, prepared: PreparedBatch, look: Callable[[], None], runner: AnyRunner | None = None) -> None:
        """Compute one batch and send its events. `look` reads the cancellations that come meanwhile."""
        batch_id = prepared.batch_id

        def restarted() -> None:
            with self._sending:
                self._channel.restarted(batch_id)
            look()

        cancelled = self._channel.cancelled(batch_id)
        for events in (runner or self._runner).run(prepared, cancelled, restarted):
            with self._sending:
                self._channel.report(events)
            if not events.final:
                look()


def run_template(descriptor: int) -> int:
    """Load what the workers of a model share, or the modules that those of any model need; then fork a worker, or reap one, at each request
    of the server. Return the exit code.

    `descriptor` is this process's end of a socket.
    """
    server = ServerSocket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    start = ChildChannel(server, FrameParser(), None).receive()
    if not isinstance(start, Start):
        return 0  # the server has left
    try:
        model = _load(start) if start.target else None
        if model is None:
            _import(start)
    except BaseException:
        traceback.print_exc()
        name = start.options["name"]
        print(f"weir: {name}: nothing is shared by its workers, each loads by itself", file=sys.stderr)  # noqa: T201 - logging is not configured yet
        return 1
    server.sendall(READY)
    return obey(server, lambda options, descriptors, own: _be_worker(options, descriptors, model, own))


def _load(start: Start) -> Model:
    """Return the model, which has loaded what its workers share."""
    sys.path[:] = start.options["path"]
    known = list(logging.getLogger().handlers)
    configure_logging(start.options["name"], None)
    mine = [handler for handler in logging.getLogger().handlers if handler not in known]
    assert isinstance(start.target, bytes)
    model = load_shared(*unpack_source(start.target), start.options["max_batch_size"])
    for handler in mine:
        logging.getLogger().removeHandler(handler)  # each worker adds one that shows its index
    gc.collect()
    gc.freeze()  # the collector writes to each object that it looks at, which would copy its memory for each worker
    return model


def _import(start: Start) -> None:
    """Import the modules that the workers of any model find loaded. One that cannot be imported is left to the models."""
    sys.path[:] = start.options["path"]
    for name in start.options["imports"]:
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"weir: {name}: no model finds it loaded ({type(error).__name__}: {error})", file=sys.stderr)  # noqa: T201 - logging is not configured
    gc.collect()
    gc.freeze()


READY = b"1"  # what a template sends once it has loaded

MOST_DESCRIPTORS = 16  # that a forked process gets


def obey(server: socket.socket, become: Callable[[dict[str, Any], Sequence[int], int], NoReturn]) -> int:
    """Fork a process, or reap one, at each request of the server, until it leaves. Return the exit code.

    A forked process calls `become` with the arguments and the descriptors of the request, and the process id of this template.
    """
    own = os.getpid()
    while True:
        text, descriptors, _, _ = socket.recv_fds(server, RECEIVE_BYTES, MOST_DESCRIPTORS)
        if not text:
            return 0  # the server has left
        request = json.loads(text)
        if "reap" in request:
            reply = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            reply = _fork()
            if reply == 0:
                server.close()
                become(request["fork"], descriptors, own)
            for each in descriptors:
                os.close(each)
            with suppress(OSError):  # here too: the server may kill the group as soon as it knows its number
                os.setpgid(reply, reply)
        server.sendall(str(reply).encode())


def _fork() -> int:
    """Fork. Return the negative number of the error if the system refuses: the workers that there are go on."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)


def _be_worker(options: dict[str, Any], descriptors: Sequence[int], model: Model | None, template: int) -> NoReturn:
    """Run as a worker until the end. If the template has loaded a model, libraries are not shut down then: they would look for the threads
    that the template had. Without one, the worker ends as a program does, but does not take down its modules, whose memory it shares."""
    os.setpgid(0, 0)
    refusal = prepare(template, options["cpus"])
    given = iter(descriptors)
    end = next(given)
    request_bytes, result_bytes = options["request_bytes"], options["result_bytes"]
    request_fd = next(given) if request_bytes else -1
    result_fd = next(given) if result_bytes else -1
    if model is None and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else all models would draw the same numbers
    try:
        code = run_worker(end, request_fd, request_bytes, result_fd, result_bytes, refusal=refusal, shared=model)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    if model is None:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
    logging.shutdown()
    _flush()
    os._exit(code)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
