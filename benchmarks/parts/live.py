"""Live against the profile: what a user measures with `weir profile` and then sees, for greedy, solved and auto.

The child `POLICY PROFILE RATE SECONDS SEED` serves one policy under Poisson load; the child `profile FILE SECONDS` measures the model as
`weir profile` does, and writes the profile. What a batch takes, from dispatch to its end, is what the profile has.
"""

import asyncio
import gc
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import uvloop
from reproduction.plots import Point, draw_predictions

import weir
from benchmarks.harness.result import Part, Result, Run
from benchmarks.harness.servers import ROOT, ask_own
from benchmarks.models import TEN_TIMES, Exactly
from benchmarks.parts.theory import (
    AFTER,
    COUNTED,
    ENERGY_WEIGHT,
    PATIENCE,
    Floats,
    Ledger,
    counted,
    feed,
    mean_of,
    trace,
)
from weir.batching.settings import BatchingSettings
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile
from weir.policy.decision import Policy
from weir.policy.online.adaptive import AutoPolicy, predict
from weir.policy.solve.bank import Bank, solve_bank
from weir.policy.solve.smdp import evaluate
from weir.policy.solve.tables import greedy_table
from weir.simulation.simulator import run as simulate

LOADS = (0.3, 0.5, 0.7, 0.8)
AUTO = "auto"
POLICIES = ("greedy", "solved", AUTO)
PRICES = Prices(1.0, ENERGY_WEIGHT)
PROFILING = 20.0  # seconds
CELL = 1.6  # times the seconds asked for, in each round: one policy at one load
ALLOWED = 0.05
PICTURE = ROOT / "docs" / "pictures" / "live.png"
COLUMNS = ["load", "policy", "measured, ms", "for these arrivals", "off by", "predicted", "requests"]


def measure(run: Run) -> Result:
    """Profile the model; then at each load one policy after the other, on the same arrivals."""
    result = Result(COLUMNS)
    points: dict[str, list[Point]] = {policy: [] for policy in POLICIES}
    with TemporaryDirectory() as folder:
        path, file = Path(folder) / "live.profile.toml", Path(folder) / "live.policy.npz"
        seen = ask_own("parts.live", "profile", path, PROFILING)
        run.step(f"profiled: {seen['beyond_ms']:+.3f} ms beyond what the model takes; {seen['waited']}")
        profile = Profile.from_toml(path.read_text())
        bank = solve_bank(profile, PRICES)
        file.write_bytes(bank.to_bytes())
        for load in LOADS:
            for policy in POLICIES:
                rate = load * profile.max_rate
                text = file if policy == "solved" else policy
                one = ask_own("parts.live", text, path, rate, CELL * run.rounds * run.seconds, 1 + round(100 * load))
                predicted = _predicted(policy, profile, bank, rate)
                points[policy].append(_add(result, load, policy, one, predicted))
                run.step(f"load {load:g}: {policy} {one['response_ms']:.2f} ms, {one['predicted_ms']:.2f} predicted")
    draw_predictions(PICTURE, points)
    result.notes += _notes(seen)
    return result


def _predicted(policy: str, profile: Profile, bank: Bank, rate: float) -> float:
    """Return the stationary mean response time: exactly, or what the bank says."""
    if policy == "greedy":
        return evaluate(profile, rate, greedy_table(profile.max_batch_size), PRICES).response_time_ms
    return float(predict(bank, rate)["response_time_ms"] or 0.0)


def _add(result: Result, load: float, policy: str, one: dict[str, Any], predicted: float) -> Point:
    off, low, high = (each / one["predicted_ms"] for each in one["beyond_ms"])
    result.rows.append([
        f"{load:g}", policy, f"{one['response_ms']:.2f}", f"{one['predicted_ms']:.2f}",
        f"{100 * off:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f})", f"{predicted:.2f}", f"{one['requests']:,}",
    ])  # fmt: skip
    result.values[f"{policy} {load:g}"] = off
    result.goal(
        f"load {load:g}: {policy} within 5 % of what its profile predicts for these arrivals", f"{100 * off:+.1f} %",
        abs(off) <= ALLOWED,
    )  # fmt: skip
    ends = [one["predicted_ms"] * (1.0 + each) for each in (off, low, high)]
    return Point(one["predicted_ms"], ends[0], ends[1], ends[2], f"{load:g}")


