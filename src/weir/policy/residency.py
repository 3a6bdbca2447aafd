"""Decides which models are in memory: a model is loaded when a request comes for it, and leaves when another one needs its room.

A model that leaves has to be loaded again by its next request. What keeping it for a second saves is the rate of its requests times
the time that a load takes; per byte, that is the index by which models stay. GreedyDual-Size (Cao and Irani, "Cost-Aware WWW
Proxy Caching Algorithms", 1997) and Landlord (Young, "On-Line File Caching", 2002) weigh cost by size too, and know of a model's
requests only that the last one is recent. Here its rate is estimated as policies estimate it (online/arrivals.py). A rate alone
keeps models that were popular and forgets that requests come in sessions, so what came lately counts beside it: see RECENT.

A load is for the requests that wait for it, and leaves the queue with the last of them. Callers take turns by the seconds of loads
that they have had. Of what one caller waits for, models in use come back first; the others load in the order of deadlines. Where not
all can be met, those with the fewest requests for a second of loading go last (Moore, "An n job, one machine sequencing algorithm", 1968);
but none for ever, see PASSES. A model in use leaves for one that is asked for more often; for others only now and then, see DISPLACES. So nobody
can evict what others use by asking for much. A model that was loaded for a caller who was told when to come again stays until then.

The caller does the work: it takes the steps that `next_step` returns, and says what came of them.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from operator import sub
from statistics import fmean
from typing import NamedTuple

from weir.config import as_size
from weir.policy.backoff import Backoff
from weir.policy.online.arrivals import Rate

WINDOW_ROWS = 10.0  # mean gaps that the rate of a model is estimated over: its popularity drifts
RECENT = 0.05  # a model whose last request is `s` seconds old counts as if RECENT / s more came per second
SHORTEST_AGE = 1e-3  # seconds
LOADS_WEIGHT = 0.3  # of the newest load in the mean time to load
KNOWN = 5  # requests, at as many instants, from which on the rate of a model is known
IN_USE = 0.1  # a model is in use if its rate times the seconds of its load is more: to load it each time would take this part of the time
DISPLACES = 10.0  # models in use leave for others this many times more rarely than their loads take
LOOKS_AGAIN = 1.0  # seconds until it is seen whether a model is still in use that must stay for that
RETURNS = 60.0  # seconds for which a caller is expected who was refused, and told when to come again
SHORTEST_STAY = 2.0  # seconds that a loaded model stays for a caller who is expected, or as long as its load takes
PASSES = 2  # times as many loads as a caller waits for may begin before one of them; then it goes first


class Presence(StrEnum):
    """The state of a model on demand."""

    AVAILABLE = "available"  # it has not been loaded yet
    WAITING = "waiting"  # for its turn to load, or for room
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"
    EVICTED = "evicted"
    FAILED = "failed"


IN_MEMORY = (Presence.LOADING, Presence.LOADED, Presence.LEAVING)


class Room(NamedTuple):
    """Bytes of the machine's memory and of its devices'."""

    memory: float = 0.0
    gpu_memory: float = 0.0

    def plus(self, other: "Room") -> "Room":
        """Return the sum."""
        return Room(self.memory + other.memory, self.gpu_memory + other.gpu_memory)

    def fits(self, limits: "Room") -> bool:
        """Tell whether neither is more than in `limits`."""
        return self.memory <= limits.memory and self.gpu_memory <= limits.gpu_memory

    def share_of(self, limits: "Room") -> float:
        """Return the part of `limits` that this takes, of both together."""
        return self.memory / limits.memory + self.gpu_memory / limits.gpu_memory


NOTHING = Room()


class Refusal(NamedTuple):
    """Tells why a request is refused, and after how many seconds it may come again (None: unknown)."""

    reason: str
    retry_after: float | None


Key = Hashable  # names a model
Waiters = Mapping[str, float]  # the earliest deadline of the requests that wait for a model, by caller
NOBODY: Waiters = {}
NOT_EXPECTED = ("", -inf)


class NextStep(NamedTuple):
    """Says what to do now: load a model, or first end those that must leave for it."""

    load: Key
    leave: list[Key]


@dataclass
class Resident:
    """Says what is known of a model.

    Attributes:
        declared: what it says that it takes; zeros if it says nothing.
        pinned: whether it stays once it is loaded.
        presence: where it is.
        reason: why it is there; "" if there is nothing to say.
        measured: what it took when it was measured last; None before that.
        load_seconds: the mean time to load it; None before the first load.
        since: when it came into its presence, in seconds.
        waiters: who waits for its load.
        back_at: when callers may come again who were refused as they could not wait; None if none was.
        expected: who has come again then, or during the load, could still not wait, and is expected until this instant.
        passed: the loads that have begun while it waited, each in the turn of a caller who waits for it.
        former: the presence and the reason that it had before it waited.
    """

    declared: Room = NOTHING
    pinned: bool = False
    presence: Presence = Presence.AVAILABLE
    reason: str = ""
    measured: Room | None = None
    load_seconds: float | None = None
    since: float = 0.0
    may_load_at: float = -inf
    backoff: Backoff = field(default_factory=Backoff)
    rate: Rate = field(default_factory=lambda: Rate(WINDOW_ROWS, enough=0))
    arrivals: int = 0
    instants: int = 0  # at which requests have come
    last_arrival: float | None = None
    waiters: Waiters = field(default_factory=dict)
    back_at: float | None = None
    expected: tuple[str, float] = NOT_EXPECTED
    passed: int = 0
    former: tuple[Presence, str] = (Presence.AVAILABLE, "")

    def observe(self, now: float, arrivals: int) -> None:
        """Take note of how many of its rows had ever arrived at the instant `now`."""
        count = arrivals - self.arrivals
        if count <= 0:
            return
        if self.last_arrival is None:
            self.rate.least, self.rate.most = SHORTEST_AGE, inf
        elif now > self.last_arrival:
            self.rate.learn(count, now - self.last_arrival)
        self.arrivals, self.last_arrival = arrivals, now
        self.instants += 1
        if self.presence is Presence.LOADED:
            self.expected = NOT_EXPECTED  # it has come

    def rate_at(self, now: float) -> float:
        """Return the rate at which its requests are expected, in rows per second."""
        if self.last_arrival is None:
            return 0.0
        age = now - self.last_arrival
        return self.rate.after(age) + RECENT / max(age, SHORTEST_AGE)

    def known_rate_at(self, now: float) -> float:
        """Return the same as far as enough requests have come to know it; a burst is not enough."""
        if self.last_arrival is None or self.instants < KNOWN:
            return 0.0
        return self.rate.after(0.0 if self.waiters else now - self.last_arrival)  # who waits may ask no more meanwhile

    def is_back(self, caller: str, left: float, now: float) -> bool:
        """Note that a request was refused that could not wait `left` seconds. Return whether its caller has come again as it was told to before, and is
        expected once more: such requests have the model loaded, too. Who comes while it loads is expected when it is loaded."""
        if self.back_at is None or now > self.back_at + RETURNS:
            self.back_at = now + left
        if now < self.back_at and self.presence is not Presence.LOADING:
            return False
        self.expected = caller, now + left + RETURNS
        return True

    def is_owed(self, now: float) -> bool:
        """Return whether a loaded model was loaded for a caller who has not come yet, and may still come in time."""
        return now < min(self.expected[1], self.since + max(SHORTEST_STAY, self.load_seconds or 0.0))


def why_too_large(own: Room, limits: Room, needed: Room | None = None) -> str:
    """Return why a model that takes `own` cannot stay: with those that stay, it would be `needed`; "" if it can."""
    needed = needed or own
    if needed.fits(limits):
        return ""
    name = "memory" if needed.memory > limits.memory else "gpu_memory"
    taken, total, limit = (as_size(getattr(each, name)) for each in (own, needed, limits))
    name = f"model_{name}"
    others = "" if own == needed else f", {total} with those that stay"
    return f"it takes {taken}{others}, and {name}={limit} is for all models together; raise {name} or pin fewer"


class Residents:
    """All models of a server, the memory that they may take together, and counts of what has happened.

    `limits` are infinite where there is no limit. `at_once` models load side by side. Instants and durations are in seconds.
    """

    def __init__(self, limits: Room, at_once: int = 1) -> None:
        self.limits = limits
        self.models: dict[Key, Resident] = {}
        self.evictions = 0
        self.loads = 0
        self.failures = 0  # of loads
        self.load_seconds = 0.0  # of all loads together
        self._at_once = at_once
        self._present: dict[Key, Resident] = {}  # those in memory
        self._queue: dict[Key, None] = {}  # those that wait, the first first
        # Those that wait, the next first, and whose turn each is; None: is to be found.
        self._order: list[tuple[Key, str]] | None = None
        self._had: dict[str, float] = {}  # seconds of loads by caller, as long as any wait
        self._displaces_at = -inf
        self.step_at: float | None = None  # when there may be a step without anything else happening

    def add(self, name: Key, declared: Room = NOTHING, *, pinned: bool = False) -> Resident:
        """Add a model, or describe a known one again; return it. Then it may be loaded at once, whatever failed before."""
        model = self.models.setdefault(name, Resident())
        model.declared, model.pinned = declared, pinned
        model.may_load_at = -inf
        model.backoff.loaded()
        return model

    def remove(self, name: Key) -> None:
        """Forget a model, which takes no memory any more."""
        self.models.pop(name, None)
        self._present.pop(name, None)
        self._leave_queue(name)

    # Requests.

    def ask(self, name: Key, deadline: float, now: float, caller: str = "") -> Refusal | None:
        """Have the model loaded for a request of `caller` that must have its response by `deadline`. Return why the request cannot wait for that; None
        if it can. A request that cannot wait does not have the model loaded, unless it has come again when it was told to."""
        model = self.models[name]
        if now < model.may_load_at:
            return Refusal(model.reason, None if model.may_load_at == inf else model.may_load_at - now)
        if not model.declared.fits(self.limits):
            model.may_load_at = inf
            self._move(name, Presence.FAILED, now, why_too_large(model.declared, self.limits))
            return Refusal(model.reason, None)
        before, queues = model.waiters, model.presence not in IN_MEMORY
        can_wait = now + (self._load_seconds(model) or 0.0) < deadline  # if the load begins now
        if queues and can_wait and before.get(caller, inf) >= deadline:
            self._wait(name, {**before, caller: deadline}, now)
        left = self.time_to_load(name, now, caller if queues else None)
        if left is None or now + left < deadline:
            return None
        loads = model.is_back(caller, left, now) or before or model.presence is Presence.LOADED
        if queues:
            self._wait(name, before, now)
        if loads:
            return Refusal(f"loading; ready in about {left:.3g} s", left)
        return Refusal(f"not loaded; a request that can wait for {left:.3g} s has it loaded", left)

    def forsaken(self, name: Key, now: float) -> None:
        """Note that no request waits for a model any more."""
        if name in self._queue:
            self._wait(name, NOBODY, now)

    def time_to_load(self, name: Key, now: float, caller: str | None = None) -> float | None:
        """Return in about how many seconds the model is loaded; None if too little is known. One that does not wait goes behind what `caller` waits for."""
        model = self.models[name]
        own = self._load_seconds(model)
        if own is None:
            return None
        if model.presence is Presence.LOADING:
            return max(0.0, model.since + own - now)
        return own + sum(map(self._cost, self._before(name, now, caller))) / self._at_once

    def _before(self, name: Key, now: float, caller: str | None) -> list[Key]:
        waits = name in self._queue
        if not waits and caller is None:
            return []
        loading = [other for other, model in self._present.items() if model.presence is Presence.LOADING]
        order = self._in_order(now)
        last = max((index for index, (_, turn) in enumerate(order, 1) if turn == caller), default=0)
        waiting = [other for other, _ in order]
        return loading[self._at_once - 1 :] + waiting[: waiting.index(name) if waits else last]

    def _load_seconds(self, model: Resident) -> float | None:
        if model.load_seconds is not None:
            return model.load_seconds
        return self.load_seconds / self.loads if self.loads else None

    # Loads.

    def next_step(
        self, now: float, is_idle: Callable[[Key], bool], waiters: Callable[[Key], Waiters]
    ) -> NextStep | None:
        """Return what to do now, if anything. `is_idle` tells whether a model has no request, and `waiters` who waits for its load.

        None that needs little passes one that needs much, unless that one may not have models in use leave. Models in use leave
        last, and those with requests after those without; they finish what they have.
        """
        self.step_at = None
        loading = self._present_in(Presence.LOADING)
        # Who waits counts again when a place is free: to ask takes as long as requests wait.
        if loading >= self._at_once:
            return None
        for name in list(self._queue):
            self._wait(name, waiters(name), now)
        for name, _ in self._in_order(now):
            needed = self._expected(self.models[name])
            if self.used.plus(needed).fits(self.limits):
                return NextStep(name, [])
            staying = self._staying.plus(needed)
            victims = [] if staying.fits(self.limits) else self._victims(staying, now, is_idle)
            if not victims:
                # None is left that could go. What is on its way must be there before it is known that there is no room.
                return None if loading or self._present_in(Presence.LEAVING) else NextStep(name, [])
            if self._may_displace(name, victims, now):
                return NextStep(name, victims)
            self.step_at = min(at for at in (self._displaces_at, now + LOOKS_AGAIN) if at > now)
        return None

    def _may_displace(self, name: Key, victims: list[Key], now: float) -> bool:
        """Return whether `victims` may leave for a model: none is in use, it is asked for more often, or it is time again for one that is not.
        None leaves that was loaded for somebody who has yet to come."""
        if any(self.models[each].is_owed(now) for each in victims):
            return False
        used = [each for each in victims if self._is_used(each, now)]
        if not used or self._known_index(name, now) > max(self._known_index(each, now) for each in used):
            return True
        if now < self._displaces_at:
            return False
        self._displaces_at = now + DISPLACES * sum(map(self._cost, (name, *used)))
        return True

    def _in_order(self, now: float) -> list[tuple[Key, str]]:
        """Return the models that wait in the order in which they load, and the caller whose turn each is: always of the one who has had least."""
        if self._order is None:
            lines = self._lines(now)
            turns = [(self._had[caller], line[-1][0], caller) for caller, line in lines.items()]
            heapify(turns)
            order: dict[Key, str] = {}
            while turns:
                had, _, caller = turns[0]
                _, name = lines[caller].pop()
                if name not in order:
                    order[name] = caller
                    had += self._cost(name)
                if line := lines[caller]:
                    heapreplace(turns, (had, line[-1][0], caller))
                else:
                    heappop(turns)
            self._order = list(order.items())
        return self._order

    def _lines(self, now: float) -> dict[str, list[tuple[float, Key]]]:
        """Return what each caller waits for, the next last, with deadlines. New callers have had as much as the one who has had least."""
        lines: dict[str, list[tuple[float, Key]]] = {}
        for name in self._queue:
            for caller, deadline in self.models[name].waiters.items():
                lines.setdefault(caller, []).append((deadline, name))
        least = min((had for caller, had in self._had.items() if caller in lines), default=0.0)
        self._had = {caller: max(least, self._had.get(caller, 0.0)) for caller in lines}
        return {caller: self._line(line, len(lines) / self._at_once, now) for caller, line in lines.items()}

    def _line(self, waiting: list[tuple[float, Key]], share: float, now: float) -> list[tuple[float, Key]]:
        """Return `waiting`, the next last: what others have passed too often, what is in use, the rest in the order of deadlines, and last the least
        worth a second of loading of those that keep others from theirs. A load takes `share` times its seconds."""
        passed = {name: count for _, name in waiting if (count := self.models[name].passed) >= PASSES * len(waiting)}
        waiting.sort(key=lambda each: (-passed.get(each[1], 0), not self._is_used(each[1], now), each[0]))
        kept: list[tuple[float, float, int]] = []
        late, end = set[int](), now
        for index, (deadline, name) in enumerate(waiting):
            cost = share * (self._load_seconds(self.models[name]) or 0.0)
            end += cost
            if name not in passed:
                heappush(kept, (self.models[name].known_rate_at(now) / (cost or 1.0), -index, index))
            while end > deadline and kept:
                late.add(dropped := heappop(kept)[2])
                end -= share * (self._load_seconds(self.models[waiting[dropped][1]]) or 0.0)
        order = sorted(range(len(waiting)), key=lambda index: (index in late, index), reverse=True)
        return [waiting[index] for index in order]

    def _victims(self, used: Room, now: float, is_idle: Callable[[Key], bool]) -> list[Key]:
        """Return which models must leave so that `used` fits: those of the smallest index, without those that need not go after all."""
        loaded = [name for name, each in self._present.items() if each.presence is Presence.LOADED and not each.pinned]
        loaded.sort(
            key=lambda name: (
                self.models[name].is_owed(now),
                self._is_used(name, now),
                not is_idle(name),
                self.index(name, now),
                self.models[name].last_arrival or -inf,
            ),
        )
        chosen: list[Key] = []
        for name in loaded:
            if used.fits(self.limits):
                break
            chosen.append(name)
            used = Room(*map(sub, used, self._expected(self.models[name])))
        for name in reversed(chosen[:-1]):
            with_it = used.plus(self._expected(self.models[name]))
            if with_it.fits(self.limits):
                chosen.remove(name)
                used = with_it
        return chosen

    def index(self, name: Key, now: float) -> float:
        """Return by how much it is better to keep a loaded model than others: rate times seconds to load, per part of the memory."""
        return self._index(name, self.models[name].rate_at(now))

    def _index(self, name: Key, rate: float) -> float:
        model = self.models[name]
        size = self._expected(model).share_of(self.limits)
        return rate * (self._load_seconds(model) or 0.0) / size if size else inf

    def _known_index(self, name: Key, now: float) -> float:
        return self._index(name, self.models[name].known_rate_at(now))

    def _is_used(self, name: Key, now: float) -> bool:
        """Return whether a model is asked for so often that it should not leave for one that is not."""
        model = self.models[name]
        return model.known_rate_at(now) * (model.load_seconds or 0.0) > IN_USE

    def _cost(self, name: Key) -> float:
        """Return what a load takes of its caller's share."""
        return self._load_seconds(self.models[name]) or 1.0

    def begin(self, name: Key, now: float) -> None:
        """Note that the load has begun."""
        caller = next((caller for each, caller in self._in_order(now) if each == name), None)
        if caller is not None:
            self._had[caller] += self._cost(name)
            for other in self._queue:
                self.models[other].passed += caller in self.models[other].waiters
        self._leave_queue(name)
        model = self.models[name]
        model.back_at, model.passed = None, 0
        self._move(name, Presence.LOADING, now)

    def loaded(self, name: Key, taken: Room, now: float) -> bool:
        """Note that the model is loaded and was measured. Return whether it may stay: it must fit without those that may leave."""
        model = self.models[name]
        seconds = now - model.since
        self.loads += 1
        self.load_seconds += seconds
        before = model.load_seconds
        model.load_seconds = seconds if before is None else before + LOADS_WEIGHT * (seconds - before)
        model.backoff.loaded()
        model.measured = taken
        self._move(name, Presence.LOADED, now)
        needed = self._expected(model)
        for each, other in self._present.items():
            if other.pinned and each != name:
                needed = needed.plus(self._expected(other))
        if model.pinned or needed.fits(self.limits):
            return True
        model.may_load_at = inf
        model.reason = why_too_large(self._expected(model), self.limits, needed)
        return False

    def failed(self, name: Key, reason: str, now: float) -> float:
        """Note that the load failed. Return for how many seconds requests are refused."""
        model = self.models[name]
        self.failures += 1
        pause = model.backoff.failed_to_load()
        model.may_load_at = now + pause
        self._move(name, Presence.FAILED, now, reason)
        return pause

    # Leaving.

    def leave(self, name: Key, now: float, reason: str) -> None:
        """Note that the model ends now, and that its memory is free when it has ended."""
        self.evictions += 1
        self._move(name, Presence.LEAVING, now, reason)

    def left(self, name: Key, now: float, waiters: Waiters = NOBODY) -> None:
        """Note that it has ended. It is loaded again for those that wait for it since."""
        model = self.models[name]
        if model.may_load_at == inf:
            self._move(name, Presence.FAILED, now, model.reason)
            return
        self._move(name, Presence.EVICTED, now, model.reason)
        self._wait(name, waiters, now)

    def measure(self, taken: dict[Key, Room], now: float, is_idle: Callable[[Key], bool]) -> list[Key]:
        """Note what loaded models take now. Return those that must leave since together they take more than there is."""
        for name, room in taken.items():
            self.models[name].measured = room
        staying = self._staying
        return [] if staying.fits(self.limits) else self._victims(staying, now, is_idle)

    # Memory.

    @property
    def used(self) -> Room:
        """The memory that the models in memory take, or are expected to."""
        return self._sum(IN_MEMORY)

    @property
    def _staying(self) -> Room:
        return self._sum((Presence.LOADING, Presence.LOADED))

    def _sum(self, presences: tuple[Presence, ...]) -> Room:
        total = NOTHING
        for model in self._present.values():
            if model.presence in presences:
                total = total.plus(self._expected(model))
        return total

    def _present_in(self, presence: Presence) -> int:
        return sum(model.presence is presence for model in self._present.values())

    def count(self, *presences: Presence) -> int:
        """Return how many models are in one of `presences`."""
        return sum(model.presence in presences for model in self.models.values())

    def _expected(self, model: Resident) -> Room:
        """Return what the model takes: as measured, or declared if that is more; before both, what others take on average."""
        if model.measured is not None:
            return Room(*map(max, model.measured, model.declared))
        if any(model.declared):
            return model.declared
        measured = (other.measured for other in self.models.values() if other.measured is not None)
        return Room(*map(fmean, zip(*measured, strict=True)))

    def _wait(self, name: Key, waiters: Waiters, now: float) -> None:
        """Note who waits for the load of a model that is not in memory; without anybody it leaves the queue."""
        model = self.models[name]
        if not waiters and now < model.expected[1]:
            waiters = dict([model.expected])
        if not waiters and model.waiters:
            self._leave_queue(name)
            self._move(name, model.former[0], now, model.former[1])
        elif waiters and not model.waiters:
            model.former = model.presence, model.reason
            self._move(name, Presence.WAITING, now)
            self._queue[name] = None
        if waiters != model.waiters:
            model.waiters, self._order = waiters, None

    def _leave_queue(self, name: Key) -> None:
        self._queue.pop(name, None)
        self._order = None
        if model := self.models.get(name):
            model.waiters = NOBODY

    def _move(self, name: Key, presence: Presence, now: float, reason: str = "") -> None:
        model = self.models[name]
        model.presence, model.since, model.reason = presence, now, reason
        if presence in (Presence.LEAVING, Presence.FAILED):
            model.expected = NOT_EXPECTED
        if presence in IN_MEMORY:
            self._present[name] = model
        else:
            self._present.pop(name, None)
