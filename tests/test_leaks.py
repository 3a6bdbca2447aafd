"""The check for what tests leave behind finds it, and passes over what is there for an instant."""

import os
from pathlib import Path

import pytest
from tests import leaks
from tests.leaks import no_leaks


def test_a_descriptor_that_stays_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE", 0.05)
    with pytest.raises(AssertionError, match=r"left.txt.*MainThread"), no_leaks():
        kept = os.open(tmp_path / "left.txt", os.O_CREAT)
    os.close(kept)
