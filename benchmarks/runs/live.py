"""One policy under Poisson load, live, beside what its profile predicts. Arguments: POLICY PROFILE RATE SECONDS SEED.

`profile FILE SECONDS` instead measures the model as `weir profile` does, and writes the profile. The service is as it comes:
what a batch takes, from dispatch to its end, is what the profile has.
"""

import asyncio
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

import weir
from benchmarks.models import TEN_TIMES, Exactly
from benchmarks.runs.theory import AFTER, ENERGY_WEIGHT, PATIENCE, Floats, Ledger, counted, feed, mean_of, trace
from weir.batching.settings import BatchingSettings
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile
from weir.policy.decision import Policy
from weir.policy.online.adaptive import AutoPolicy
from weir.policy.solve.bank import solve_bank
from weir.simulation.simulator import run as simulate

AUTO = "auto"
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


async def measure(policy: str, path: Path, profile: Profile, rate: float, seconds: float, seed: int) -> dict[str, Any]:
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


if __name__ == "__main__":
    first, path, *numbers = sys.argv[1:]
    if first == "profile":
        print(json.dumps(profiled(Path(path), float(numbers[0]))))
    else:
        rate, seconds, seed = map(float, numbers)
        print(
            json.dumps(
                uvloop.run(
                    measure(first, Path(path), Profile.from_toml(Path(path).read_text()), rate, seconds, int(seed))
                )
            )
        )
