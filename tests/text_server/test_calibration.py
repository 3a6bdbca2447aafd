"""calibration.py: a model is measured once on a machine."""

import asyncio
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.rings import subcases
from tests.text_server.text_models import Summing

from weir.testing import FakeClock, FakeExecutor
from weir.text_models.texts import Tokens
from weir.text_server import calibration
from weir.text_server.calibration import (
    Budget,
    Measurement,
    MeasuringRounds,
    Size,
    TextsToMeasure,
    Timed,
    budget_for,
    choose,
)


def budget(
    folder: Path, noise: Callable[[], float] = lambda: 1.0, **more: Any
) -> tuple[Budget, list[tuple[float, str]]]:
    """Ask for a budget in virtual time; return it, and the progress that was shown.

    A batch takes as long as 30 tokens, padding a quarter as long as tokens, and everything `noise` times as long.
    """
    shown: list[tuple[float, str]] = []
    clock = FakeClock()

    def answer(batch: list[Tokens]) -> list[Any]:
        lengths = [len(each.ids) // 4 for each in batch]
        padding = len(batch) * max(lengths) - sum(lengths)
        clock.advance(1e-4 * noise() * (30 + sum(lengths) + 0.25 * padding))
        return Summing().predict(batch)

    options: dict[str, Any] = {"identity": {"model": "a"}, "progress": lambda *each: shown.append(each), **more}
    # What a worker that measures does not share with those that serve.
    stated = {"workers": 3, "ray_detached": "kept", "device_group": "a", "pipeline_depth": 2}
    settings = {**stated, "executor": FakeExecutor(answer), "clock": clock}
    wanted = Measurement(Summing, {}, TextsToMeasure(256), safe_tokens=512, settings=settings, **options)
    return asyncio.run(budget_for(wanted, folder)), shown


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    first, shown = budget(tmp_path / "made")
    assert (shown[0], shown[-1]) == ((0.0, "starting a worker, which builds the graph"), (1.0, "done"))
    assert {"1 x 16 tokens", "2 x 64 tokens"} <= {what for _, what in shown}
    assert 256 <= first.max_batch_cost <= 1024
    assert first.padding_cost == pytest.approx(0.25, abs=0.001)
    assert first.tokens_per_second == pytest.approx(1e4, rel=0.2)
    (file,) = (tmp_path / "made").iterdir()
    assert {len(each) for each in json.loads(file.read_text())["measured"]} == {4}
    assert budget(tmp_path / "made") == (first, [])
    assert budget(tmp_path / "made", identity={"model": "b"})[1] != []


def test_now_and_then_something_else_runs(tmp_path: Path) -> None:
    quiet, _ = budget(tmp_path)
    random = Random(1)
    busy, _ = budget(tmp_path, lambda: 1 + 2 * (random.random() < 0.2), identity={"model": "b"})
    assert busy == quiet
    assert len(list(tmp_path.iterdir())) == 2


SLICE = 5e-3  # seconds for which the kernel of a busy machine leaves a CPU to a process
WORKER = 4711  # its process


def busy_budget(patch: pytest.MonkeyPatch, folder: Path, waited: float = 0.5, **more: Any) -> Budget:
    """Return the budget on a machine with other work. A batch that does not end within a SLICE takes twice as long by the clock.

    `waited` is the number of seconds that the worker waits for a CPU in every second, as the kernel counts it.
    """
    ran = 1.0
    clock = FakeClock()

    def answer(batch: list[Tokens]) -> list[Any]:
        nonlocal ran
        seconds = 1e-4 * (30 + sum(len(each.ids) // 4 for each in batch))
        ran += seconds
        clock.advance(seconds if seconds <= SLICE else 2 * seconds)
        return Summing().predict(batch)

    def contention(pids: Collection[int]) -> Any:
        assert WORKER in pids
        began = clock()
        return SimpleNamespace(look=dict, since=lambda before: waited * (clock() - began))

    patch.setattr(calibration, "cpu_times", lambda pid: (ran if pid == WORKER else 0.0, 0.0))
    patch.setattr(calibration, "Contention", contention)
    executor = FakeExecutor(answer)
    executor.states()[0].pid = WORKER
    settings = {"executor": executor, "clock": clock}
    wanted = Measurement(Summing, {}, TextsToMeasure(256), {}, 512, settings, **more)
    return asyncio.run(budget_for(wanted, folder))


def test_busy_processes_beside_one_thread_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, _ = budget(tmp_path)
    assert busy_budget(monkeypatch, tmp_path / "busy", in_one_thread=True).max_batch_cost == quiet.max_batch_cost
    assert len(list((tmp_path / "busy").iterdir())) == 1
    # Beside several threads they are seen.
    assert busy_budget(monkeypatch, tmp_path / "several").tokens_per_second == 0
    assert busy_budget(monkeypatch, tmp_path / "quieter", waited=0.01).tokens_per_second > 0


def test_what_was_measured_while_much_else_ran_is_kept_with_its_doubt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random = Random(1)
    found, _ = budget(tmp_path, lambda: 2 ** random.randint(0, 9))
    assert (found.max_batch_cost, found.max_batch_size, found.max_padding, found.padding_cost) == (512.0, 64, 16.0, 1.0)
    (file,) = tmp_path.iterdir()
    doubtful, _ = json.loads(file.read_text())["uncertainty"]
    said = f"they have 512 tokens: the times of {doubtful} % of the sizes differ"
    assert doubtful > 25 and said in caplog.text and f"delete {file}" in caplog.text
    assert budget(tmp_path) == (found, [])
    file.unlink()
    assert budget(tmp_path)[0] != found


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sizes are measured."""
    monkeypatch.setattr(calibration, "MAX_ROWS", 2)


@pytest.mark.usefixtures("brief")
def test_the_measurements_that_were_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MAX_KEPT", 2)
    names = [{"model": name} for name in "abc"]
    for place, name in enumerate(names[:2], start=1):
        before = set(tmp_path.iterdir())
        budget(tmp_path, identity=name)
        (made,) = set(tmp_path.iterdir()) - before
        os.utime(made, (place, place))
    assert budget(tmp_path, identity=names[0])[1] == []  # used once more
    assert budget(tmp_path, identity=names[2])[1] != []
    assert len(list(tmp_path.iterdir())) == 2
    assert budget(tmp_path, identity=names[0])[1] == []
    assert budget(tmp_path, identity=names[1])[1] != []


@pytest.mark.usefixtures("brief")
def test_what_cannot_be_read_is_measured_anew(tmp_path: Path) -> None:
    budget(tmp_path)
    (file,) = tmp_path.iterdir()
    for text in ("", "{}", '{"budget": {"more": 1}}', '{"budget": 3}'):
        file.write_text(text)
        assert budget(tmp_path)[1] != []
        assert budget(tmp_path)[1] == []


@pytest.mark.usefixtures("brief")
def test_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        assert budget(tmp_path / "file")[1] != []


def timings(price: float, each: float, slower_from: int = 10**9) -> list[Timed]:
    """Return how long batches take that cost `price` and `each` per token, twice as much of those beyond `slower_from` tokens."""
    return [
        Timed(rows, length, price + each * (rows * length + max(0, rows * length - slower_from)))
        for length in (16, 64, 256)
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ]


def test_a_cpu_on_which_larger_batches_are_slower() -> None:
    budget = choose(timings(1e-4, 1e-5, slower_from=128))
    assert 64 <= budget.max_batch_cost <= 256
    assert budget.max_batch_size == budget.max_batch_cost // 8
    assert budget.tokens_per_second == pytest.approx(1e5, rel=0.2)


def test_an_accelerator_whose_batch_costs_as_much_as_a_thousand_tokens() -> None:
    budget = choose(timings(1e-3, 1e-6))
    assert budget.max_batch_cost >= 16_384
    assert budget.max_padding == pytest.approx(1000 / 2, rel=0.05)
    assert budget.max_batch_size == calibration.MAX_ROWS


def test_where_nothing_is_gained_batches_are_small_but_worth_their_cost() -> None:
    assert choose(timings(0.0, 1e-3)).settings() == {
        "padded": True, "max_batch_cost": 16.0, "max_batch_size": 2, "max_padding": 0.5, "padding_cost": 1.0,
    }  # fmt: skip
    assert choose([Timed(1, 4, 0.1)]).max_batch_size == 1
    assert choose([Timed(1, 64, 0.2), Timed(2, 64, 0.1), Timed(4, 64, 0.05)]).max_padding == 8.0
    assert 256 <= choose(timings(0.0, 1e-5)).max_batch_cost <= 1024
    assert 64 <= choose(timings(0.0, 1e-4)).max_batch_cost <= 128


@subcases(("share", "found"), [(0.0, 0.0), (0.2, 0.2), (1.0, 1.0), (1.5, 1.0), (-0.1, 0.0)])
def test_what_padding_costs_is_measured_beside_it(share: float, found: float) -> None:
    even = timings(4e-3, 1e-4)
    seconds = 4e-3 + 1e-4 * (176 + 336 * share)
    budget = choose([*even, Timed(32, 16, seconds, 336), Timed(8, 64, seconds, 336)])
    assert budget.padding_cost == pytest.approx(found, abs=1e-3)
    assert budget.max_batch_cost == choose(even).max_batch_cost
    assert budget.max_padding == choose(even).max_padding


Seconds = Callable[[Size, int], float]


def measured(seconds: Seconds, *lengths: int, mixed: bool = False) -> tuple[MeasuringRounds, list[Size]]:
    """Measure: a size takes `seconds` the nth time. Return what came of it, and each size as often as it was measured."""
    rounds, sizes = MeasuringRounds(lengths, mixed=mixed), list[Size]()
    while due := rounds.due():
        assert len(set(due)) == len(due)  # each once in a round
        for size in due:
            rounds.note(size, seconds(size, sizes.count(size)))
            sizes.append(size)
    return rounds, sizes


def steady(size: Size, time: int) -> float:
    """Take 1 ms a token."""
    return 1e-3 * sum(size.lengths)


def test_sizes_double_until_one_takes_long_or_two_are_clearly_slower() -> None:
    found, _ = measured(lambda size, time: 1e-5 * size.rows ** (1 if size.rows < 8 else 1.5), 16)
    assert [timed.rows for timed in found.timed()] == [1, 2, 4, 8, 16]
    rounds, sizes = measured(steady, 16, 64, 256)
    assert rounds.timed() == [
        *(Timed(rows, 16, 0.016 * rows, 0) for rows in (1, 2, 4, 8, 16)),
        *(Timed(rows, 64, 0.064 * rows, 0) for rows in (1, 2, 4)),
        Timed(1, 256, 0.256, 0),
    ]
    assert sizes.count(Size(8, 16)) == sizes.count(Size(2, 64)) == calibration.MIN_TIMES
    assert sizes.count(Size(16, 16)) == sizes.count(Size(1, 256)) == calibration.SLOW_TIMES
    assert rounds.doubtful <= calibration.MAX_DOUBTFUL and rounds.share <= 1


def test_what_is_shorter_is_a_quarter_as_long() -> None:
    rounds, _ = measured(steady, 16, 256, mixed=True)
    found = [timed for timed in rounds.timed() if timed.padding]
    assert [(timed.rows, timed.length, timed.padding) for timed in found] == [(16, 16, 14 * 12), (2, 256, 192)]
    assert [timed.seconds for timed in found] == pytest.approx([0.088, 0.320])
    assert Size(2, 2, 1).lengths == [2, 1]


def test_a_size_is_measured_again_until_two_times_are_close_or_in_vain() -> None:
    rounds, sizes = measured(lambda size, time: calibration.LONGEST_SECONDS * (1 + (time if time < 5 else 0)), 16)
    assert (len(sizes), rounds.timed()[0].seconds, rounds.doubtful) == (6, calibration.LONGEST_SECONDS, 0)
    rounds, sizes = measured(lambda size, time: 1.0 / 2**time, 16)
    assert (sizes.count(Size(1, 16)), rounds.doubtful > calibration.MAX_DOUBTFUL) == (calibration.MAX_TIMES, True)
    rounds, sizes = measured(lambda size, time: calibration.SERVER_SECONDS / 2**time, 16)
    assert (sizes.count(Size(1, 16)), rounds.doubtful) == (calibration.MIN_TIMES, 0)  # what the server takes is more


def test_there_is_an_end_also_where_all_takes_long() -> None:
    rounds, sizes = measured(lambda size, time: calibration.MAX_SECONDS / 2**time, 16, 64)
    assert ([sizes.count(Size(1, length)) for length in (16, 64)], rounds.doubtful) == (
        [calibration.SLOW_TIMES, calibration.SLOW_TIMES],
        1,
    )
