"""For tests of programs that use Weir: a clock and an executor that stand in for the real ones, and a check of policies.

clock, executor = FakeClock(), FakeExecutor(lambda batch: [x * x for x in batch])
async with weir.Service(Square, executor=executor, clock=clock) as service:
    assert await service.infer(3) == 9

`check_policy(MyPolicy())` checks that a policy follows the rules of the contract:

- A policy answers every possible observation. Its response is a Decision with 0 rows or more.
- A wait ends later than now. At the end of a wait the policy dispatches or waits for a later instant; otherwise the
  server would ask it again and again without end.
- The same sequence of observations always gives the same decisions. A policy without a memory gives the same decision
  for the same observation, whatever it was asked in between.
- A policy with a memory has a method `fresh()`. The policy that it returns has observed nothing and shares nothing
  with the one that it came from.

A policy may decide to wait while the service drains: the batcher then dispatches all the same. It also limits all
other waits.
"""

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, product
from math import isfinite, log
from typing import Any

import msgspec

from weir.errors import WeirError
from weir.messages import JSON, MSGPACK, Batch, Block, Events, Reason, Timing
from weir.policy.decision import Decision, Observation, Policy, complete
from weir.workers.executor import Listener, free_index
from weir.workers.local import LocalState

Predict = Callable[[list[Any]], list[Any]]


class FakeClock:
    """A clock that stands still until `advance` is called. The timers of a Service that uses it fire within `advance`."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._sequence = count()

    def __call__(self) -> float:
        """Return the present time in seconds."""
        return self._now

    def call_at(self, when: float, callback: Callable[[], Any]) -> "FakeTimer":
        """Call `callback` when the clock is advanced to the instant `when` or beyond. Return the timer."""
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (when, next(self._sequence), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds`, and fire each timer at its own instant, in order."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            timer.fire()
        self._now = end


class FakeTimer:
    """An armed timer of a FakeClock."""

    def __init__(self, callback: Callable[[], Any]) -> None:
        self._callback: Callable[[], Any] | None = callback

    def cancel(self) -> None:
        """Disarm the timer."""
        self._callback = None

    def fire(self) -> None:
        """Call the callback, unless the timer was cancelled or has fired."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class FakeExecutor:
    """An executor without workers, which records batches and answers them with a function or on the test's command.

    With `predict`, a function from a list of decoded items to a list of responses, each batch is answered in the next turn of the
    event loop. JSON and msgpack payloads are decoded, and responses are encoded as each request accepts them. A response that is a
    WeirError fails only its entry. Without `predict`, the test must call `respond_next`, `reply`, `lose` and `end`.

    Attributes:
        batches: all batches so far, each with its worker.
        pending: those that are not answered yet, the oldest first.
        cancelled: the arguments of each call of `cancel`.
        blocks: the blocks given out by `reserve`.
        give_blocks: whether `reserve` returns a block.
        started, stopped: whether it has been started or stopped.
    """

    def __init__(
        self, predict: Predict | None = None, *, workers: int = 1, places: int = 1, start_error: Exception | None = None
    ) -> None:
        self.batches: list[tuple[int, Batch]] = []
        self.pending: list[tuple[int, Batch]] = []
        self.cancelled: list[tuple[int, int, list[int]]] = []
        self.blocks: list[FakeBlock] = []
        self.give_blocks = False
        self.started = False
        self.stopped = False
        self._predict = predict
        self._places = places
        self._start_error = start_error
        self._states = {index: LocalState(index) for index in range(workers)}
        self._listener: Listener | None = None

    @property
    def sizes(self) -> list[int]:
        """The number of entries of each batch so far."""
        return [len(batch.payloads) for _, batch in self.batches]

    @property
    def payloads(self) -> list[list[Any]]:
        """The payloads of each batch so far."""
        return [batch.payloads for _, batch in self.batches]

    # The Executor protocol.

    async def start(self, listener: Listener) -> None:
        """Report every worker as ready at once, or raise the start error."""
        if self._start_error is not None:
            raise self._start_error
        self._listener = listener
        self.started, self.stopped = True, False
        for worker in self._states:
            self.revive(worker)

    def run(self, worker: int, batch: Batch) -> None:
        """Record the batch, and answer it in the next turn of the event loop if there is a function for that."""
        self.batches.append((worker, batch))
        self.pending.append((worker, batch))
        self._states[worker].in_flight += 1
        if self._predict is not None:
            asyncio.get_running_loop().call_soon(self._respond_now, worker, batch)

    def cancel(self, worker: int, batch_id: int, indices: Sequence[int]) -> None:
        """Record the arguments."""
        self.cancelled.append((worker, batch_id, list(indices)))

    def reserve(self, size_bytes: int) -> Block | None:
        """Return a FakeBlock if `give_blocks` is set."""
        if not self.give_blocks:
            return None
        block = FakeBlock(size_bytes)
        self.blocks.append(block)
        return block

    async def stop(self) -> None:
        """Forget the pending batches."""
        self.stopped = True
        self.pending.clear()
        for state in self._states.values():
            state.state, state.in_flight = "stopped", 0

    async def add_worker(self) -> None:
        """Report one more worker as ready, or raise the start error."""
        if self._start_error is not None:
            raise self._start_error
        worker = free_index(self._states)
        self._states[worker] = LocalState(worker)
        self.revive(worker)

    async def remove_worker(self, worker: int | None = None) -> None:
        """Forget the worker."""
        del self._states[max(self._states) if worker is None else worker]

    def states(self) -> Sequence[LocalState]:
        """Return the state of each worker."""
        return [self._states[worker] for worker in sorted(self._states)]

    def gauges(self) -> dict[str, Any]:
        """Return numbers for metrics."""
        restarts = sum(state.restarts for state in self._states.values())
        return {"arena_bytes": 0, "arena_free_bytes": 0, "restarts": restarts}

    # Called by the test.

    def respond_next(self, predict: Predict) -> None:
        """Answer the oldest pending batch with the result of `predict` for its payloads, which are not decoded."""
        worker, batch = self.pending[0]
        self.reply(worker, whole(batch.batch_id, predict(batch.payloads)))

    def reply(self, worker: int, events: Events) -> None:
        """Report `events` of a batch of `worker`."""
        if events.final:
            self._forget(events.batch_id)
        self.listener.received(worker, events)

    def lose(self, worker: int, reason: str = "killed by the test") -> None:
        """Report that `worker` has died, with all its batches."""
        self.pending = [(owner, batch) for owner, batch in self.pending if owner != worker]
        state = self._states[worker]
        state.state, state.in_flight, state.reason = "lost", 0, reason
        self.listener.worker_lost(worker, reason)

    def revive(self, worker: int) -> None:
        """Report `worker` as ready, for the first time or again."""
        state = self._states[worker]
        state.restarts += state.state == "lost"
        state.state, state.reason = "ready", ""
        self.listener.worker_ready(worker, self._places)

    def end(self, reason: str = "no worker is coming back") -> None:
        """Report that there is no worker and that none can be started; `revive` brings one back."""
        for state in self._states.values():
            state.state, state.reason = "failed", reason
        self.listener.unavailable(reason)

    @property
    def listener(self) -> Listener:
        """The Listener that was given to `start`. Raises RuntimeError before that."""
        if self._listener is None:
            raise RuntimeError("this FakeExecutor has not been started")
        return self._listener

    def _respond_now(self, worker: int, batch: Batch) -> None:
        if self._predict is None or not any(batch is pending for _, pending in self.pending):
            return
        items = [decoded(payload, _nth(batch.content_types, index)) for index, payload in enumerate(batch.payloads)]
        outputs = [encoded(value, _nth(batch.accepts, index)) for index, value in enumerate(self._predict(items))]
        self.reply(worker, whole(batch.batch_id, outputs))

    def _forget(self, batch_id: int) -> None:
        for worker, batch in self.pending:
            if batch.batch_id == batch_id:
                self._states[worker].in_flight -= 1
        self.pending = [(worker, batch) for worker, batch in self.pending if batch.batch_id != batch_id]


