"""calibration.py: a model is measured once on a machine."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.embedding.text_models import Summing

from weir.embedding import calibration
from weir.embedding.budget import Budget
from weir.embedding.calibration import budget_for


def budget(folder: Path, **more: Any) -> tuple[Budget, list[tuple[float, str]]]:
    """Ask for a budget; return it, and the progress that was shown."""
    shown: list[tuple[float, str]] = []
    options: dict[str, Any] = {"params": {}, "identity": {"model": "a"}, "max_length": 64, "folder": folder} | more
    found = asyncio.run(budget_for(Summing, progress=lambda *each: shown.append(each), executor="inline", **options))
    return found, shown


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    first, shown = budget(tmp_path / "made")
    assert (shown[0], shown[-1]) == ((0.0, "starting a worker"), (1.0, "done"))
    assert {"1 x 16 tokens", "2 x 64 tokens"} <= {what for _, what in shown}
    assert 16 <= first.max_batch_cost <= 256 * 64
    (file,) = (tmp_path / "made").iterdir()
    assert {len(each) for each in json.loads(file.read_text())["measured"]} == {3}
    assert budget(tmp_path / "made") == (first, [])
    assert budget(tmp_path / "made", identity={"model": "b"})[1] != []


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
