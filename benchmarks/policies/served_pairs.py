"""Pairs of models that sleep, on one device of a real server: what each order costs, against the exact optimum on the same arrivals; and two
recorded services as such a pair.

A server for each order runs at the same time as the others, so that all find the machine in the same state. Requests are sent at
their instants, whether answers come or not, and response times count from that instant. A first part of each run does not count:
in it the server estimates the rates and solves its order. What the machine adds to each batch is measured (from dispatch to end, beyond what the
model sleeps), and the optimum is played with it, too.
"""

import asyncio
import json
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import tomli_w
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.beside import Load, Sender
from benchmarks.harness.servers import Server, serving, weir_command
from benchmarks.policies.bursts import TRACES
from benchmarks.policies.devices import ORDERS, RIVALS
from benchmarks.policies.harness import Compared, Comparison, Effort
from benchmarks.policies.two_models import Numbers, Rule, TwoModels
from weir.policy.cost import Profile
from weir.policy.solve.device import DeviceLoad, solve_device
from weir.simulation.arrivals import read_trace

NAMES = ("first", "second")
WARM = 0.25  # of the requests of a run do not count
LONGEST = 32  # rows of each queue in the exact chain
SHARE = 0.1  # of `--requests`: what is sent takes real time


class Pair(NamedTuple):
    """Two models, which sleep fixed + each·b ms and use so many times as much energy; and their parts of the device's time. A batch has at
    most `largest` rows."""

    title: str
    fixed_ms: tuple[float, float]
    each_ms: tuple[float, float]
    load: tuple[float, float]
    energy_weight: float = 0.0
    largest: int = 8

    def profiles(self) -> list[Profile]:
        """Return what is known of the models."""
        return [
            Profile.linear(
                alpha_ms=each, tau0_ms=fixed, beta_mj=each, zeta0_mj=2.0 * fixed, max_batch_size=self.largest
            )
            for fixed, each in zip(self.fixed_ms, self.each_ms, strict=True)
        ]


PAIRS = (
    Pair("30 and 180 ms, load 0.7", (20.0, 160.0), (10.0, 20.0), (0.5, 0.2)),
    Pair("20 and 210 ms, load 0.7", (10.0, 200.0), (10.0, 10.0), (0.4, 0.3)),
    Pair("105 and 60 ms with energy, load 0.35", (100.0, 40.0), (5.0, 20.0), (0.2, 0.15), 40.0),
)
SPEED = 10.0  # times as fast as the recorded hour
FIXED_MS, EACH_MS, LARGEST = (
    4.0,
    1.0,
    16,
)  # of both services, before they are made longer to give their parts of the load
TRACE_LOADS = ((0.35, 0.35),)


class Counts(NamedTuple):
    """What a server has done for one model."""

    batches: float
    rows: float
    busy_ms: float  # from the dispatch of batches to their end


class Ran(NamedTuple):
    """What became of the requests that count: the mean response time in ms, the mean power in watts, and the times of the batches as they were
    served."""

    response_ms: float
    power_w: float
    served: list[Profile]

    def cost(self, pair: Pair) -> float:
        """Return the weighted sum."""
        return self.response_ms + pair.energy_weight * self.power_w


