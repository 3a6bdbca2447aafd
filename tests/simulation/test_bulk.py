"""Bulk work in virtual time, beside the arrivals: what it adds to them, and what share of the idle time it gets."""

from math import isnan
from pathlib import Path

import numpy as np
import pytest
from tests.served import weir_here

from weir.batching.settings import BatchingSettings
from weir.errors import SettingsError
from weir.policy.cost.profile import Profile
from weir.policy.rules import Greedy
from weir.simulation.engine import BulkRequest, Engine, LogPart, ServiceTimes, SimulatedModel, SimulatedRequest
from weir.simulation.simulator import settings_for, simulate

PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=0.5, max_batch_size=32)


def test_bulk_work_adds_less_than_it_may_and_gets_most_of_the_idle_time() -> None:
    settings = settings_for(PROFILE, BatchingSettings(max_batch_size=32, bulk_delay=0.005, max_queue_size=1_000_000))
    alone = simulate(PROFILE, "greedy", "poisson:0.5", requests=20_000).outcomes["greedy"]
    both = simulate(PROFILE, "greedy", "poisson:0.5", requests=20_000, bulk=20_000, settings=settings)
    beside = both.outcomes["greedy"]
    assert beside.p99_ms.value - alone.p99_ms.value < 5.0
    assert beside.response_time_ms.value - alone.response_time_ms.value < 5.0
    assert 0.8 <= beside.bulk_share <= 1.0
    assert beside.bulk_rate == pytest.approx(beside.bulk_share * PROFILE.max_rate * (1.0 - beside.busy_share))
    assert isnan(alone.bulk_rate) and isnan(alone.bulk_share)


def test_without_arrivals_for_a_while_bulk_work_goes_on_and_ends() -> None:
    parts: list[LogPart] = []
    times, bulk = ServiceTimes(PROFILE, 1), map(BulkRequest, range(300))
    model = SimulatedModel(Engine(), settings_for(PROFILE), Greedy(), times, parts.append, bulk=bulk)
    model.accept(SimulatedRequest(index, at) for index, at in enumerate((0.1, 5.0)))
    model.engine.finish()
    index = np.concatenate([part.request for part in parts])
    assert sorted(index.tolist()) == [*range(-300, 0), 0, 1]
    first = [float(part.end[part.request == 0][0]) for part in parts if (part.request == 0).any()]
    assert 0.1 < first[0] < 0.1 + 0.005 + 0.0015 + 1e-9


def test_the_command_shows_bulk_work(tmp_path: Path) -> None:
    path = tmp_path / "square.profile.toml"
    path.write_text(PROFILE.to_toml())
    ran = weir_here(
        "simulate", path, "--policy", "greedy", "--requests", "2000", "--bulk", "500", "--bulk-delay", "4ms"
    )
    assert ran.returncode == 0, ran.stderr
    assert "bulk rows/s" in ran.stdout
    assert "of idle" in ran.stdout
    refused = weir_here("simulate", path, "--workers", "1..4", "--bulk", "500", "--policy", "greedy")
    assert (refused.returncode, "--bulk=500: needs a fixed number of workers" in refused.stderr) == (2, True)
    with pytest.raises(SettingsError, match=r"^bulk=-1: must be 0 or more"):
        simulate(PROFILE, "greedy", "poisson:0.5", requests=200, bulk=-1)
