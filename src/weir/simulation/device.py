"""Runs several models that share one device in virtual time: a real Batcher for each, and the real order of turns; and compares the
orders.

Instants and durations are in seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from heapq import merge
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from weir.batching.settings import BatchingSettings
from weir.batching.workers import SOLVED, SharedWorkers
from weir.errors import SettingsError
from weir.messages import Dispatch
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Floats, Profile
from weir.policy.decision import Policy
from weir.policy.online.joint import DevicePolicy
from weir.policy.rules import Greedy
from weir.policy.solve.device import DeviceLoad, DeviceTable, device_load, play, variants
from weir.simulation.arrivals import Arrivals, parse_arrivals
from weir.simulation.engine import (
    Engine,
    Run,
    ServiceTimes,
    SimulatedModel,
    SimulatedRequest,
    SimulatedWorkers,
    Whole,
)
from weir.simulation.results import ResponseFigures, response_figures

PLAYED = 30_000  # requests
TILT, TILTS, WORTH = 2.0**0.5, 4, 0.002  # see `_tilted`
Tables = list[DeviceTable]
NO_BOUND = 1e6  # seconds


def solve_device(loads: Sequence[DeviceLoad], batches: int = 1, *, requests: int = PLAYED, seed: int = 1) -> Tables:
    """Return the tables of models that share a device, in the order of `loads`: of the variants the one that costs least on that many
    requests with Poisson arrivals, with urgencies that are corrected on the same requests. The device runs `batches` batches at once.
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
    ranked = sorted((index for index, each in enumerate(loads) if each.rate), key=lambda index: loads[index].rate)
    for index in ranked[:-1]:  # only ratios count
        for factor in (TILT, 1.0 / TILT):
            before = cost
            for _ in range(TILTS):
                tilted = [*tables]
                tilted[index] = tables[index].tilted(factor)
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


class DeviceWorkers(SimulatedWorkers):
    """Workers that several models share, one after another; `order` is one of batching/workers.py's ORDERS."""

    def __init__(self, order: str, ready: int) -> None:
        super().__init__(ready)
        self._shared: SharedWorkers[SimulatedModel] = SharedWorkers(order)

    def serve(self, model: SimulatedModel) -> None:
        """See SimulatedWorkers."""
        super().serve(model)
        self._shared.add(model)

    def begin(self, model: SimulatedModel, cut: Dispatch) -> None:
        """See SimulatedWorkers."""
        self._shared.began(model, cut.worker, model.engine.now)
        super().begin(model, cut)

    def end(self, model: SimulatedModel, cut: Dispatch) -> None:
        """See SimulatedWorkers."""
        self._shared.ends(model, cut.worker, model.engine.now)
        super().end(model, cut)
        self._shared.ended(cut.worker, model.engine.now)


def share(models: Sequence[DeviceModel], order: str, *, workers: int = 1, seed: int = 0) -> list[Run]:
    """Return what happens to each model. `order` is one of batching/workers.py's ORDERS.

    All requests have one row. The same `seed` gives the same service times.
    """
    engine, device, wholes = Engine(), DeviceWorkers(order, workers), [Whole() for _ in models]
    for number, (each, whole) in enumerate(zip(models, wholes, strict=True)):
        size = each.profile.max_batch_size
        settings = BatchingSettings(max_batch_size=size, max_queue_delay=each.max_queue_delay, max_queue_size=1 << 30)
        times = ServiceTimes(each.profile, seed + number)
        SimulatedModel(engine, settings, each.policy, times, whole, device, timeout=each.timeout)
    streams = [
        [(at, number, index) for index, at in enumerate(model.arrivals.tolist())] for number, model in enumerate(models)
    ]
    for at, number, index in merge(*streams):
        engine.models[number].accept([SimulatedRequest(index, at, models[number].timeout)])
    engine.finish()
    return [whole.run(each.profile, workers, each.arrivals) for whole, each in zip(wholes, models, strict=True)]


@dataclass(frozen=True)
class ModelOutcome(ResponseFigures):
    """Says what one model got in one order."""

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

    def heading(self) -> str:
        """Return one line that says what was simulated."""
        counted = sum(each.requests for each in next(iter(self.outcomes.values())).values())
        return (
            f"load {self.load:.3g} on one device; cost {self.prices.latency_weight:g} per ms, {self.prices.energy_weight:g} per W; "
            f"{counted:,} requests counted, seed {self.seed}"
        )

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
    instants = [_instants(each, seconds, [seed, index]) for index, each in enumerate(streams)]
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
            name: _outcome(each, warm_up * until, end, deadline) for name, each in zip(profiles, found, strict=True)
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


def _outcome(run: Run, begin: float, end: float, deadline: float | None) -> ModelOutcome:
    sizes = run.batches.rows
    busy = float(run.profile.service_time_ms[sizes - 1].sum()) / 1000.0
    rows = float(sizes.mean()) if len(sizes) else 0.0
    figures = vars(response_figures(run, begin, deadline))
    return ModelOutcome(**figures, batch_rows=rows, share=busy / end, power_w=run.energy_mj / 1000.0 / end)


def _cost(models: Sequence[ModelOutcome], prices: Prices) -> float:
    answered = [each for each in models if np.isfinite(each.response_time_ms)]
    mean = sum(each.requests * each.response_time_ms for each in answered) / max(
        1, sum(each.requests for each in answered)
    )
    return prices.latency_weight * mean + prices.energy_weight * sum(each.power_w for each in models)
