"""Keeps the tables of a solved policy up to date with the present workers, the prices and the service times.

When one of them changes, new tables are needed. One task at a time has the newest request solved, in another process,
and swaps the tables when they are ready. Until then, and whenever solving fails, the old tables stay in force.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

import numpy as np

from weir.batching.service_time import ServiceTime
from weir.errors import DeadlineExceeded, Draining, InvalidRequest, ModelNotReady, SettingsError, WeirError, brief
from weir.messages import Dispatch, Timing
from weir.model import Model
from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import Profile, read_profile
from weir.policy.decision import Policy
from weir.policy.online.adaptive import AutoPolicy, SolvedPolicy
from weir.policy.online.drift import BATCHES, Drift, DriftDetector
from weir.policy.solve.bank import Bank
from weir.telemetry.recorder import SilentObserver
from weir.tuning.learning import ProfiledExecutor, ProfileMaker
from weir.tuning.solver import SolveRequest, SolvingProcess, end_tasks
from weir.workers.executor import Executor
from weir.workers.settings import WorkerSettings

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
REST = 10.0  # after drift the solver rests so many times as long as it took, since service times may never settle
TRIALS = 2 * BATCHES  # batches of a size that might be faster; half of them measure it
REMEMBERED = 8  # banks; when a worker comes back, the tables for as many workers are still there

Solve = Callable[[SolveRequest, float], Coroutine[Any, Any, Bank]]
Pause = Callable[[float], Awaitable[None]]  # sleeps for so many seconds of the clock


class PolicyUser(Protocol):
    """What a PolicyTuner knows of its service."""

    @property
    def label(self) -> str:
        """The model, for log lines."""

    @property
    def service_time(self) -> ServiceTime:
        """What is known of the time of batches since the last start."""

    def policy_changed(self) -> None:
        """Let the policy decide again about all that waits: it has other tables."""


class PolicyTuner(SilentObserver):
    """Belongs to one service, whose workers and batches it observes. It works between `open` and `close`.

    Args:
        user: the service.
        policy: whose tables it keeps.
        prices, objective: what they are solved for.
        clock: returns seconds.
        pause: sleeps for so many seconds of the clock.
        maker: makes a profile of service times, if there is none.
        solve: returns a bank, or raises, within so many seconds; by default in another process.
        watch: whether the time for which a batch occupies its worker is the worker's alone, so that it can be compared with
            the profile.

    Attributes:
        policy: the policy.
        profile, prices, objective: what the tables shall be for.
        drift: how many times as much one worker could serve when service times were measured.
        counts: swaps of tables by reason.
        reason, seconds: the reason of the last swap, and how long solving took.
        failures: the number of failed tries to solve.
        error: why the last try failed; "" if it succeeded.
    """

    def __init__(
        self, user: PolicyUser, policy: SolvedPolicy, prices: Prices, objective: LatencySLO | None, *,
        clock: Callable[[], float], pause: Pause, maker: ProfileMaker | None = None, solve: Solve | None = None,
        watch: bool = True,
    ) -> None:  # fmt: skip
        self.policy = policy
        self.profile: Profile | None = None
        self.drift = 1.0
        self.prices = prices
        self.objective = objective
        self.counts: dict[str, int] = {}
        self.reason: str | None = None
        self.seconds: float | None = None
        self.failures = 0
        self.error = ""
        self._user = user
        self._model = user.label
        self._maker = maker
        self._detector: DriftDetector | None = None
        self._watch = watch
        self._process = SolvingProcess()
        self._solve = solve or self._process.solve
        self._clock = clock
        self._pause = pause
        self._banks: OrderedDict[SolveRequest, Bank] = OrderedDict()
        self._ready: set[int] = set()
        self._solved_for: SolveRequest | None = None
        self._refused: SolveRequest | None = None  # the solver has refused it, and would do so again
        self._cause = "workers"
        self._updating: asyncio.Task[None] | None = None
        self._solving: asyncio.Task[Bank] | None = None
        self._opened = False
        self._rested = 0.0  # the instant until which drift alone causes no solving
        if policy.bank is not None:
            bank = policy.bank
            self._take_profile(bank.profile)
            self._solved_for = SolveRequest(bank.profile, prices, bank.workers, objective)
            self._remember(self._solved_for, bank)

    # The life of a service.

    def measured(self, profile: Profile) -> None:
        """Use `profile` for the tables; none needs to be learned."""
        self._maker = None
        self._take_profile(profile)

    def _take_profile(self, profile: Profile) -> None:
        self.profile, self.drift = profile, 1.0
        self._detector = DriftDetector(profile)

    def open(self) -> None:
        """Keep the tables up to date from now on: the service is ready."""
        self._changing = asyncio.Lock()
        self._opened = True
        if self._maker is not None:
            self._user.service_time.keep()
        self._update("start")

    async def close(self) -> None:
        """Stop keeping them up to date. No process is left when it returns. Idempotent."""
        self._opened = False
        await end_tasks(self._updating, self._solving)
        await self._process.close()
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
        if not self._watch or dispatch.gives_way:
            return
        if self._detector is not None and not dispatch.shorter:
            drift = self._detector.observe(dispatch.rows, dispatch.seconds)
            if drift is not None:
                self._drifted(drift)
        if self._maker is not None:
            times = self._user.service_time
            profile = self._maker.update(times.keep(), times.count)
            if profile is not None:
                self._take_profile(profile)
                self._update("learned")

    def _drifted(self, drift: Drift) -> None:
        assert self.profile is not None and self._detector is not None
        # Energies that were derived from service times change with them.
        derived = self.profile.energy_source in ("time", "stated")
        capacity, factors = self.profile.max_rate, np.array(drift.factors)
        self.profile = self.profile.scaled(time=factors, energy=factors if derived else 1.0)
        self.drift *= capacity / self.profile.max_rate
        self._detector.compare_with(self.profile)
        if drift.tried:
            self.policy.try_size(drift.tried, TRIALS)
        # Only for debugging: while other work runs, this may happen often. `_swap` logs new tables.
        logger.debug(
            "model %r: batches take %.2f to %.2f times as long as before", self._model, factors.min(), factors.max()
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
                    raise Draining(f"model {self._model!r} was stopped before this change began")
                prices, objective = changed_prices(self.prices, self.objective, changes)
                if (prices, objective) != (self.prices, self.objective):
                    await end_tasks(self._updating)
                    await self._change(prices, objective)
        finally:
            self._update(self._cause)

    async def _change(self, prices: Prices, objective: LatencySLO | None) -> None:
        if self.profile is not None:
            workers = len(self._ready) or (self._solved_for.workers if self._solved_for else 1)
            request = SolveRequest(self.profile, prices, workers, objective)
            try:
                bank, seconds = await self._bank_for(request, LONGEST_CHANGE)
            except asyncio.CancelledError:
                if self._opened:
                    raise
                raise Draining(f"model {self._model!r} was stopped before the new tables were there") from None
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

    def _wanted(self) -> SolveRequest | None:
        """Return what the tables should be for; None while there is no profile or no worker."""
        if self.profile is None or not self._ready:
            return None
        return SolveRequest(self.profile, self.prices, len(self._ready), self.objective)

    def _update(self, cause: str) -> None:
        """Start solving if the tables should be for something else than they are. `cause` is the reason that is
        counted.
        """
        self._cause = cause
        if self.profile is not None:
            self.policy.expect(self.profile, self.prices)
        if not self._opened or self._changing.locked() or (self._updating is not None and not self._updating.done()):
            return
        if self._wanted() not in (None, self._solved_for, self._refused):
            self._updating = asyncio.create_task(self._solve_wanted())

    async def _solve_wanted(self) -> None:
        """Solve the newest request until the tables are for what they should be for."""
        pause = FIRST_PAUSE
        while self._wanted() not in (None, self._solved_for, self._refused):
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
            if self._wanted() != self._solved_for:  # else it has changed back meanwhile
                self._swap(request, bank, cause, seconds)

    async def _bank_for(self, request: SolveRequest, limit: float) -> tuple[Bank, float]:
        if request in self._banks:
            self._banks.move_to_end(request)
            return self._banks[request], 0.0
        started = self._clock()
        self._solving = asyncio.create_task(self._solve(request, limit))
        bank = await self._solving
        self._remember(request, bank)
        return bank, self._clock() - started

    def _remember(self, request: SolveRequest, bank: Bank) -> None:
        self._banks[request] = bank
        if len(self._banks) > REMEMBERED:
            self._banks.popitem(last=False)

    def _swap(self, request: SolveRequest, bank: Bank, reason: str, seconds: float) -> None:
        self.policy.adopt(bank)
        self._solved_for, self._refused = request, None
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.reason, self.seconds, self.error = reason, seconds, ""
        self._user.policy_changed()
        logger.info(
            "model %r: new tables (%s) for %d workers, solved in %.2f s", self._model, reason, request.workers, seconds
        )

    def _failed(self, request: SolveRequest, error: Exception) -> None:
        self.failures += 1
        self.error = str(error) or "not solved in time"
        if isinstance(error, SettingsError):
            self._refused = request
        logger.warning("model %r: no new tables, the policy stays as it is: %s", self._model, self.error)


def make_tuner(
    user: PolicyUser, policy: Policy, max_batch_size: int, *, clock: Callable[[], float], pause: Pause, watch: bool
) -> PolicyTuner | None:
    """Return the tuner of `policy`; None if it is not a solved policy of Weir's. For the other arguments, see PolicyTuner.

    Raises SettingsError for a profile file that cannot be used, and for a policy that would never have tables.
    """
    if not isinstance(policy, SolvedPolicy):
        return None
    if isinstance(policy, AutoPolicy):
        maker = ProfileMaker(max_batch_size, policy.power) if policy.profile is None else None
        tuner = PolicyTuner(
            user, policy, policy.prices, policy.objective, clock=clock, pause=pause, maker=maker, watch=watch
        )
        if policy.profile is not None:
            read = read_profile(policy.profile, f"policy=auto:profile={policy.profile}")
            tuner.measured(read.up_to(max_batch_size))
        return tuner
    bank = policy.bank
    if bank is None:
        raise SettingsError("policy=SolvedPolicy(): must have a bank; without one, use auto")
    tuner = PolicyTuner(user, policy, bank.prices, bank.objective, clock=clock, pause=pause, watch=watch)
    if max_batch_size < bank.profile.max_batch_size:
        tuner.measured(bank.profile.up_to(max_batch_size))
    return tuner


def with_profile(
    executor: Executor, tuner: PolicyTuner, model: type[Model], settings: WorkerSettings, max_batch_size: int
) -> Executor:
    """Return an executor that is measured while it starts, if the policy measures the model itself; else `executor`."""
    if not isinstance(tuner.policy, AutoPolicy) or tuner.policy.profile is not None:
        return executor
    return ProfiledExecutor(executor, tuner, tuner.policy, model, settings, max_batch_size)
