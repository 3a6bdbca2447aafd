"""The worker processes of a pool, seen from the server.

A `Child` is one process, from its start until it has been reaped. Nothing here waits for it: it may be stopped, or in uninterruptible sleep, and so may
the template that it is forked from. A `SupervisedWorker` goes through several: started, ready, lost, started again, and finally stopped or failed.

    starting ──ready──> ready ──death──> lost ──back-off──> starting
       │                  └──────────────── stop ───────────────> stopped
       └──does not load──> lost, after several times failed ──back-off──> starting

Everything happens on the loop's thread.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from weir.errors import ModelError, ModelNotReady, WeirError
from weir.messages import Batch, Events
from weir.policy.backoff import Backoff
from weir.wire.frames import (
    Cancel,
    Frame,
    FrameParser,
    Free,
    Ready,
    Restarted,
    Start,
    StartFailed,
    Stop,
    Turn,
    WorkerLeaves,
    WorkerPlaced,
    WorkerWaits,
    encode_batch,
    encode_control,
)
from weir.workers.arena import Arena, BatchPlaces, ResultFetch, Results, as_values, create_memory
from weir.workers.executor import READY, WAITS, HeldTurn, Listener
from weir.workers.process.channel import Channel
from weir.workers.process.entry import cpu_times, hurry
from weir.workers.process.launch import KILL_GRACE, Launch, Process
from weir.workers.timer import TimeLimit, resolve

# Seconds after the end of its channel until a process that still runs is killed: it is of no use, but one that is just ending needs a moment.
END_GRACE = 1.0

TOO_LONG = "a batch ran longer than"

logger = logging.getLogger("weir")
GAVE_WAY = 0.1  # a batch at idle priority whose process waited for this part of predict_timeout gets that time again, until it has run for as long


class ChildListener(Protocol):
    """Hears the reports of a Child, on the loop's thread."""

    def received(self, frame: Frame) -> None:
        """A frame has come."""

    def refused(self, reason: str, *, unreachable: bool = False) -> None:
        """There can be no process now; with `unreachable`, none of any worker. Nothing is left behind."""

    def disconnected(self) -> None:
        """The process has most likely ended; `exited` soon says why."""

    def exited(self, reason: str) -> None:
        """The process has ended and was reaped, its last frames have been passed on, and its resources are freed.

        Or it is still running after it was killed: nothing more comes from it, and it is reaped and freed when it ends.
        """


