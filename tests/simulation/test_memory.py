"""The memory of a simulation does not grow with its length."""

import gc

from weir.policy.cost.profile import GOOGLENET_P4, Profile
from weir.simulation.engine import PART, Engine, EventLog, LogPart, ServiceTimes, SimulatedRequest, SimulatedWorkers
from weir.simulation.results import BatchMeans
from weir.simulation.simulator import policy_for, settings_for, simulate


def test_requests_that_had_their_end_are_forgotten() -> None:
    alive: list[int] = []

    def look(policy: str, done: int, total: int) -> None:
        alive.append(sum(type(each) is SimulatedRequest for each in gc.get_objects()))

    simulate(GOOGLENET_P4, ["control-limit:8"], "poisson:0.7", requests=50_000, progress=look)
    assert len(alive) == 4
    assert max(alive) < 200  # those that wait or run, and the few that are still referred to


def test_what_is_kept_of_a_run_has_one_size() -> None:
    def kept(requests: int) -> int:
        seen = BatchMeans(GOOGLENET_P4, requests // 10, requests)
        arrays = [
            *seen.sums.values(),
            seen.starts,
            seen.sizes,
            seen.reasons,
            seen.responses.counts,
            seen.responses.by_stretch,
        ]
        return sum(each.nbytes for each in arrays)

    assert kept(10**9) <= kept(10**5) * 1.05


def test_a_part_is_handed_over_before_it_is_large() -> None:
    sizes: list[int] = []

    class Noting(BatchMeans):
        """Notes how large the parts are."""

        def __call__(self, part: LogPart) -> None:
            sizes.append(len(part.request))
            super().__call__(part)

    profile = Profile.linear(alpha_ms=0.1, tau0_ms=1.0, max_batch_size=32)
    count = 2 * PART + 10
    seen = Noting(profile, 0, count)
    workers = SimulatedWorkers(ServiceTimes(profile, 1))
    engine = Engine(settings_for(profile), policy_for("full:32", profile), workers, EventLog(seen))
    engine.arrive(0, [0.0002 * number for number in range(count)])
    engine.finish()
    assert sum(sizes) == count
    assert all(PART <= size < PART + 32 for size in sizes[:-1])
    assert len(sizes) == 3
