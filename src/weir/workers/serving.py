"""What a worker process does once its model is loaded: batches in, events out, one after the other."""

import os
import queue
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from weir.messages import Batch
from weir.wire.frames import Restarted, encode_control, encode_events
from weir.workers.child_channel import ChildChannel
from weir.workers.shm.places import ResultPlaces

if TYPE_CHECKING:
    from weir.workers.run.runner import Prepared, Runner


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
    ahead: queue.SimpleQueue[tuple[int, Prepared] | None] = queue.SimpleQueue()
    threading.Thread(target=_prepare_each, args=(channel, runner, ahead), name="weir-ahead", daemon=True).start()
    while (item := ahead.get()) is not None:
        answer(channel, runner, places, *item, _nothing)  # the other thread looks
        del item


def answer(
    channel: ChildChannel, runner: "Runner", places: ResultPlaces | None, batch_id: int, prepared: "Prepared",
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
    channel: ChildChannel, runner: "Runner", ahead: "queue.SimpleQueue[tuple[int, Prepared] | None]"
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
