"""The memory of a simulation does not grow with its length."""

import gc

from weir.policy.cost.profile import GOOGLENET_P4
from weir.simulation.engine import SimulatedRequest
from weir.simulation.results import BatchMeans
from weir.simulation.simulator import simulate


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
        responses = seen.responses
        arrays = [seen.starts, seen.sizes, seen.reasons, responses.counts, responses.by_stretch]
        return sum(each.nbytes for each in [*seen.sums.values(), *arrays])

    assert kept(10**9) <= kept(10**5) * 1.05