class FakeBlock:
    """A Block in ordinary memory, which counts its shares."""

    def __init__(self, size_bytes: int) -> None:
        self.shares = 1
        self._memory = bytearray(size_bytes)

    @property
    def view(self) -> memoryview:
        """The bytes."""
        return memoryview(self._memory)

    def retain(self) -> None:
        """Take a further share."""
        self.shares += 1

    def release(self) -> None:
        """Give a share back. Raises RuntimeError if there is none left."""
        if self.shares == 0:
            raise RuntimeError("a FakeBlock was released more often than retained")
        self.shares -= 1


def whole(batch_id: int, outputs: list[Any]) -> Events:
    """Return the final events of a batch whose entries have these outputs; a WeirError fails its entry."""
    return Events(batch_id, outputs, timing=Timing(0.0, 0.0, 0.0))


def decoded(payload: Any, content_type: str) -> Any:
    """Return the item in `payload`, decoded if it is JSON or msgpack."""
    if isinstance(payload, FakeBlock):
        payload = bytes(payload.view)
    if content_type == JSON:
        return msgspec.json.decode(payload)
    if content_type == MSGPACK:
        return msgspec.msgpack.decode(payload)
    return payload


def encoded(value: Any, accept: str) -> Any:
    """Return `value` encoded for a caller who accepts that content type; errors are returned unchanged."""
    if isinstance(value, WeirError):
        return value
    if accept == JSON:
        return msgspec.json.encode(value)
    if accept == MSGPACK:
        return msgspec.msgpack.encode(value)
    return value


def _nth(types: str | list[str], index: int) -> str:
    return types if isinstance(types, str) else types[index]


# Seconds. At some of them `now - oldest >= delay` and `now >= oldest + delay` disagree because of rounding.
INSTANTS = (0.0, 0.1, 1.1, 1234.5678, 86_400.3, 1_700_000_000.7)
AGES = (0.0, 0.0001, 0.003, 0.1, 7.0)
# The arrival rates of `traffic`, in rows per second; and the golden section, whose multiples have evenly spread
# fractions.
RATES = (0.5, 40.0, 3000.0, 100.0)
GOLDEN = 0.6180339887498949