def compare_served(effort: Effort) -> Compared:
    """Compare the orders on each pair."""
    above = [f"cost above the optimum, %{each}" for each in ("", ": with times as served")]
    lines = f"{SHARE * effort.requests:,.0f} requests for each pair, a quarter of them not counted"
    made = Compared(["pair", "order", "response, ms", "power, W", *above], about={"lines": lines})
    for number, pair in enumerate(PAIRS):
        profiles = pair.profiles()
        rates = [part * each.max_rate for part, each in zip(pair.load, profiles, strict=True)]
        seconds = SHARE * effort.requests / sum(rates)
        arrivals = [_instants(rate, seconds, seed=[number, k]) for k, rate in enumerate(rates)]
        exact = TwoModels(profiles, rates, pair.energy_weight, LONGEST)
        loads = [DeviceLoad(each, rate, 1.0, pair.energy_weight) for each, rate in zip(profiles, rates, strict=True)]
        _, rule = exact.best(exact.rule(solve_device(loads)))
        best = _played(exact, rule, arrivals, seconds)
        made.rows.append(
            [pair.title, "exact optimum, played", f"{best.response_ms:.1f}", f"{best.power_w:.2f}", "", ""]
        )
        for order, ran in uvloop.run(_served(pair, profiles, arrivals, seconds)).items():
            exact.profiles = ran.served
            own = _played(exact, rule, arrivals, seconds)
            beyond = [100.0 * (ran.cost(pair) / each.cost(pair) - 1.0) for each in (best, own)]
            cells = [f"{each:+.1f}" for each in beyond]
            made.rows.append([pair.title, order, f"{ran.response_ms:.1f}", f"{ran.power_w:.2f}", *cells])
            made.values.setdefault(order, []).extend(beyond)
        effort.step(pair.title)
    return made


def compare_served_traces(effort: Effort) -> Compared:
    """Compare the orders on two recorded services: their requests, faster than they were, of two models whose times make the load."""
    both = [read_trace(TRACES / f"azure-{name}.csv")[0] / SPEED for name in ("conv", "code")]
    seconds = min(float(np.sort(np.concatenate(both))[: effort.requests][-1]), *(float(each[-1]) for each in both))
    arrivals = [each[each < seconds] for each in both]
    lines = f"{sum(map(len, arrivals)):,} requests, {SPEED:g} times as fast as recorded, a quarter of them not counted"
    titles = ["parts of the load", "order", "response, ms", "above the longest queue, %"]
    made = Compared(titles, about={"lines": lines})
    base = Profile.linear(alpha_ms=EACH_MS, tau0_ms=FIXED_MS, max_batch_size=LARGEST)
    for load in TRACE_LOADS:
        longer = [own * base.max_rate * seconds / len(at) for own, at in zip(load, arrivals, strict=True)]
        fixed, each = ((of * longer[0], of * longer[1]) for of in (FIXED_MS, EACH_MS))
        pair = Pair(f"chat {load[0]:g}, code {load[1]:g}", fixed, each, load, largest=LARGEST)
        found = uvloop.run(_served(pair, pair.profiles(), arrivals, seconds))
        longest = found["longest"].response_ms
        for order, ran in found.items():
            above = 100.0 * (ran.response_ms / longest - 1.0)
            made.rows.append([pair.title, order, f"{ran.response_ms:.1f}", f"{above:+.1f}"])
        made.values[pair.title] = [
            100.0 * (found["solved"].response_ms / found[each].response_ms - 1.0) for each in RIVALS
        ]
        effort.step(pair.title)
    return made


def _instants(rate: float, seconds: float, seed: list[int]) -> Numbers:
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, int(2.0 * rate * seconds) + 20)
    times: Numbers = np.cumsum(gaps)
    return times[times < seconds]


def _played(exact: TwoModels, rule: Rule, arrivals: list[Numbers], seconds: float) -> Ran:
    ends, energy = exact.play(rule, [1000.0 * each for each in arrivals])
    waits = [(each - 1000.0 * at)[at >= WARM * seconds] for each, at in zip(ends, arrivals, strict=True)]
    return Ran(float(np.nanmean(np.concatenate(waits))), sum(energy) / 1000.0 / seconds, list(exact.profiles))


