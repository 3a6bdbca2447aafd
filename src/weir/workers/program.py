"""What a worker process does from the first frame to the last: build the model, report that it is ready, run batches, unload."""

import gc
import io
import logging
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from weir.errors import SettingsError, WeirError
from weir.messages import Batch
from weir.model import Model
from weir.wire.frames import FrameParser, Ready, Restarted, Start, StartFailed, encode_control, encode_events
from weir.workers.arena import Arena, Mapping, PayloadFetch, ResultPlaces
from weir.workers.child_channel import ChildChannel
from weir.workers.faults import model_error
from weir.workers.run.runner import Runner
from weir.workers.source import unpack_source

if TYPE_CHECKING:
    from weir.workers.run.runner import PreparedBatch, Runner


def serve(channel: ChildChannel, runner: "Runner", places: ResultPlaces | None) -> None:
    """Run one batch at a time until the server says stop or leaves."""
    while isinstance(batch := channel.receive(), Batch):
        batch_id = batch.batch_id
        prepared = runner.prepare(batch)
        channel.look()
        answer(channel, runner, places, batch_id, prepared, channel.look)
        del batch, prepared  # a large payload does not stay while the worker is idle


def serve_ahead(channel: ChildChannel, runner: "Runner", places: ResultPlaces | None) -> None:
    """Do the same, while another thread receives and prepares the next batch."""
    ahead: queue.SimpleQueue[tuple[int, PreparedBatch] | None] = queue.SimpleQueue()
    threading.Thread(target=_prepare_each, args=(channel, runner, ahead), name="weir-ahead", daemon=True).start()
    while (item := ahead.get()) is not None:
        answer(channel, runner, places, *item, _nothing)  # the other thread looks
        del item


def answer(
    channel: ChildChannel, runner: "Runner", places: ResultPlaces | None, batch_id: int, prepared: "PreparedBatch",
    look: Callable[[], None],
) -> None:  # fmt: skip
    """Compute one batch and send what comes out; `look` hears meanwhile of callers who leave."""

    def restarted() -> None:
        channel.send(encode_control(Restarted(batch_id)))
        look()

    cancelled = channel.cancelled(batch_id)
    if runner.streaming:
        for events in runner.stream(prepared, cancelled, restarted):
            if events.final:
                channel.answered(batch_id)
            channel.send(encode_events(events, places))
            look()
    else:
        events = runner.compute(prepared, cancelled, restarted)
        channel.answered(batch_id)
        channel.send(encode_events(events, places))
    if places is not None:
        places.close()


def _nothing() -> None:
    pass


def _prepare_each(
    channel: ChildChannel, runner: "Runner", ahead: "queue.SimpleQueue[tuple[int, PreparedBatch] | None]"
) -> None:
    try:
        while isinstance(batch := channel.receive(), Batch):
            prepared = runner.prepare(batch)
            channel.look()
            ahead.put((batch.batch_id, prepared))
            del batch, prepared
        ahead.put(None)
    except BaseException:  # without this thread the worker would wait for ever
        traceback.print_exc()
        os._exit(1)


def run(
    end: int, request_fd: int, request_bytes: int, result_fd: int, result_bytes: int, *, refusal: SettingsError | None,
    loaded: Callable[[], None] = lambda: None, shared: Model | None = None,
) -> int:  # fmt: skip
    """Serve on the socket `end` until the server says stop or leaves; return the exit code.

    The arenas' descriptors are -1 where there are none. `refusal`: why this process cannot start at all.
    `loaded` is called when the model is. `shared` is the model where it has been made already, and shares what it has loaded with other workers.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a model printed is not lost when it is killed
    channel, places, fetch = connect(end, request_fd, request_bytes, result_fd, result_bytes)
    start = channel.receive()
    if not isinstance(start, Start):
        return 0  # the server has left
    try:
        if refusal is not None:
            raise refusal
        runner = build(start, places, shared)
    except BaseException as error:  # whatever the model raised, SystemExit too, is told to the server
        what = f"starting worker {start.options['index']} of {start.options['name']!r}"
        channel.send(encode_control(StartFailed(error if isinstance(error, WeirError) else model_error(what, error))))
        return 1
    loaded()
    channel.spin = start.options["spin"]
    if fetch is not None:
        fetch.lends = runner.borrows
    channel.send(encode_control(Ready()))
    loop = serve_ahead if start.options["pipeline_depth"] > 1 else serve
    try:
        loop(channel, runner, places)
    except BaseException as error:  # SystemExit, of the model
        runner.end(error)
        raise
    runner.stop()
    return 0


def connect(
    end: int, request_fd: int, request_bytes: int, result_fd: int, result_bytes: int
) -> tuple[ChildChannel, ResultPlaces | None, PayloadFetch | None]:
    """Return the channel to the server, where large results go, and where large payloads come from. No program that the
    model starts inherits them."""
    fetch = places = None
    os.set_inheritable(end, False)
    if request_fd >= 0:
        fetch = PayloadFetch(Mapping(request_fd, request_bytes, writable=False))
        os.close(request_fd)
    if result_fd >= 0:
        os.set_inheritable(result_fd, False)
        places = ResultPlaces(Arena(result_fd, result_bytes))
    return ChildChannel(socket.socket(fileno=end), FrameParser(fetch), places), places, fetch


def build(start: Start, places: ResultPlaces | None, shared: Model | None = None) -> Runner:
    """Return the model's runner, loaded and warmed up. Raises what the model raises."""
    options = start.options
    sys.path[:] = options["path"]
    configure_logging(options["name"], options["index"])
    assert isinstance(start.target, bytes)
    model, params = unpack_source(start.target) if shared is None else (type(shared), {})
    runner = Runner(
        model, params, worker_index=options["index"], max_batch_size=options["max_batch_size"],
        retry_in_halves=options["retry_in_halves"], label=options["name"],
        open_place=None if places is None else places.open, shared=shared,
    )  # fmt: skip
    runner.start()
    if places is not None:
        places.close()  # what the warm-up computed goes nowhere
    gc.collect()
    gc.freeze()  # what the model has loaded lives as long as the worker
    return runner


def configure_logging(name: str, index: int | None) -> None:
    """Have what the model logs appear on stderr, with the worker it comes from, unless the model decides otherwise."""
    worker = (name if index is None else f"{name}/{index}").replace("%", "%%")
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s %(levelname)-7s {worker} %(name)s: %(message)s"
    )
