"""Runs several models that share one device in virtual time: a real Batcher for each, and the real order of turns; and compares the
orders.

Instants and durations are in seconds.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from heapq import heappop, heappush, merge
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from weir.batching.batcher import Batcher
from weir.batching.settings import BatchingSettings
from weir.batching.workers import SOLVED, SharedWorkers, WaitingTurn
from weir.errors import DeadlineExceeded, SettingsError
from weir.messages import Dispatch, Wakeup
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.decision import Policy
from weir.policy.online.joint import DevicePolicy
from weir.policy.rules import Greedy
from weir.policy.solve.device import DeviceLoad, DeviceTable, device_load, play, variants
from weir.simulation.arrivals import Arrivals, parse_arrivals
from weir.simulation.engine import ServiceTimes, SimulatedRequest

if TYPE_CHECKING:
    from rich.table import Table


PLAYED = 30_000  # requests
TILT, TILTS, WORTH = 2.0**0.5, 4, 0.002  # see `_tilted`
Tables = list[DeviceTable]
NO_BOUND = 1e6  # seconds


def solve_device(loads: Sequence[DeviceLoad], batches: int = 1, *, requests: int = PLAYED, seed: int = 1) -> Tables:
    """Return the tables of models that share a device, in the order of `loads`: of the variants the one that costs least on so many
    requests with Poisson arrivals, with urgencies that are corrected on the same requests. The device runs so many `batches` at once.
    """
    tried = variants(loads, batches)
    total = sum(each.rate for each in loads)
    if len(loads) < 2 or not total:
        return tried[0]
    arrivals = []
    for number, each in enumerate(loads):
        gaps = np.random.default_rng([seed, number]).exponential(1.0, max(1, round(requests * each.rate / total)))
        arrivals.append((np.cumsum(gaps) * 1000.0 / each.rate).tolist() if each.rate else [])

    def cost(tables: Tables) -> float:
        return play(loads, tables, arrivals, batches)

    return _tilted(loads, min(((cost(tables), tables) for tables in tried), key=itemgetter(0)), cost)


def _tilted(loads: Sequence[DeviceLoad], found: tuple[float, Tables], cost_of: Callable[[Tables], float]) -> Tables:
    """Return the tables of `found` (their cost, and they), with the urgencies of each model multiplied by what makes them cost least.

    The urgency of a model says nothing of what its batch costs another that comes meanwhile, so where batches differ much in length, one model's
    is worth more or less than it says. Up to TILTS factors TILT are tried in either direction, as long as each saves the part WORTH.
    """
    cost, tables = found
    ranked = sorted((place for place, each in enumerate(loads) if each.rate), key=lambda place: loads[place].rate)
    for place in ranked[:-1]:  # only ratios count
        for factor in (TILT, 1.0 / TILT):
            before = cost
            for _ in range(TILTS):
                tilted = [*tables]
                tilted[place] = tables[place].tilted(factor)
                trial = cost_of(tilted)
                if trial > cost * (1.0 - WORTH):
                    break
                cost, tables = trial, tilted
            if cost < before:
                break
    return tables


class DeviceModel(NamedTuple):
    """A model of the simulation: its profile, its policy, the instants of its arrivals (ascending), and its bound on waits."""

    profile: Profile
    policy: Policy
    arrivals: Floats
    max_queue_delay: float = 1e6
    timeout: float = 1e9


class SharedRun(NamedTuple):
    """What happened to the requests of one model; arrays by request, in the order of arrival, and by batch.

    Attributes:
        start, end: when the batch of each request began and ended; NaN if its deadline passed before, or could not be met.
        sizes: rows of each batch.
        energy_mj: the energy of all batches.
    """

    arrival: Floats
    start: Floats
    end: Floats
    sizes: NDArray[np.int64]
    energy_mj: float

    @property
    def response_time_ms(self) -> Floats:
        """Response times in ms of the requests that were answered."""
        return 1000.0 * (self.end - self.arrival)[np.isfinite(self.end)]

    def late_share(self, seconds: float) -> float:
        """Return the share of the requests that were not answered within so many seconds of their arrival."""
        return 1.0 - float((self.end - self.arrival <= seconds + 1e-9).mean())


def share(models: Sequence[DeviceModel], order: str, *, workers: int = 1, seed: int = 0) -> list[SharedRun]:
    """Return what happens to each model. `order` is one of batching/workers.py's ORDERS.

    All requests have one row. The same `seed` gives the same service times.
    """
    device = _Device(order)
    for number, each in enumerate(models):
        device.join(each, workers, seed + number)
    device.run(models)
    return [each.result(shared.arrivals) for each, shared in zip(device.users, models, strict=True)]


class _User:
    """One model: its batcher, and what became of its requests."""

    def __init__(self, device: "_Device", model: DeviceModel, seed: int) -> None:
        self.timeout = model.timeout
        size = model.profile.max_batch_size
        settings = BatchingSettings(max_batch_size=size, max_queue_delay=model.max_queue_delay, max_queue_size=1 << 30)
        self.batcher = Batcher(settings, model.policy)
        self._device = device
        self._profile = model.profile
        self._times = ServiceTimes(model.profile, seed)
        self._start, self._end = (np.full(len(model.arrivals), np.nan) for _ in range(2))
        self._sizes: list[int] = []

    @property
    def claim(self) -> int:
        """See WorkerUser."""
        return self.batcher.claim

    @property
    def turn(self) -> WaitingTurn | None:
        """See WorkerUser."""
        return self.batcher.turn

    def worker_away(self, worker: int) -> None:
        """See WorkerUser."""
        self.batcher.worker_away(worker)

    def worker_back(self, worker: int) -> None:
        """See WorkerUser."""
        self.batcher.worker_back(worker)
        self.poll(Wakeup.WORKER)

    def poll(self, wakeup: Wakeup) -> None:
        """Run the batches that are due."""
        for cut in self.batcher.poll(self._device.now, wakeup):
            self._device.began(self, cut, self._times.of(cut))

    def ended(self, cut: Dispatch, began: float, now: float) -> None:
        """Note that a batch is back."""
        self.batcher.finished(cut.batch_id, now)
        index = [cast(SimulatedRequest, request).index for request in cut.requests]
        self._start[index], self._end[index] = began, now
        self._sizes.append(cut.rows)

    def result(self, arrivals: Floats) -> SharedRun:
        """Return what became of the requests."""
        sizes = np.array(self._sizes, dtype=np.int64)
        return SharedRun(arrivals, self._start, self._end, sizes, float(self._profile.energy_mj[sizes - 1].sum()))


class _Device:
    """Workers that all models share, in virtual time."""

    def __init__(self, order: str) -> None:
        self.now = 0.0
        self.users: list[_User] = []
        self._shared: SharedWorkers[_User] = SharedWorkers(order)
        self._ends: list[tuple[float, int, float, _User, Dispatch]] = []
        self._batches = 0

    def join(self, model: DeviceModel, workers: int, seed: int) -> None:
        user = _User(self, model, seed)
        for worker in range(workers):
            user.batcher.worker_ready(worker, 1, 0.0)
        self._shared.add(user)
        self.users.append(user)

    def began(self, user: _User, cut: Dispatch, seconds: float) -> None:
        """Note that a worker begins a batch, which takes so long."""
        self._shared.began(user, cut.worker, self.now)
        self._batches += 1
        heappush(self._ends, (self.now + seconds, self._batches, self.now, user, cut))

    def run(self, models: Sequence[DeviceModel]) -> None:
        """Let all requests arrive, and all batches end."""
        streams = [
            [(at, number, index) for index, at in enumerate(model.arrivals.tolist())]
            for number, model in enumerate(models)
        ]
        for at, number, index in merge(*streams):
            self._advance(at)
            self.now = at
            user = self.users[number]
            with suppress(DeadlineExceeded):  # it could not be met any more
                user.batcher.submit(SimulatedRequest(index, at, user.timeout), at)
            user.poll(Wakeup.ARRIVAL)
        self._advance(np.inf)

    def _advance(self, until: float) -> None:
        """Let everything happen that happens before `until`."""
        while True:
            wakes = [(wake, user) for user in self.users if (wake := user.batcher.next_wakeup) is not None]
            wake, sleeper = min(wakes, key=lambda each: each[0], default=(np.inf, None))
            end = self._ends[0][0] if self._ends else np.inf
            if min(wake, end) >= until:
                return
            if sleeper is not None and wake < end:
                self.now = max(self.now, wake)
                sleeper.batcher.expire(self.now)
                sleeper.poll(Wakeup.TIMER)
            else:
                self._end()

    def _end(self) -> None:
        """Take the next batch back, and offer its worker."""
        self.now, _, began, user, cut = heappop(self._ends)
        self._shared.ends(user, cut.worker, self.now)
        user.ended(cut, began, self.now)
        user.poll(Wakeup.WORKER)
        self._shared.ended(cut.worker, self.now)


@dataclass(frozen=True)
class ModelOutcome:
    """What one model got in one order. Times are in ms; `late_share` counts what was not answered before the deadline."""

    requests: int
    response_time_ms: float
    p99_ms: float
    late_share: float
    batch_rows: float
    share: float  # of the time, in which it has the device
    power_w: float


@dataclass(frozen=True)
class OrdersComparison:
    """The outcomes by order and by model, and what each order costs: the mean response time of all requests and the power, weighted."""

    load: float
    seed: int
    prices: Prices
    outcomes: dict[str, dict[str, ModelOutcome]]
    costs: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as a JSON-able dict."""
        return asdict(self)