async def _served(pair: Pair, profiles: list[Profile], arrivals: list[Numbers], seconds: float) -> dict[str, Ran]:
    """Return what each order comes to, all at the same time."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        servers = {order: stack.enter_context(_server(folder, pair, profiles, order)) for order in ORDERS}
        runs = [_run(server, profiles, arrivals, seconds) for server in servers.values()]
        found = dict(zip(servers, await asyncio.gather(*runs), strict=True))
        if _asked(servers["solved"], "/models/first/policy")["device"] is None:
            raise RuntimeError(f"{pair.title}: no order was solved within {seconds:.0f} s")
    return found


def _server(folder: Path, pair: Pair, profiles: list[Profile], order: str) -> Any:
    tables = {}
    for number, (name, profile) in enumerate(zip(NAMES, profiles, strict=True)):
        file = folder / f"{name}.toml"
        file.write_text(profile.to_toml())
        tables[name] = {
            "target": "benchmarks.models:Sleeps", "max_queue_delay": 30.0, "max_batch_size": pair.largest,
            "policy": f"auto:profile={file},energy_weight={pair.energy_weight:g}" if order == "solved" else "greedy",
            "params": {"fixed_ms": pair.fixed_ms[number], "each_ms": pair.each_ms[number]},
        }  # fmt: skip
    config = folder / f"{order}.toml"
    config.write_text(tomli_w.dumps({"device_group": "gpu0", "device_order": order, "models": tables}))
    command = weir_command("", "--config", str(config))
    return serving(order, [word for word in command if word], path="/infer/second", body=b"3", expected=b"3")


async def _run(server: Server, profiles: list[Profile], arrivals: list[Numbers], seconds: float) -> Ran:
    loads = [
        Load(server.port, (f"/infer/{name}", ""), [(at, "3") for at in each.tolist()], seconds=seconds)
        for name, each in zip(NAMES, arrivals, strict=True)
    ]
    senders = asyncio.gather(*[Sender(load).run() for load in loads])
    await asyncio.sleep(WARM * seconds)
    began, before = asyncio.get_running_loop().time(), await _counts(server)
    await asyncio.sleep((1.0 - WARM) * seconds)
    passed, after = asyncio.get_running_loop().time() - began, await _counts(server)
    waits = []
    for seen, at in zip(await senders, arrivals, strict=True):
        responses = np.array(seen.responses)
        if (responses < 0.0).any():
            raise RuntimeError(f"{server.name}: {int((responses < 0.0).sum())} requests had no answer")
        waits.append((responses + np.array(seen.late))[at >= WARM * seconds])
    energy, served = 0.0, []
    for profile, old, new in zip(profiles, before, after, strict=True):
        batches, rows, busy_ms = (now - then for now, then in zip(new, old, strict=True))
        energy += _sum(profile.energy_mj, batches, rows)
        longer = (busy_ms - _sum(profile.service_time_ms, batches, rows)) / batches
        served.append(replace(profile, service_time_ms=profile.service_time_ms + longer))
    return Ran(1000.0 * float(np.concatenate(waits).mean()), energy / 1000.0 / passed, served)


def _sum(of: Numbers, batches: float, rows: float) -> float:
    """Return the sum over batches of what grows linearly with their rows."""
    each = float(of[1] - of[0])
    return batches * (float(of[0]) - each) + rows * each


async def _counts(server: Server) -> list[Counts]:
    text = await asyncio.to_thread(_read, server, "/metrics")
    names = ("weir_batch_size_count", "weir_batch_size_sum", "weir_device_busy_seconds_total")
    found = {
        (sample.labels["model"], sample.name): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in names
    }
    made = [Counts(*(found[name, each] for each in names)) for name in NAMES]
    return [each._replace(busy_ms=1000.0 * each.busy_ms) for each in made]


def _read(server: Server, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def _asked(server: Server, path: str) -> Any:
    return json.loads(_read(server, path))


SERVED_PAIRS = Comparison(
    "device-served",
    "Pairs of models that sleep, on one device of a real server",
    lambda seeds: len(PAIRS),
    compare_served,
    exact=True,
)
SERVED_TRACES = Comparison(
    "device-traces-served",
    "Two recorded services on one device of a real server",
    lambda seeds: len(TRACE_LOADS),
    compare_served_traces,
    exact=True,
)
