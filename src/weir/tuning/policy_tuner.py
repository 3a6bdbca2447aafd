"""Keeps the tables of a solved policy up to date with the present workers, the prices and the service times.

When one of them changes, new tables are needed. One task at a time has the newest request solved, in another process,
and swaps the tables when they are ready. Until then, and whenever solving fails, the old tables stay in force.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from weir.batching.service_time import KindTimes, ServiceTime
from weir.errors import DeadlineExceeded, InvalidRequest, ModelNotReady, SettingsError, WeirError, brief, stopped
from weir.messages import Dispatch, Timing
from weir.model import Model
from weir.policy.cost import Floats, LatencySLO, Prices, Profile, read_profile
from weir.policy.decision import Policy
from weir.policy.online.adaptive import AutoPolicy, SolvedPolicy
from weir.policy.online.drift import BATCHES, Drift, DriftDetector
from weir.policy.solve.bank import Bank
from weir.policy.solve.uneven import UnevenBank, WorkerKind
from weir.telemetry.recorder import SilentObserver
from weir.tuning import SolveRequest, SolvingProcess, UnevenRequest
from weir.tuning.learning import ProfileMaker, StartMeasurement
from weir.workers.executor import Executor, Reserve
from weir.workers.settings import WorkerSettings
from weir.workers.timer import end_tasks, in_background

logger = logging.getLogger("weir")

WEIGHTS = ("latency_weight", "energy_weight")
FIELDS = (*WEIGHTS, "reference_rate", "latency_objective")


def changed_prices(prices: Prices, objective: LatencySLO | None, changes: Any) -> tuple[Prices, LatencySLO | None]:
    """Return `prices` and `objective` with `changes` applied; what they do not name stays.

    `changes` is a mapping of FIELDS to numbers, to a text for `latency_objective` ("p99=20ms"), or to None, which
    removes `reference_rate` or `latency_objective`. Raises InvalidRequest for anything else, SettingsError for a value
    that breaks its rule.
    """
    if not isinstance(changes, Mapping):
        raise InvalidRequest(f"must be an object with some of {', '.join(FIELDS)}; is {brief(changes, 100)}")
    for name, value in changes.items():
        _check_price(name, value)
    numbers = {name: changes.get(name, getattr(prices, name)) for name in (*WEIGHTS, "reference_rate")}
    if "latency_objective" in changes:
        text = changes["latency_objective"]
        objective = None if text is None else LatencySLO.parse(text)
    return Prices(**numbers), objective


def _check_price(name: Any, value: Any) -> None:
    if name not in FIELDS:
        raise InvalidRequest(f"{name}: unknown field; available: {', '.join(FIELDS)}")
    if name == "latency_objective":
        if not isinstance(value, str | None):
            raise InvalidRequest(f"{name}={brief(value, 100)}: must be a text such as p99=20ms, or null")
        return
    if value is None and name not in WEIGHTS:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name}={brief(value, 100)}: must be a number{'' if name in WEIGHTS else ', or null'}")
    if isinstance(value, int) and value.bit_length() > 1000:
        raise SettingsError(f"{name}: must be less than 1e300")


# Seconds. Solving for one worker takes half a second; a promise about latency needs simulations, which take many
# seconds.
LONGEST_CHANGE = 120.0  # for a caller who changes the prices
LONGEST_SOLVE = 600.0  # otherwise
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between a failure and the next try
REST = 10.0  # after drift the solver rests this many times as long as it took, since service times may never settle
TRIALS = 2 * BATCHES  # batches of a size that might be faster; half of them measure it
REMEMBERED = 8  # banks; when a worker comes back, the tables for as many workers are still there

Wanted = SolveRequest | UnevenRequest
Tables = Bank | UnevenBank
Pause = Callable[[float], Awaitable[None]]  # sleeps for that many seconds of the clock


class PolicyUser(Protocol):
    """Shows what a PolicyTuner knows of its service."""

    @property
    def label(self) -> str:
        """The model, for log lines."""

    @property
    def service_time(self) -> ServiceTime:
        """The service times that have been learned since the last start."""

    def policy_changed(self) -> None:
        """Let the policy decide again about all that waits: it has other tables."""


class Tuning(NamedTuple):
    """Says what a PolicyTuner and the measurement at a start know of a service.

    Attributes:
        user: the service.
        workers: of which kinds its workers are.
        max_batch_size: in rows.
        clock: returns seconds.
        pause: sleeps for some seconds of the clock.
        watch: whether the time for which a batch occupies its worker is the worker's alone, so that it can be compared with
            the profile.
    """

    user: PolicyUser
    workers: WorkerSettings
    max_batch_size: int
    clock: Callable[[], float]
    pause: Pause
    watch: bool = True


class KindProfile:
    """Says what is known of the service times of one kind of workers. `maker` makes a profile from batches, if there is none.

    Attributes:
        name: that of the kind; "" if all workers are alike.
        profile: None while it is unknown.
        drift: how many times as much one worker could serve when service times were measured.
    """

    def __init__(self, name: str, maker: ProfileMaker | None) -> None:
        self.name = name
        self.profile: Profile | None = None
        self.drift = 1.0
        self.maker = maker
        self._detector: DriftDetector | None = None

    def take(self, profile: Profile) -> None:
        """Use `profile` from now on."""
        self.profile, self.drift = profile, 1.0
        self._detector = DriftDetector(profile)

    def observe(self, batch: Dispatch) -> Drift | None:
        """Compare the time of a batch with the profile. Return how they differ, once that is certain; the profile then follows."""
        drift = None if self._detector is None else self._detector.observe(batch.rows, batch.seconds)
        if drift is not None:
            self._scale(np.array(drift.factors))
        return drift

    def _scale(self, factors: Floats) -> None:
        assert self.profile is not None and self._detector is not None
        # Energies that were derived from service times change with them.
        derived = self.profile.energy_source in ("time", "stated")
        capacity = self.profile.max_rate
        self.profile = self.profile.scaled(time=factors, energy=factors if derived else 1.0)
        self.drift *= capacity / self.profile.max_rate
        self._detector.compare_with(self.profile)


class PolicyTuner(SilentObserver):
    """Belongs to one service, whose workers and batches it observes. It works between `open` and `close`.

    Args:
        policy: whose tables it keeps. They are for the policy's prices and objective, until these are changed.
        tuning: what it knows of the service.
        maker: returns what makes a profile of service times, if there is none.
        solver: solves the tables.

    Attributes:
        policy, tuning: as given.
        prices, objective: what the tables shall be for.
        kinds: the workers of each kind; a single one if all are alike.
        counts: swaps of tables by reason.
        reason, seconds: the reason of the last swap, and how long solving took.
        failures: the number of failed tries to solve.
        error: why the last try failed; "" if it succeeded.
        solved_for: what the present tables were solved for.
    """

    def __init__(
        self,
        policy: SolvedPolicy,
        tuning: Tuning,
        *,
        maker: Callable[[], ProfileMaker] | None = None,
        solver: SolvingProcess | None = None,
    ) -> None:
        self.policy, self.tuning, settings = policy, tuning, tuning.workers
        self.kinds = [KindProfile(name, None if maker is None else maker()) for name in settings.kind_names or ("",)]
        self._numbers = settings.kind_numbers or (0,)
        self.prices, self.objective = policy.prices, policy.objective
        self.counts: dict[str, int] = {}
        self.reason: str | None = None
        self.seconds: float | None = None
        self.failures = 0
        self.error = ""
        self._user, self._clock, self._pause = tuning.user, tuning.clock, tuning.pause
        self._model = tuning.user.label
        self._solver = solver or SolvingProcess()
        self._banks: OrderedDict[Wanted, Tables] = OrderedDict()
        self._ready: set[int] = set()
        self.solved_for: Wanted | None = None
        self._refused: Wanted | None = None  # the solver has refused it, and would do so again
        self._cause = "workers"
        self._updating: asyncio.Task[None] | None = None
        self._solving: asyncio.Task[Tables] | None = None
        self._opened = False
        self._rested = 0.0  # the instant until which drift alone causes no solving
        if policy.bank is not None:
            bank = policy.bank
            self.kinds[0].take(bank.profile)
            self.solved_for = SolveRequest(bank.profile, self.prices, bank.workers, self.objective)
            self._remember(self.solved_for, bank)

    # The life of a service.

    def measured(self, profile: Profile, kind: int = 0) -> None:
        """Use `profile` for the workers of the kind with this number; none needs to be learned."""
        self.kinds[kind].maker = None
        self.kinds[kind].take(profile)

    @property
    def profile(self) -> Profile | None:
        """The profile of a worker, of the fastest kind; None while that of a kind is unknown."""
        profiles = [each.profile for each in self.kinds if each.profile is not None]
        return max(profiles, key=lambda each: each.max_rate) if len(profiles) == len(self.kinds) else None

    def _kind_of(self, worker: int) -> int:
        return self._numbers[worker % len(self._numbers)]

    def _times_of(self, kind: int) -> ServiceTime:
        times = self._user.service_time
        return times.of[kind] if isinstance(times, KindTimes) else times

    def open(self) -> None:
        """Keep the tables up to date from now on: the service is ready."""
        self._changing = asyncio.Lock()
        self._opened = True
        for number, kind in enumerate(self.kinds):
            if kind.maker is not None:
                self._times_of(number).keep()
        self._update("start")

    async def close(self) -> None:
        """Stop keeping them up to date. No process is left when it returns. Idempotent."""
        self._opened = False
        await end_tasks(self._updating, self._solving)
        await self._solver.close()
        self._ready.clear()

    # Events.

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        """Count the ready workers: the tables shall be for as many."""
        if state == "ready":
            self._ready.add(worker)
        else:
            self._ready.discard(worker)
        self._update("workers")

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Compare the time of a batch with the profile."""
        if not self.tuning.watch or dispatch.gives_way:
            return
        number = self._kind_of(dispatch.worker)
        kind = self.kinds[number]
        if not dispatch.shorter:
            drift = kind.observe(dispatch)
            if drift is not None:
                self._drifted(drift)
        if kind.maker is not None:
            times = self._times_of(number)
            profile = kind.maker.update(times.keep(), times.count)
            if profile is not None:
                kind.take(profile)
                self._update("learned")

    def _drifted(self, drift: Drift) -> None:
        factors = drift.factors
        if drift.tried and len(self.kinds) == 1:
            self.policy.try_size(drift.tried, TRIALS)
        # Only for debugging: while other work runs, this may happen often. `_swap` logs new tables.
        logger.debug(
            "model %r: batches take %.2f to %.2f times as long as before", self._model, min(factors), max(factors)
        )
        self._update("drift")

    async def change(self, changes: Any) -> None:
        """Solve for other prices and swap the tables. Return once they are in force. Several changes run one after
        another.

        `changes` are applied to what is in force: see changed_prices. When it raises, nothing has changed:
        InvalidRequest or SettingsError with the reason, DeadlineExceeded, ModelNotReady or Draining if the service
        does not run.
        """
        if not self._opened:
            raise ModelNotReady(f"model {self._model!r} is not ready: its policy cannot be changed")
        try:
            async with self._changing:
                if not self._opened:
                    raise stopped(f"model {self._model!r}", "this change began")
                prices, objective = changed_prices(self.prices, self.objective, changes)
                check_kinds([each.name for each in self.kinds if each.name], objective)
                if (prices, objective) != (self.prices, self.objective):
                    await end_tasks(self._updating)
                    await self._change(prices, objective)
        finally:
            self._update(self._cause)

    async def _change(self, prices: Prices, objective: LatencySLO | None) -> None:
        request = self._request(prices, objective)
        if request is None and self.profile is not None and len(self.kinds) == 1:  # for the workers that come back
            request = SolveRequest(self.profile, prices, self.solved_for.workers if self.solved_for else 1, objective)
        if request is not None:
            try:
                bank, seconds = await self._bank_for(request, LONGEST_CHANGE)
            except asyncio.CancelledError:
                if self._opened:
                    raise
                raise stopped(f"model {self._model!r}", "the new tables were there") from None
            except TimeoutError:
                raise DeadlineExceeded(
                    f"no new tables within {LONGEST_CHANGE:g} s; the old ones stay in force"
                ) from None
            self._swap(request, bank, "prices", seconds)
        self.prices, self.objective = prices, objective

    # Solving.

    @property
    def solving(self) -> bool:
        """Whether tables are being solved now."""
        return self._solving is not None and not self._solving.done()

    def _wanted(self) -> Wanted | None:
        """Return what the tables should be for; None while there is no profile or no worker."""
        return self._request(self.prices, self.objective)

    def _request(self, prices: Prices, objective: LatencySLO | None) -> Wanted | None:
        counts = Counter(map(self._kind_of, self._ready))
        known = [
            WorkerKind(kind.profile, counts[number], number, kind.name)
            for number, kind in enumerate(self.kinds)
            if kind.profile is not None and counts[number]
        ]
        if not known or self.profile is None:
            return None
        if len(known) == 1:
            return SolveRequest(known[0].profile, prices, known[0].workers, objective)
        fast, slow = sorted(known, key=lambda each: -each.profile.max_rate)
        return UnevenRequest((fast, slow), prices)

    def _update(self, cause: str) -> None:
        """Start solving if the tables should be for something else than they are. `cause` is the reason that is
        counted.
        """
        self._cause = cause
        if self.profile is not None:
            self.policy.expect(self.profile, self.prices)
        if not self._opened or self._changing.locked() or (self._updating is not None and not self._updating.done()):
            return
        if self._wanted() not in (None, self.solved_for, self._refused):
            self._updating = in_background(self._solve_wanted(), "the solution of a policy")

    async def _solve_wanted(self) -> None:
        """Solve the newest request until the tables are for what they should be for."""
        pause = FIRST_PAUSE
        while self._wanted() not in (None, self.solved_for, self._refused):
            rest = self._rested - self._clock()
            if self._cause == "drift" and rest > 0.0:
                await self._pause(rest)
            request, cause = self._wanted(), self._cause
            if request is None:
                return
            try:
                bank, seconds = await self._bank_for(request, LONGEST_SOLVE)
            except (WeirError, TimeoutError) as error:
                self._failed(request, error)
                if request != self._refused:
                    await self._pause(pause)
                    pause = min(2.0 * pause, LONGEST_PAUSE)
                continue
            pause = FIRST_PAUSE
            self._rested = self._clock() + min(REST * seconds, LONGEST_PAUSE)
            if self._wanted() != self.solved_for:  # else it has changed back meanwhile
                self._swap(request, bank, cause, seconds)

    async def _bank_for(self, request: Wanted, limit: float) -> tuple[Tables, float]:
        if request in self._banks:
            self._banks.move_to_end(request)
            return self._banks[request], 0.0
        started = self._clock()
        self._solving = asyncio.create_task(self._solver.solve(request, limit))
        bank = await self._solving
        self._remember(request, bank)
        return bank, self._clock() - started

    def _remember(self, request: Wanted, bank: Tables) -> None:
        self._banks[request] = bank
        if len(self._banks) > REMEMBERED:
            self._banks.popitem(last=False)

    def _swap(self, request: Wanted, bank: Tables, reason: str, seconds: float) -> None:
        if isinstance(bank, UnevenBank):
            self.policy.adopt_kinds(bank)
        else:
            self.policy.adopt(bank)
            if len(self.kinds) > 1:
                self.policy.share(None)
        self.solved_for, self._refused = request, None
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.reason, self.seconds, self.error = reason, seconds, ""
        self._user.policy_changed()
        logger.info(
            "model %r: new tables (%s) for %d workers, solved in %.2f s", self._model, reason, request.workers, seconds
        )

    def _failed(self, request: Wanted, error: Exception) -> None:
        self.failures += 1
        self.error = str(error) or "not solved in time"
        if isinstance(error, SettingsError):
            self._refused = request
        logger.warning("model %r: no new tables, so the policy stays as it is: %s", self._model, self.error)