def compare_orders(
    profiles: dict[str, Profile], arrivals: Sequence[str], orders: Sequence[str], *, prices: Prices, requests: int = 50_000,
    workers: int = 1, seed: int = 1, warm_up: float = 0.1, deadline: float | None = None, max_queue_delay: float | None = None,
) -> OrdersComparison:  # fmt: skip
    """Return what each of `orders` comes to, all on the same arrivals.

    `arrivals` are those of each model; a load is a share of the device. In the solved order the tables are those for the mean rates; in the others
    no model waits on purpose. Raises SettingsError.
    """
    if len(arrivals) != len(profiles):
        raise SettingsError(
            f"--arrivals: given {len(arrivals)} times for {len(profiles)} profiles; must be given once for each, as in poisson:0.3"
        )
    streams = [
        parse_arrivals(text, capacity=workers * each.max_rate)
        for text, each in zip(arrivals, profiles.values(), strict=True)
    ]
    seconds = requests / sum(each.rate for each in streams)
    instants = [_instants(each, seconds, [seed, place]) for place, each in enumerate(streams)]
    until = min([seconds, *(float(own[-1]) for own, each in zip(instants, streams, strict=True) if each.length)])
    instants = [each[each <= until] for each in instants]
    loads = [
        DeviceLoad(profile, len(own) / until, prices.latency_weight, prices.energy_weight)
        for profile, own in zip(profiles.values(), instants, strict=True)
    ]
    tables = solve_device(loads, workers)
    outcomes, costs = {}, {}
    for order in orders:
        models = [
            DeviceModel(each.profile, _policy(order, table), own, max_queue_delay or NO_BOUND, deadline or 1e9)
            for each, table, own in zip(loads, tables, instants, strict=True)
        ]
        found = share(models, order, workers=workers, seed=seed)
        end = max(until, *(float(np.nanmax(each.end, initial=0.0)) for each in found))
        outcomes[order] = {
            name: _outcome(each, load.profile, warm_up * until, end, deadline)
            for name, each, load in zip(profiles, found, loads, strict=True)
        }
        costs[order] = _cost(list(outcomes[order].values()), prices)
    return OrdersComparison(device_load(loads) / workers, seed, prices, outcomes, costs)