def _notes(seen: dict[str, Any]) -> list[str]:
    return [
        f"![Measured mean response time over the predicted one]({PICTURE.parent.name}/{PICTURE.name})",
        f"The model is profiled as by `weir profile` in {PROFILING:g} s: its times are {seen['beyond_ms']:+.3f} ms beyond what the model "
        f"itself takes, on the mean over sizes. That is the way to the worker, its waking up and the way back. It waited for "
        f"a CPU for {seen['waited']}.",
        "*For these arrivals* is what the same batcher and policy do with these very arrivals in virtual time, with the profile's "
        "service times; in brackets is the 95 % interval of the mean difference of the same requests. *Predicted* is the stationary mean, "
        f"for all arrivals there might be. Arrivals from {COUNTED[0]:.0%} to {COUNTED[1]:.0%} of the time count.",
    ]


SOLVING = 60.0  # seconds that it may take
LUCKS = (1, 2, 3)  # of service times that vary


def profiled(path: Path, seconds: float) -> dict[str, Any]:
    """Measure the model; return what its times are beyond those that it is to take, in ms."""
    power = float(TEN_TIMES.energy_mj[0] / TEN_TIMES.service_time_ms[0])
    profile = weir.profile(
        Exactly, items=[1, 2, 3], max_batch_size=Exactly.max_batch_size, seconds=seconds, power=power
    )
    path.write_text(profile.to_toml())
    beyond = profile.service_time_ms - TEN_TIMES.service_time_ms
    return {
        "beyond_ms": float(np.mean(beyond)),
        "waited": profile.about["waited_for_cpu"],
        "max_rate": profile.max_rate,
    }


async def serve_trace(
    policy: str, path: Path, profile: Profile, rate: float, seconds: float, seed: int
) -> dict[str, Any]:
    """Return the mean response time, measured and in virtual time with these very arrivals, and how far apart they are."""
    instants = trace(rate, seconds, seed)
    ledger = Ledger(len(instants))
    patient: dict[str, Any] = {
        "max_queue_delay": PATIENCE, "timeout": PATIENCE, "max_queue_size": len(instants), "drain_timeout": 0.0,
    }  # fmt: skip
    text = f"auto:profile={path},energy_weight={ENERGY_WEIGHT:g}" if policy == AUTO else policy
    async with weir.Service(Exactly, policy=text, observers=[ledger], **patient) as service:
        if policy == AUTO:
            await adopted(service)
        gc.collect()
        gc.freeze()
        intended = time.monotonic() + 0.1 + instants
        late_ms = await feed(service, intended)
        await asyncio.sleep(AFTER)
    counts = counted(len(instants))
    response_ms = (1000.0 * (ledger.ends - intended))[counts]
    predicted_ms = expected_ms(policy, profile, instants)[counts]
    beyond = mean_of(response_ms - predicted_ms)
    return {
        "response_ms": float(np.nanmean(response_ms)), "predicted_ms": float(predicted_ms.mean()), "beyond_ms": list(beyond),
        "late_ms": float(np.mean(late_ms)), "requests": len(response_ms),
    }  # fmt: skip


async def adopted(service: weir.Service) -> None:
    """Return when `auto` has its tables, which another process solves: until then it is greedy, and in virtual time it has them
    from the first request on."""
    for _ in range(int(SOLVING / 0.05)):
        if service.explain_policy()["capacity"] is not None:
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"auto has no tables after {SOLVING:g} s")


def expected_ms(policy: str, profile: Profile, instants: Floats) -> Floats:
    """Return the response times of these arrivals in virtual time, with the profile's service times."""
    settings = BatchingSettings(
        max_batch_size=profile.max_batch_size, max_queue_delay=PATIENCE, max_queue_size=len(instants)
    )
    played: str | Policy = policy
    if policy == AUTO:
        played = AutoPolicy(energy_weight=ENERGY_WEIGHT)
        played.adopt(solve_bank(profile, Prices(1.0, ENERGY_WEIGHT)))
    runs = [simulate(profile, played, instants, settings=settings, services_seed=luck) for luck in LUCKS]
    return np.asarray(np.mean([1000.0 * (run.end - run.arrival) for run in runs], axis=0), dtype=np.float64)


PART = Part(
    "live",
    "Live against the profile",
    "A model in a worker process that takes exactly 3.051·b + 10.52 ms for b rows is profiled, its tables are solved, and it is "
    "served under Poisson load in real time, with all settings as they come.",
    lambda rounds: 1 + len(LOADS) * len(POLICIES),
    measure,
)


if __name__ == "__main__":
    first, path, *numbers = sys.argv[1:]
    if first == "profile":
        print(json.dumps(profiled(Path(path), float(numbers[0]))))
    else:
        rate, seconds, seed = map(float, numbers)
        print(
            json.dumps(
                uvloop.run(
                    serve_trace(first, Path(path), Profile.from_toml(Path(path).read_text()), rate, seconds, int(seed))
                )
            )
        )
