"""Which device a worker computes on, and with how many threads: the fewest that are nearly as fast as any for batches of that size."""

import re
from typing import Any

import numpy as np
import pytest

from weir.errors import SettingsError
from weir.text_models.runtime import EVERY, GAIN, TRIES, Inputs, Pixels, Widths, device_for, free_memory, widened

TWO = [10, 90]  # bytes that are free


def test_workers_go_round_the_given_devices() -> None:
    devices = ["cuda:0", "1", "cpu"]
    assert [device_for(devices, worker, lambda: TWO) for worker in range(4)] == ["cuda:0", "cuda:1", "cpu", "cuda:0"]


@pytest.mark.parametrize("devices", [[], ["auto"], ["cuda"]])
def test_the_gpu_with_most_free_memory_is_first(devices: list[str]) -> None:
    assert [device_for(devices, worker, lambda: TWO) for worker in range(3)] == ["cuda:1", "cuda:0", "cuda:1"]


@pytest.mark.parametrize("devices", [[], ["auto"]])
def test_without_a_gpu_it_is_the_cpu(devices: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert device_for(devices, 0, lambda: []) == "cpu"
    assert not caplog.records


@pytest.mark.parametrize(
    ("device", "free", "found"),
    [("cuda", [], "no GPU here (onnxruntime needs"), ("cuda:2", TWO, "GPUs 0 to 1"), ("1", [9], "only GPU 0")],
)
def test_a_gpu_that_is_not_there_is_refused_with_what_there_is(device: str, free: list[int], found: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"device '{device}': the runtime finds {found}")):
        device_for([device], 0, lambda: free)


def test_nvidia_is_queried_only_where_it_is() -> None:
    assert all(isinstance(size, int) for size in free_memory())


class Computer:
    """Runtimes by threads, on a clock that they put forward: `seconds` of a batch by threads and length."""

    def __init__(self, seconds: dict[tuple[int, int], float]) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.used: list[int] = []
        self.widths = Widths({threads: Part(self, threads) for threads, _ in seconds}, clock=lambda: self.now)

    def run(self, length: int = 8, most: int = 64, times: int = 1) -> list[int]:
        """Compute so many batches; return how many threads computed each."""
        self.used.clear()
        for _ in range(times):
            self.widths.run(most, Inputs(*[np.zeros((1, length), np.int32)] * 4))
        return list(self.used)


class Part:
    """A runtime with so many threads, which can have more unless it has `most`."""

    dimensions, device = 1, "cpu"

    def __init__(self, computer: Computer | None, threads: int, most: int = 64) -> None:
        self.computer, self.threads, self.most = computer, threads, most

    def run(self, inputs: Inputs | Pixels, poolings: Any = ()) -> Any:
        assert self.computer is not None
        self.computer.used.append(self.threads)
        self.computer.now += self.computer.seconds[self.threads, inputs[0].size]
        return [inputs[0]]

    def widened(self, threads: int) -> "Part | None":
        return Part(self.computer, threads) if threads <= self.most else None


def usual(used: list[int]) -> set[int]:
    """Return what was used but for the batch in EVERY that tries."""
    return {each for number, each in enumerate(used, 1) if number % EVERY}


def test_the_fastest_wins_for_each_size() -> None:
    short, long = ({(threads, length): each for threads, each in times.items()} for length, times in (
        (8, {1: 2.0, 2: 2.5, 4: 4.0}), (100, {1: 9.0, 2: 6.0, 4: 5.0}),
    ))  # fmt: skip
    computer = Computer(short | long)
    for length, best in ((8, 1), (100, 4)):
        assert computer.run(length, times=3 * TRIES) == [1] * TRIES + [2] * TRIES + [4] * TRIES
        assert usual(computer.run(length, times=10 * EVERY)) == {best}


def test_more_threads_must_gain_more_than_they_cost() -> None:
    computer = Computer({(1, 8): 1.0, (2, 8): 1.01 / GAIN})
    computer.run(times=2 * TRIES)
    assert usual(computer.run(times=10 * EVERY)) == {1}


def test_no_batch_takes_more_threads_than_are_idle() -> None:
    computer = Computer({(1, 8): 4.0, (2, 8): 2.0, (4, 8): 1.0})
    computer.run(times=3 * TRIES)
    assert set(computer.run(most=3, times=2 * EVERY)) == {1, 2}
    assert set(computer.run(most=1, times=EVERY)) == {1}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_change_is_noticed(before: int, after: int) -> None:
    fast, slow = {(before, 8): 1.0, (after, 8): 2.0}, {(before, 8): 3.0, (after, 8): 2.0}
    computer = Computer(dict(sorted(fast.items())))
    computer.run(times=2 * TRIES)
    assert usual(computer.run(times=EVERY)) == {before}
    computer.seconds = slow
    assert set(computer.run(times=2 * TRIES)[TRIES:]) == {after}
    computer.seconds = {(before, 8): 0.5, (after, 8): 2.0}  # only a try can show this
    assert before in computer.run(times=4 * EVERY * TRIES)[-EVERY // 2 :]


def test_one_slow_batch_changes_nothing() -> None:
    computer = Computer({(1, 8): 2.0, (2, 8): 1.0})
    computer.run(times=2 * TRIES)
    computer.now, usually = 0.0, computer.seconds
    computer.seconds = {(1, 8): 2.0, (2, 8): 60.0}
    computer.run()
    computer.seconds = usually
    assert set(computer.run(times=EVERY // 2)) == {2}


@pytest.mark.parametrize(("threads", "most", "expected"), [
    (1, 2, [1, 2]), (1, 3, [1, 2, 3]), (1, 64, [1, 2, 4, 8]), (2, 4, [2, 4]), (4, 64, [4, 8, 16, 32]), (2, 2, None),
])  # fmt: skip
def test_few_sessions_reach_far(threads: int, most: int, expected: list[int] | None) -> None:
    found = widened(Part(None, threads), threads, most)
    assert (None if found is None else list(found._runtimes)) == expected
    assert widened(Part(None, threads, most=1), threads, most) is None