class ChannelWithResults:
    """The traffic with one worker: its channel, once there is one, and its arena of results, if it has one."""

    def __init__(self) -> None:
        self._channel: Channel[Frame] | None = None
        self.results: Results | None = None

    @property
    def held_bytes(self) -> int:
        """The number of bytes of its arena that hold results which have not been released."""
        return 0 if self.results is None else self.results.held_bytes

    def send(self, frame: bytearray) -> None:
        """Send `frame`, and before it the places of the results that were released."""
        results = self.results
        freed = results.take_freed() if results is not None and (results.returned or results.freed) else None
        if self._channel is not None:
            self._channel.send(encode_control(Free(freed)) + frame if freed else frame)

    def receive(self) -> None:
        """Pass on the frames that have arrived, without waiting for the loop to notice."""
        if self._channel is not None:
            self._channel.receive_rest()

    def _make_results(self, launch: Launch) -> int:
        """Make the arena of results; return its descriptor, which the worker needs; -1 if there is none. Raises OSError."""
        if not launch.result_bytes:
            return -1
        fd = create_memory(f"weir-results-{launch.name}-{launch.index}", launch.result_bytes)
        try:
            self.results = Results(fd, launch.result_bytes)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _make_parser(self, *, lends: bool) -> FrameParser:
        if self.results is None:
            return FrameParser(None)
        if not lends:
            return FrameParser(ResultFetch(self.results))
        from weir.workers.run.tensors import lease  # needs numpy, which other models' workers and servers do without

        return FrameParser(ResultFetch(self.results, lease))

    def _close_ours(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self.results is not None:
            self.results.close()


class Child(ChannelWithResults):
    """A worker process. Its `owner` is notified of its frames and its end."""

    shares_memory = True

    def __init__(self, launch: Launch, owner: ChildListener, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._launch = launch
        self._owner = owner
        self._loop = loop
        self._reason = ""
        self._killed = False
        self._reported = False  # the owner knows of its end
        self._starts = False  # a thread is starting it, which ends with a process or with an error
        self._timer: asyncio.TimerHandle | None = None  # until the next step towards its end
        self._process: Process | None = None
        self._pidfd = -1
        self._inherited: tuple[socket.socket, int]  # its socket and the descriptor of its arena, or -1

    @property
    def pid(self) -> int | None:
        """The process id, also that of its process group; None while it is being started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, at once or soon. The owner is notified if the system refuses."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._owner.refused(_refusal(error))
            return
        self._inherited = theirs, -1
        try:
            self._inherited = theirs, self._make_results(self._launch)
        except OSError as error:
            ours.close()
            self._refused(error)
            return
        parser = self._make_parser(lends=self._launch.lends)
        self._channel = Channel(ours, parser, self._owner.received, self._channel_ended)
        end, result_fd = self._inherited
        if not self._launch.fork(end.fileno(), result_fd, self._forked):
            self._spawn()

    def kill(self, reason: str = "") -> None:
        """Kill the process and all that it started, now. `exited` is still called, with `reason` if that was the cause: when it has ended, or
        KILL_GRACE seconds later."""
        self._reason = self._reason or reason
        if not self._killed:
            self._killed = True
            self._set_timer(KILL_GRACE if self._starts or self._process is not None else 0.0, self._stays)
            if self._process is not None:
                hurry(self._process.pid)
        self._signal()

    def _spawn(self) -> None:
        theirs, result_fd = self._inherited
        self._starts = True
        self._launch.spawn(theirs.fileno(), result_fd, self._forked)

    def _forked(self, process: Process | OSError | None) -> None:
        self._starts = False
        if isinstance(process, OSError):
            self._refused(process)
        elif process is not None:
            self._began(process)
        elif self._killed:
            self._refused(ProcessLookupError())
        else:
            self._spawn()

    def _began(self, process: Process) -> None:
        self._process = process
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            self._signal()
            process.reap(lambda _: None)
            self._refused(error)
            return
        self._close_inherited()
        self._loop.add_reader(self._pidfd, self._exited)
        if self._killed:  # while it was being started
            self._signal()
        elif self._channel is not None:
            self._channel.open(self._loop)
            self._channel.send(encode_control(Start(self._launch.source, self._launch.options())))

    def _refused(self, error: OSError) -> None:
        self._close_inherited()
        self._free()
        if not self._reported:
            self._reported = True
            self._owner.refused(_refusal(error))

    def _signal(self) -> None:
        if self._process is not None:
            for end in (os.killpg, os.kill):  # both: the model may have moved the process to another group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    end(self._process.pid, signal.SIGKILL)

    def _channel_ended(self, reason: str) -> None:
        self._set_timer(END_GRACE, self.kill, f"it was ended because {reason}")

    def _exited(self) -> None:
        assert self._process is not None
        self._loop.remove_reader(self._pidfd)
        # Until it is reaped, its process id and group belong to it: no other process can be killed.
        self._signal()
        self._set_timer(END_GRACE, self._reaped, None)  # the template that reaps it may hang
        self._process.reap(self._reaped)

    def _reaped(self, code: int | None) -> None:
        if self._pidfd < 0:
            return
        if not self._reported:
            self.receive()
        self._free()
        self._report("it has ended" if code is None else self._cause(code))

    def _stays(self) -> None:
        if self._process is None:
            self._report("it was ended before it had started")
            return
        logger.warning(
            "process %d, worker %d of %r, is still running after it was killed, and is left behind",
            self._process.pid,
            self._launch.index,
            self._launch.name,
        )
        self._close_ours()  # nothing that it sends is read any more
        why = f" ({self._reason})" if self._reason else ""
        self._report(f"it was killed{why} and does not end: process {self._process.pid} is left behind")

    def _report(self, reason: str) -> None:
        if not self._reported:
            self._reported = True
            self._owner.exited(reason)

    def _set_timer(self, seconds: float, act: Callable[..., None], *arguments: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, act, *arguments)

    def _free(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._close_ours()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _close_inherited(self) -> None:
        theirs, result_fd = self._inherited
        theirs.close()
        if result_fd >= 0:
            os.close(result_fd)

    def _cause(self, code: int) -> str:
        if code >= 0:
            return f"it exited with code {code}"
        if code == -signal.SIGKILL and self._reason:
            return self._reason
        hint = ", killed from outside or out of memory" if code == -signal.SIGKILL else ""
        return f"it was ended by signal {-code} ({signal.strsignal(-code)}{hint})"


def _refusal(error: OSError) -> str:
    return f"the process cannot be started: {error}"


class WorkerListener(Protocol):
    """Hears the reports of a SupervisedWorker that concern the whole pool."""

    def worker_started(self, worker: "SupervisedWorker") -> None:
        """`worker` is ready for the first time."""

    def worker_failed(self, worker: "SupervisedWorker", error: WeirError) -> None:
        """`worker` did not become ready at the start of the pool; or, later, again and again, while it is still tried."""

    def unreachable(self, reason: str) -> None:
        """No worker can be started now."""


class WorkerChild(Protocol):
    """One process of a worker, from its start to its end, as Child runs it; it reports to a ChildListener. `results` is its arena of results, if it has
    one."""

    results: Results | None

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""

    @property
    def held_bytes(self) -> int:
        """The number of bytes of its results that have not been released."""

    @property
    def shares_memory(self) -> bool:
        """Whether it reaches the arenas of this machine."""

    def start(self) -> None:
        """Start the process."""

    def send(self, frame: bytearray) -> None:
        """Send `frame`."""

    def receive(self) -> None:
        """Pass on the frames that have arrived, without waiting for the loop to notice."""

    def kill(self, reason: str = "") -> None:
        """End the process now. `exited` is still called, with `reason` if that was the cause."""


Spawn = Callable[[Launch, ChildListener, asyncio.AbstractEventLoop], WorkerChild]
"""Returns a process of a worker, not started yet."""


class Flight(NamedTuple):
    """The record of a batch until its responses are there: its number of tries, the wanted types, its memory in the arena, and the limit of its time, if it
    has one of its own."""

    attempt: int
    accepts: str | list[str]
    places: BatchPlaces | None
    limit: TimeLimit | None = None


class SupervisedWorker:
    """Keeps one process running. Its public attributes are those of WorkerState, and where the process is if it is one of a cluster: the id and the
    address of its node, the ids of its GPUs, and that of its actor."""

    def __init__(
        self,
        launch: Launch,
        arena: Arena | None,
        pool: WorkerListener,
        listener: Listener,
        loop: asyncio.AbstractEventLoop,
        spawn: Spawn = Child,
    ) -> None:
        self.index = launch.index
        self.bulk = launch.bulk
        self.state = "starting"
        self.restarts = 0
        self.reason = ""
        self.node = self.address = self.actor = ""
        self.gpus: list[str] = []
        self.stopped: asyncio.Future[None] = loop.create_future()
        self._leaving = ""  # why it gets no more batches and is started elsewhere
        self._keeps = launch.settings.ray_detached is not None  # the process outlives this server
        self._spawn = spawn
        self._launch = launch
        self._arena = arena
        self._pool = pool
        self._listener = listener
        self._loop = loop
        self._backoff = Backoff()
        self._child: WorkerChild | None = None
        self._batches: dict[int, Flight] = {}
        self._error: WeirError | None = None  # the error in StartFailed
        self._started = False
        # How long a worker of idle priority had run and waited for a CPU, before its batch and at the last look.
        self._cpu_times = (0.0, 0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._start_limit = self._limit("start_timeout", "it had not loaded within")
        self._predict_limit = self._limit("predict_timeout", TOO_LONG)
        self._turn = HeldTurn(launch.turns, launch.index)

    @property
    def pid(self) -> int | None:
        """The process id, while it has a process."""
        return None if self._child is None else self._child.pid

    @property
    def keeps_failing(self) -> bool:
        """Whether it has failed to load several times in a row."""
        return self._backoff.keeps_failing

    @property
    def in_flight(self) -> int:
        """The number of batches that it has."""
        return len(self._batches)

    @property
    def held_bytes(self) -> int:
        """The number of bytes of its results that have not been released."""
        return 0 if self._child is None else self._child.held_bytes

    def start(self) -> None:
        """Start a process; `received`, `refused` or `exited` report what becomes of it."""
        self.state = "starting"
        self._error = None
        self._leaving = ""
        self._child = self._spawn(self._launch, self, self._loop)
        self._start_limit.begin()
        self._child.start()

    def announce(self) -> None:
        """Tell the listener that the worker takes batches. From now on it is started again when it dies."""
        self._started = True
        self._listener.worker_ready(self.index, self._launch.settings.places, bulk=self.bulk)

    def run(self, batch: Batch) -> None:
        """Send `batch` to the process. Raises RuntimeError if there is none."""
        if self._child is None:
            raise RuntimeError(f"{self._name} was given a batch while {self.state}. This is a bug in Weir")
        places = None if self._arena is None or not self._child.shares_memory else BatchPlaces(self._arena)
        try:
            frame = encode_batch(batch, places)
        except BaseException:
            if places is not None:
                places.release()
            raise
        has_own = self._launch.settings.worker_concurrency > 1
        limit = self._limit("predict_timeout", TOO_LONG, batch.batch_id) if has_own else None
        if limit is not None or not self._batches:
            self._limit_predict(limit)
        self._batches[batch.batch_id] = Flight(batch.attempt, batch.accepts, places, limit)
        self._child.send(frame)

    def cancel(self, batch_id: int, indices: list[int]) -> None:
        """Tell the process that no caller waits for these entries, unless the batch has its responses already."""
        if self._child is not None and batch_id in self._batches:
            self._child.send(encode_control(Cancel(batch_id, indices)))

    def stop(self, grace: float) -> None:
        """Have the process finish its batches, unload and exit; kill it after `grace` seconds, or at once while it is loading.

        `stopped` is done when it has ended. The listener is notified of responses only.
        """
        loading, self.state = self.state == "starting", "stopped"
        self._close_timers()
        if self._child is None:
            self._gone()
        elif loading:
            self._child.kill()
        else:
            self._child.send(encode_control(Stop(keep=self._keeps)))
            self._timer = self._loop.call_later(grace, self._child.kill)

    def unload(self, grace: float) -> None:
        """Do what `stop` does, for good: a worker that can outlive this server does not."""
        self._keeps = False
        self.stop(grace)

    def kill(self, reason: str = "") -> None:
        """Kill the process now; `exited` is called later."""
        if self._child is not None:
            self._child.kill(reason)

    def end(self) -> None:
        """Kill the process and do not start it again. `stopped` is done when it has ended, or is still running after it was killed."""
        self.state = "stopped"
        self._close_timers()
        if self._child is None:
            self._gone()
        else:
            self._child.kill()

    def received(self, frame: Frame) -> None:
        """Act on a frame from the process."""
        if isinstance(frame, Events):
            self._received(frame)
        elif isinstance(frame, Restarted):
            self._went_on(frame.batch_id)
        elif isinstance(frame, Ready):
            self._loaded()
            if frame.measured:
                self._listener.measured(self.index, frame.measured)
        elif isinstance(frame, StartFailed):
            self._error = frame.error
        elif isinstance(frame, Turn):
            self._take_turn(wanted=frame.wanted)
        elif isinstance(frame, WorkerWaits):
            self._wait(frame.reason)
        elif isinstance(frame, WorkerPlaced):
            self._placed(frame)
        elif isinstance(frame, WorkerLeaves):
            self._leave(frame.reason)

    def refused(self, reason: str, *, unreachable: bool = False) -> None:
        """Try again later, because there can be no process now."""
        self._gone()
        if self.state != "stopped":
            refusal = ModelNotReady if unreachable else ModelError
            self._not_loaded(refusal(f"{self._name}: {reason}"), self._backoff.refused())
            if unreachable:
                self._pool.unreachable(reason)

    def disconnected(self) -> None:
        """Get no more batches: the process has most likely ended."""
        if self.state == READY:
            self._listener.worker_leaves(self.index)

    def _wait(self, reason: str) -> None:
        if reason != self.reason:
            logger.info("%s is waiting for resources: %s", self._name, reason)
        self.reason = reason
        if self._started:  # then it may take as long as it takes; the others serve meanwhile
            self._start_limit.end()

    def _placed(self, at: WorkerPlaced) -> None:
        self.node, self.address, self.gpus, self.actor = at.node, at.address, at.gpus, at.actor
        if at.taken_over:
            logger.info("%s takes over the actor %s, which was detached", self._name, at.actor)
        if self._started:
            self.reason = f"it loads on node {at.node[:8]} ({at.address})"
            self._start_limit.begin()

    def _leave(self, reason: str) -> None:
        if self.state == READY and not self._leaving:
            self._leaving = reason
            self._listener.worker_leaves(self.index)
            self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if self._leaving and not self._batches:
            self.kill(self._leaving)

    def exited(self, reason: str) -> None:
        """Report the end of the process, and start another one, unless the worker is stopped."""
        suspect = any(flight.attempt > 0 for flight in self._batches.values())
        state, self.reason = self.state, reason
        self._gone()
        if state == "stopped":
            return
        if state == "starting" or not self._started:
            error = self._error or ModelError(f"{self._name} did not start: {reason}")
            self._not_loaded(error, self._backoff.failed_to_load())
            return
        self.state = "lost"
        self._listener.worker_lost(self.index, reason)
        self._start_again(self._backoff.died(suspect=suspect))

    @property
    def _name(self) -> str:
        return f"worker {self.index} of {self._launch.name!r}"

    def _loaded(self) -> None:
        if self.state != "starting":
            return
        self.state, self.reason = READY, ""
        self._start_limit.end()
        self._backoff.loaded()
        if self._started:
            self.announce()
        else:
            self._pool.worker_started(self)

    def _take_turn(self, *, wanted: bool) -> None:
        self._turn.end()
        if wanted and self.state == "starting":
            self._start_limit.pause()
            self.reason = WAITS
            self._turn.ask(self._begin_turn)

    def _begin_turn(self) -> None:
        self.reason = ""
        self._start_limit.go_on()
        if self._child is not None:
            self._child.send(encode_control(Turn()))

    def _received(self, events: Events) -> None:
        flight = self._batches.get(events.batch_id)
        if flight is None:  # a process that the model forked has returned into our loop
            self.kill(f"it was ended because it answered batch {events.batch_id}, which it did not have")
            return
        if events.measured:
            self._listener.measured(self.index, events.measured)
        results = None if self._child is None else self._child.results
        if results is not None and results.unsettled_bytes:
            as_values(events, flight.accepts, lent=self._launch.lends)
        if events.final:
            del self._batches[events.batch_id]
            if flight.places is not None and flight.places.blocks:
                flight.places.release()
            if self._backoff.deaths:
                self._backoff.finished()
            if flight.limit is not None:
                flight.limit.close()
            elif self._batches:
                self._limit_predict()
            else:
                self._predict_limit.end()
        else:
            self._went_on(events.batch_id)  # `predict` has yielded
        self._listener.received(self.index, events)
        if self._leaving:
            self._leave_if_idle()

    def _not_loaded(self, error: WeirError, wait: float) -> None:
        if not self._started:  # the caller of `start` gets the error
            self.state, self.reason = "failed", error.message
            self._pool.worker_failed(self, error)
            return
        failures = self._backoff.failures
        often = "" if failures < 2 else f"; {failures} times in a row"
        self.reason = f"{error.message}{often}; it is tried again in {wait:g} s, for as long as the server runs"
        self.state = "failed" if self.keeps_failing else "lost"
        self._listener.worker_lost(self.index, self.reason)
        self._start_again(wait)
        if self.keeps_failing:
            self._pool.worker_failed(self, error)

    def _start_again(self, wait: float) -> None:
        # The listener may have stopped everything when it was notified of the loss.
        if self.state in ("lost", "failed"):
            self.restarts += 1
            self._timer = self._loop.call_later(wait, self.start)

    def _gone(self) -> None:
        self._child = None
        self.node = self.address = self.actor = ""
        self.gpus = []
        self._turn.end()
        self._start_limit.end()
        self._predict_limit.end()
        for flight in self._batches.values():
            if flight.places is not None:
                flight.places.release()
            if flight.limit is not None:
                flight.limit.close()
        self._batches.clear()
        if self.state == "stopped":
            self._close_timers()
            resolve(self.stopped, None)

    def _close_timers(self) -> None:
        self._start_limit.close()
        self._predict_limit.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _limit(self, setting: str, what: str, batch_id: int | None = None) -> TimeLimit:
        """Return a limit of as many seconds as `setting` says, after which the process is killed because of `what`; with a `batch_id`, one for that
        batch, of several that run at once."""
        seconds = getattr(self._launch.settings, setting)
        limit = TimeLimit(self._loop, seconds, lambda: self._too_long(limit, f"{what} {setting}={seconds}", batch_id))
        return limit

    def _went_on(self, batch_id: int) -> None:
        """Have the limit of a batch, which has called `predict` again or yielded, begin again."""
        flight = self._batches.get(batch_id)
        if flight is not None and (flight.limit is not None or batch_id == next(iter(self._batches))):
            self._limit_predict(flight.limit)

    def _limit_predict(self, limit: TimeLimit | None = None) -> None:
        """Have the limit of a batch begin now: its own, or that of the one batch that runs."""
        (limit or self._predict_limit).begin()
        if self.bulk and self.pid is not None:
            self._cpu_times = cpu_times(self.pid)

    def _gave_way(self) -> bool:
        """Return whether a worker of idle priority, which has not run for as long as its batch may, has waited for a CPU during much of the time since the last
        look."""
        seconds = self._launch.settings.predict_timeout
        if seconds is None or not self.bulk or self.pid is None:
            return False
        (began, before), (ran, waited) = self._cpu_times, cpu_times(self.pid)
        self._cpu_times = began, waited
        return waited - before > GAVE_WAY * seconds and ran - began < seconds

    def _too_long(self, limit: TimeLimit, what: str, batch_id: int | None = None) -> None:
        if self._child is None:
            return
        if limit is not self._start_limit and self._gave_way():
            limit.begin()
            return
        # What has arrived by now was in time: perhaps the server was held up, and some loops run timers before they read.
        before = self.state, len(self._batches)
        self._child.receive()
        is_as_before = (self.state, len(self._batches)) == before if batch_id is None else batch_id in self._batches
        if is_as_before and not limit.counting:
            self._child.kill(f"it was ended because {what}")
