"""The part `classes` of the benchmarks: bulk workers in virtual time."""

import numpy as np
import pytest
from benchmarks.parts.classes import IdleTimeWorkers

from weir.policy.cost.profile import Profile
from weir.policy.rules import Greedy
from weir.simulation.engine import BulkRequest, Engine, ServiceTimes, SimulatedModel, SimulatedRequest, Whole
from weir.simulation.simulator import settings_for

PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=0.5, max_batch_size=32)


def test_bulk_workers_run_on_processors_that_others_leave() -> None:
    whole = Whole()
    times, workers, bulk = ServiceTimes(PROFILE, 1), IdleTimeWorkers(2, 2), map(BulkRequest, range(96))
    model = SimulatedModel(Engine(), settings_for(PROFILE), Greedy(), times, whole, workers, bulk=bulk)
    # A bulk batch of 32 rows takes 32.5 ms: two begin at 0. From 10 ms on they share a processor, from 11 ms on they have none
    # (a batch of two takes 2.5 ms), ...
    model.accept(SimulatedRequest(index, at) for index, at in enumerate((0.010, 0.011, 0.011)))
    model.engine.finish()
    batches = [part.batches for part in whole._parts]
    found = {
        name: np.concatenate([getattr(each, name) for each in batches]).tolist() for name in ("worker", "start", "end")
    }
    ends = sorted(end for worker, end in zip(found["worker"], found["end"], strict=True) if worker < 2)
    assert ends == pytest.approx([0.0115, 0.0135])
    bulk_ends = sorted(end for worker, end in zip(found["worker"], found["end"], strict=True) if worker >= 2)
    # ... from 11.5 ms on they share one again, and from 13.5 ms on they have both: they lose 0.5 + 0.5 + 1 ms each.
    assert bulk_ends[:2] == pytest.approx([0.0345, 0.0345])
    assert bulk_ends[2] == pytest.approx(0.0345 + 0.0325)
    assert sum(part.request.tolist().count(-1) for part in whole._parts) == 1