def check_kinds(kinds: Sequence[str], objective: LatencySLO | None) -> None:
    """Raise SettingsError if workers are of two kinds and the policy has a latency objective."""
    if kinds and objective is not None:
        raise SettingsError(
            f"worker_kinds={list(kinds)}: workers of two kinds are solved for weights, but the policy has a latency "
            "objective; leave one of them out"
        )


def make_tuner(policy: Policy, tuning: Tuning) -> PolicyTuner | None:
    """Return the tuner of `policy`; None if it is not a solved policy of Weir's. Raises SettingsError for a profile file that cannot be
    used, and for a policy that would never have tables.
    """
    if not isinstance(policy, SolvedPolicy):
        return None
    kinds, max_batch_size = tuning.workers.kind_names, tuning.max_batch_size
    if kinds and not (isinstance(policy, AutoPolicy) and policy.profile is None):
        raise SettingsError(
            f"worker_kinds={list(kinds)}: the policy has the times of one kind of workers; use policy=auto without a "
            "profile, which measures each kind"
        )
    if isinstance(policy, AutoPolicy):
        check_kinds(kinds, policy.objective)
        maker = partial(ProfileMaker, max_batch_size, policy.power) if policy.profile is None else None
        tuner = PolicyTuner(policy, tuning, maker=maker)
        if policy.profile is not None:
            read = read_profile(policy.profile, f"policy=auto:profile={policy.profile}")
            tuner.measured(read.up_to(max_batch_size))
        return tuner
    bank = policy.bank
    if bank is None:
        raise SettingsError("policy=SolvedPolicy(): must have a bank; without one, use auto")
    tuner = PolicyTuner(policy, tuning)
    if max_batch_size < bank.profile.max_batch_size:
        tuner.measured(bank.profile.up_to(max_batch_size))
    return tuner


def start_measurement(
    tuner: PolicyTuner, model: type[Model]
) -> Callable[[Executor, Reserve | None], StartMeasurement] | None:
    """Return what makes the measurement of an executor that starts, if the policy measures the model itself and has not yet; else None."""
    if not isinstance(tuner.policy, AutoPolicy) or tuner.policy.profile is not None or tuner.profile is not None:
        return None
    return partial(StartMeasurement, tuner, tuner.policy, model)
