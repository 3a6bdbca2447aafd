"""calibration.py: a model is measured once on a machine."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.embedding.text_models import Summing

from weir.embedding import calibration
from weir.embedding.calibration import Budget, budget_for
from weir.embedding.texts import Tokens
from weir.testing import FakeClock, FakeExecutor


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

    options: dict[str, Any] = {
        "params": {},
        "safe_tokens": 512,
        "identity": {"model": "a"},
        "max_length": 256,
        "folder": folder,
    } | more
    options |= {"executor": FakeExecutor(answer), "clock": clock}
    found = asyncio.run(budget_for(Summing, progress=lambda *each: shown.append(each), **options))
    return found, shown


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    first, shown = budget(tmp_path / "made")
    assert (shown[0], shown[-1]) == ((0.0, "starting a worker"), (1.0, "done"))
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


def test_what_was_measured_while_much_else_ran_is_neither_used_nor_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random = Random(1)
    found, _ = budget(tmp_path, lambda: 2 ** random.randint(0, 9))
    assert (found.max_batch_cost, found.max_batch_size, found.max_padding, found.padding_cost) == (512.0, 64, 16.0, 1.0)
    assert list(tmp_path.iterdir()) == []
    assert "of 512 tokens until they are measured at the next start" in caplog.text
    assert budget(tmp_path)[1] != []
    assert budget(tmp_path)[1] == []


def test_the_measurements_that_were_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MOST_KEPT", 2)
    names = [{"model": name} for name in "abc"]
    for place, name in enumerate(names[:2], start=1):
        before = set(tmp_path.iterdir())
        budget(tmp_path, max_length=8, identity=name)
        (made,) = set(tmp_path.iterdir()) - before
        os.utime(made, (place, place))
    assert budget(tmp_path, max_length=8, identity=names[0])[1] == []  # used once more
    assert budget(tmp_path, max_length=8, identity=names[2])[1] != []
    assert len(list(tmp_path.iterdir())) == 2
    assert budget(tmp_path, max_length=8, identity=names[0])[1] == []
    assert budget(tmp_path, max_length=8, identity=names[1])[1] != []


@pytest.mark.parametrize("text", ["", "{}", '{"budget": {"more": 1}}', '{"budget": 3}'])
def test_what_cannot_be_read_is_measured_anew(tmp_path: Path, text: str) -> None:
    budget(tmp_path, max_length=8)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert budget(tmp_path, max_length=8)[1] != []
    assert budget(tmp_path, max_length=8)[1] == []


def test_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        assert budget(tmp_path / "file", max_length=8)[1] != []