def _instants(arrivals: Arrivals, seconds: float, seed: list[int]) -> Floats:
    if arrivals.rows > 1:
        raise SettingsError(
            f"arrivals={arrivals}: rows={arrivals.rows}: requests of models on a device have one row here"
        )
    count = arrivals.length or int(arrivals.rate * seconds) + 1
    return arrivals.times(np.random.default_rng(seed), count)


def _policy(order: str, table: DeviceTable) -> Any:
    return DevicePolicy(table) if order == SOLVED else Greedy()


def _outcome(run: SharedRun, profile: Profile, begin: float, end: float, deadline: float | None) -> ModelOutcome:
    counts = run.arrival >= begin
    took = 1000.0 * (run.end - run.arrival)[counts]
    answered = took[np.isfinite(took)]
    mean, p99 = (float(answered.mean()), float(np.quantile(answered, 0.99))) if len(answered) else (np.nan, np.nan)
    late = 1.0 - float((took <= 1000.0 * (deadline or np.inf)).mean()) if len(took) else 0.0
    busy = float(profile.service_time_ms[run.sizes - 1].sum()) / 1000.0
    rows = float(run.sizes.mean()) if len(run.sizes) else 0.0
    return ModelOutcome(int(counts.sum()), mean, p99, late, rows, busy / end, run.energy_mj / 1000.0 / end)


def _cost(models: Sequence[ModelOutcome], prices: Prices) -> float:
    answered = [each for each in models if np.isfinite(each.response_time_ms)]
    mean = sum(each.requests * each.response_time_ms for each in answered) / max(
        1, sum(each.requests for each in answered)
    )
    return prices.latency_weight * mean + prices.energy_weight * sum(each.power_w for each in models)


def orders_heading(compared: OrdersComparison) -> str:
    """Return one line that says what was simulated."""
    counted = sum(each.requests for each in next(iter(compared.outcomes.values())).values())
    prices = compared.prices
    return (
        f"load {compared.load:.3g} on one device; cost {prices.latency_weight:g} per ms, {prices.energy_weight:g} per W; "
        f"{counted:,} requests counted, seed {compared.seed}"
    )


def orders_table(compared: OrdersComparison) -> "Table":
    """Return the outcomes as a table, the cheapest order first."""
    from rich.table import Table

    from weir.simulation.report import short  # only a command shows tables

    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("order")
    shown.add_column("model", overflow="fold", min_width=11)
    for column in ("cost", "response ms", "p99 ms", "late %", "batch", "share", "W"):
        shown.add_column(column, justify="right", no_wrap=True)
    for order in sorted(compared.costs, key=lambda each: compared.costs[each]):
        for place, (name, each) in enumerate(compared.outcomes[order].items()):
            head = (order, name, short(compared.costs[order])) if not place else ("", name, "")
            shown.add_row(
                *head,
                short(each.response_time_ms),
                short(each.p99_ms),
                f"{100.0 * each.late_share:.2f}",
                f"{each.batch_rows:.1f}",
                f"{each.share:.0%}",
                short(each.power_w),
            )
    return shown
