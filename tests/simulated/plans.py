"""What a seed stands for: the plan of a simulated server, its models, its clients, and what befalls it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.frontends.http.sockets import FILES
from tests.simulated.arenas import ArenaPlan, draw_arenas
from tests.simulated.calls import REQUESTS_OF_STREAM
from tests.simulated.catalog import KINDS, CatalogPlan, draw_catalog
from tests.simulated.channels import FIRST, PAUSES
from tests.simulated.clocks import Jump, draw_jumps, draw_leaps
from tests.simulated.devices import DevicePlan, draw_device
from tests.simulated.models import Items, Tensors
from tests.simulated.probing import INTERVALS
from tests.simulated.scaling import RangePlan, draw_ranges
from tests.simulated.solving import SolvingPlan, draw_solving
from tests.simulated.themes import CHANNELS, OF_LINKS, Theme, draw_theme, some
from tests.simulated.workers import WorkerPlan
from tests.simulated.zeromq import draw_settings

from weir.model import Model

DRAIN = 60.0
LATENCIES = (0.0, 0.0, 0.0002, 0.01)  # seconds
MODELS: dict[str, type[Model]] = {"items": Items, "tensors": Tensors}


@dataclass(frozen=True)
class Fault:
    """Something that happens to the server at an instant: kill, reload, add or remove, of a model."""

    at: float
    kind: str
    model: str


@dataclass
class Plan:
    """What a seed stands for. Only `clients` and `faults` are left out of it to find a smaller plan that fails, too."""

    seed: int
    theme: Theme
    http: dict[str, Any]
    services: dict[str, dict[str, Any]]
    workers: dict[str, WorkerPlan]
    clients: list[int]
    faults: list[Fault]
    turns: int
    pace: float
    quiet: float  # seconds of a pause, on average: 0 for a plan that has none
    wrong: float
    timeout: float
    drains_at: float | None = None
    coarse: bool = False
    probes: float = 1000.0  # seconds between two probes of readiness
    knows_words: bool = False  # whether texts are tokenized at once
    stream_requests: int = 0  # of one stream over gRPC that may be under way; 0: there is no gRPC
    fronts: int = 0  # how many processes have the connections; 0 for the server's own
    catalog: CatalogPlan | None = None  # the models that are loaded and unloaded
    arenas: ArenaPlan | None = None  # of each model
    device: DevicePlan | None = None  # on which models take turns
    ranges: dict[str, RangePlan] = field(default_factory=dict)  # of the models whose number of workers follows the load
    solving: dict[str, SolvingPlan] = field(default_factory=dict)  # of the models whose policy is solved
    zeromq: dict[str, Any] = field(default_factory=dict)  # its settings; none: it is not served
    jumps: list[Jump] = field(default_factory=list)  # of the wall clock
    leaps: list[Jump] = field(default_factory=list)  # of all clocks
    kept_faults: list[int] = field(default_factory=list)


def draw_plan(seed: int) -> Plan:
    """Return the plan of `seed`."""
    theme = draw_theme(seed)
    draw = random.Random(f"{seed} plan")
    workers, services = {}, {}
    timeout = draw.choice((30.0, 30.0, 3.0, 0.5))
    for name in MODELS:
        base = draw.choice((0.001, 0.005, 0.05, 0.5))
        workers[name] = WorkerPlan(
            workers=draw.choice((1, 1, 2, 4)), places=draw.choice((1, 2, 2)), base=base, per_row=base / 10, spread=draw.choice((0.0, 0.5)),
            start=draw.choice((0.0, 0.3, 3.0)), hang_limit=draw.choice((1.0, 5.0)), failing_starts=draw.choice((0.0, 0.0, 0.5)),
        )  # fmt: skip
        services[name] = {
            "max_batch_size": draw.choice((1, 4, 16, 64)), "max_queue_size": draw.choice((8, 64, 1024)), "timeout": timeout,
            "policy": draw.choice(("greedy", "greedy", "full", "size-or-delay:delay=20ms", "control-limit:1")),
            "small_request_size": draw.choice((0, 16)), "drain_timeout": DRAIN,
        }  # fmt: skip
    _draw_workers(random.Random(f"{seed} workers"), workers, services)
    if (loading := random.Random(f"{seed} loading")).random() < 0.2:  # models that hardly ever load again
        name = loading.choice(list(MODELS))
        workers[name] = replace(workers[name], failing_starts=0.9)
    http: dict[str, Any] = {"explain": draw.random() < 0.2, "idle_timeout": draw.choice((5.0, 75.0))}
    if draw.random() < 0.2:
        http["max_waiting_bytes"] = draw.choice((20_000, 100_000, 400_000, 2_000_000))
    if draw.random() < 0.1:
        http["max_connections"] = 6
    pace = draw.choice((0.005, 0.05, 1.0))
    turns = theme.turns
    quiet = draw.choice((*(0.0,) * 14, 300.0, 3000.0))
    if quiet:  # it is long, not busy
        turns = max(turns, 100 // sum(theme.clients.values()))
    length = turns * (pace + 0.05 + PAUSES * quiet)
    plan = Plan(
        seed, theme, http, services, workers, [], [], turns, pace, quiet, draw.choice((0.0, 0.05, 0.3, 0.5)), timeout
    )
    _add_faults(plan, random.Random(f"{seed} faults"), theme.faults, list(MODELS), (0, 2, 6), length)
    plan.drains_at = _drains_at(draw, plan.faults, length) if draw.random() < 0.4 else None
    plan.coarse = draw.random() < 0.5
    plan.probes = max(draw.choice(INTERVALS), quiet / 100.0)
    _widen(plan, length)
    plan.kept_faults = list(range(len(plan.faults)))
    return plan


def _draw_workers(draw: random.Random, workers: dict[str, WorkerPlan], services: dict[str, dict[str, Any]]) -> None:
    """Add to the workers of each model how far they are, and with what their batches coincide; and how long its drains may take."""
    for name, plan in workers.items():
        workers[name] = replace(plan, latency=draw.choice(LATENCIES), aimed=draw.choice((0.0, 0.4)))
        services[name]["drain_timeout"] = draw.choice((DRAIN, DRAIN, DRAIN, DRAIN, 1.0, 0.05))


def _add_faults(
    plan: Plan,
    draw: random.Random,
    kinds: Sequence[str],
    models: Sequence[str],
    incidents: Sequence[int],
    length: float,
) -> None:
    """Add faults of `kinds`. They come as incidents, of one model and soon one after another: what has begun is to be met by the next.

    There is one more for each hour, so that something happens in it.
    """
    number = draw.choice(incidents)
    for _ in range(number and number + int(length / 3600.0)):
        at, model = draw.uniform(0.0, length), draw.choice(models)
        for _ in range(draw.choice((1, 1, 2, 4))):
            plan.faults.append(Fault(at, draw.choice(kinds), model))
            at += draw.expovariate(1.0 / draw.choice((0.01, 0.3)))
    plan.faults.sort(key=lambda each: each.at)


def _widen(plan: Plan, length: float) -> None:
    """Add to a plan of about `length` seconds what its theme has of other channels. Nothing else of the plan depends on it."""

    def draws(what: str) -> random.Random:
        return random.Random(f"{plan.seed} {what}")

    clients = plan.theme.clients
    for name, what in (("streams", "channels"), ("texts", "texts")):
        if name in clients:
            draw = draws(what)
            base = draw.choice((0.002, 0.05, 0.3))
            plan.workers[name] = replace(plan.workers["items"], base=base, per_row=base / 10)
            settings = plan.services[name] = plan.services["items"] | {"max_batch_size": draw.choice((1, 4, 16))}
            if name == "streams":
                settings["stream_buffer"] = draw.choice((1, 4, 256))
                plan.http["stream_keep_alive"] = draw.choice((0.1, 3.0))
            else:
                settings["max_batch_cost"] = draw.choice((64, 256, 4096))
                settings["max_queue_size"] = draw.choice(
                    (8, 8, 64, 1024)
                )  # where it is short, they wait for their turns
                plan.knows_words = draw.random() < 0.5
    if "messages" in clients:
        draw = draws("messages")
        plan.http |= {"websocket_in_flight": draw.choice((1, 4, 64)), "websocket_ping": draw.choice((1.0, 20.0))}
        plan.http["websocket_ping"] = max(plan.http["websocket_ping"], plan.quiet / 100.0)  # hours have enough of them
    if "calls" in clients:
        plan.stream_requests = draws("calls").choice(REQUESTS_OF_STREAM)
    if "changes" in clients:
        plan.catalog = draw_catalog(plan)
        draw = draws("changes")
        if kinds := [kind for kind in KINDS if draw.random() < 0.6]:
            _add_faults(plan, draw, kinds, list(plan.catalog.models), (0, 2, 6), length)
    plan.clients += [
        number * FIRST + index for number, name in enumerate(CHANNELS) for index in range(clients.get(name, 0))
    ]
    draw, passed_on = draws("fronts"), "calls" in clients or "texts" in clients  # of which fronts do most
    if draw.random() < (0.4 if passed_on else 0.25):
        plan.fronts = draw.choice((1, 2, 3))
        _add_faults(plan, draw, plan.theme.of_fronts, [""], (0, 1, 4), length)
        if (links := draws("links")).random() < 0.5:
            _add_faults(plan, links, some(links, OF_LINKS), [""], (1, 4), length)
        if "texts" in clients and draw.random() < 0.25:  # a front may have many more texts than connections
            plan.http["max_connections"] = 6
        if (
            "texts" in clients and not plan.quiet and draw.random() < 0.5
        ):  # what a front has of them must have its end, too
            plan.drains_at = draw.uniform(0.1, min(length, 3.0))
    share = 0.3 if plan.fronts else 0.15  # and fronts relay what they do not serve themselves
    if not plan.quiet and draws("tls and fronts" if plan.fronts else "tls").random() < share:
        plan.http |= FILES
    draw = draws("zeromq")
    if "texts" in clients and not plan.quiet and draw.random() < 0.5:
        plan.zeromq = draw_settings(draw)
        workers = plan.workers["texts"]  # for whom requests wait that have no deadline
        plan.workers["texts"] = replace(workers, failing_starts=min(0.5, workers.failing_starts))
        plan.clients += [len(CHANNELS) * FIRST + index for index in range(clients["texts"])]
    plan.arenas = draw_arenas(plan)
    plan.device = draw_device(plan)
    plan.jumps, plan.leaps = draw_jumps(plan, length), draw_leaps(plan, length)
    if plan.device is not None:
        _add_faults(plan, draws("turns"), ("add", "remove", "remove", "kill"), plan.device.models, (0, 2, 6), length)
    plan.ranges = draw_ranges(plan)
    plan.solving = draw_solving(plan)
    if plan.arenas is not None:
        mix = plan.theme.mix
        plan.theme = replace(plan.theme, mix=mix._replace(tensors=mix.tensors / 2.0, filled=max(mix.filled, 0.3)))
        for settings in plan.services.values():
            settings["arena_bytes"] = plan.arenas.size


def _drains_at(draw: random.Random, faults: list[Fault], length: float) -> float:
    """Return when a server drains: at any time, or just after something has befallen it."""
    if faults and draw.random() < 0.5:
        return max(0.1, draw.choice(faults).at + draw.expovariate(1.0 / 0.1))
    return draw.uniform(0.1, length)