class BrokenRule(AssertionError):
    """A policy broke a rule. The message has the rule, the observation and the decision."""


def observations() -> Iterator[Observation]:
    """Yield observations of every kind: short and long queues, young and old rows, deadlines that are near, far or
    past.
    """
    sizes = ((1, 1), (1, 64), (7, 64), (63, 64), (64, 64), (65, 64), (5000, 64), (3, 2))
    for now, age, (waiting, largest), draining in product(INSTANTS, AGES, sizes, (False, True)):
        for time_left, (idle, workers) in zip((-1.0, 0.0, 0.002, 30.0), ((1, 1), (1, 4), (4, 4), (2, 1)), strict=True):
            yield Observation(
                now, waiting, now - age, now + time_left, waiting + 10, now, idle, workers, largest, 0.1, draining
            )


def traffic() -> Iterator[Observation]:
    """Yield a sequence of observations on one running clock, with arrival rates that change and pauses.

    It is for policies with a memory. The clock starts once at 0 and once at a present-day epoch time, in seconds.
    """
    for start in (0.0, 1_700_000_000.7):
        now, arrivals = start, 70
        for number in range(300):
            gap = -log((number + 1) * GOLDEN % 1.0) / RATES[number // 75]
            now += gap
            arrivals += 1 + number % 3
            waiting = 1 + number * number % 70
            yield Observation(now, waiting, now - gap, now + 30.0, arrivals, now, 1, 1, 64, 0.1, False)


def check_policy(policy: Policy, seen: Iterable[Observation] | None = None) -> None:
    """Raise BrokenRule at the first rule that `policy` breaks.

    Args:
        policy: the policy to check.
        seen: the observations to check it with. By default `observations()`; for a policy with a memory also
            `traffic()`.
    """
    remembers = complete(policy).remembers
    sequence = list(seen) if seen is not None else [*observations(), *(traffic() if remembers else ())]
    if remembers:
        _check_memory(_fresh(policy), sequence)
        return
    decisions = [_decide(policy, each) for each in sequence]
    for each, decision in zip(sequence, decisions, strict=True):
        _check_shape(each, decision)
        _check_wait(policy, each, decision)
    for each, decision in zip(reversed(sequence), reversed(decisions), strict=True):
        again = _decide(policy, each)
        if again != decision:
            _broken("the same observation gives the same decision", each, f"{decision}, and later {again}")


def _check_memory(policy: Policy, sequence: list[Observation]) -> None:
    history: list[tuple[Observation, Decision]] = []
    for each in sequence:
        decision = _decide(policy, each)
        _check_shape(each, decision)
        history.append((each, decision))
        history += _check_wait(policy, each, decision)
    copies = (_fresh(policy), _fresh(policy))
    for each, decision in history:
        for copy in copies:  # in turn: copies that share state would disturb each other
            again = _decide(copy, each)
            if again != decision:
                both = f"{decision}, and a fresh copy decided {again}"
                _broken("the same sequence of observations gives the same decisions", each, both)


def _fresh(policy: Policy) -> Policy:
    made = complete(policy).fresh()
    if made is policy or not isinstance(made, Policy):
        raise BrokenRule(f"fresh() returns another policy like this one, without its memory: it returned {made!r}")
    return made


def _decide(policy: Policy, seen: Observation) -> Decision:
    try:
        return policy.decide(seen)
    except Exception as error:
        raise BrokenRule(f"a policy answers every observation: for {seen} it raised {error!r}") from error


def _check_shape(seen: Observation, decision: Any) -> None:
    if not isinstance(decision, Decision):
        _broken("a policy returns a Decision", seen, decision)
    if not isinstance(decision.rows, int) or isinstance(decision.rows, bool) or decision.rows < 0:
        _broken("rows is a whole number, 0 or more", seen, decision)
    if not isinstance(decision.reason, Reason):
        _broken("reason is a Reason", seen, decision)
    if decision.limit is not None and (not isinstance(decision.limit, int) or decision.limit < 1):
        _broken("limit is None or a whole number, 1 or more", seen, decision)
    if decision.until is not None and not isfinite(decision.until):
        _broken("until is None or a finite instant", seen, decision)


def _check_wait(policy: Policy, seen: Observation, decision: Decision) -> list[tuple[Observation, Decision]]:
    """Check the end of a wait. Return the further observation that this took and the policy's decision."""
    until = decision.until
    if decision.rows or until is None:
        return []
    if until <= seen.now:
        _broken("a wait ends later than now", seen, decision)
    later = seen._replace(now=until)
    then = _decide(policy, later)
    _check_shape(later, then)
    if not then.rows and then.until is not None and then.until <= until:
        _broken("when the end of a wait has come, the policy dispatches or waits for a later instant", later, then)
    return [(later, then)]


def _broken(rule: str, seen: Observation, decision: Any) -> None:
    raise BrokenRule(f"{rule}: for {seen} it decided {decision}")
