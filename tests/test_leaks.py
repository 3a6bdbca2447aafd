"""The check for what tests leave behind finds it, and passes over what is there for an instant."""

import os
import threading
from pathlib import Path

import pytest
from tests import leaks
from tests.leaks import no_leaks


def test_a_descriptor_that_stays_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE", 0.05)
    with pytest.raises(AssertionError, match=r"left.txt.*MainThread"), no_leaks():
        kept = os.open(tmp_path / "left.txt", os.O_CREAT)
    os.close(kept)


def test_one_that_another_thread_has_open_for_an_instant_is_no_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = threading.Event()
    real = leaks.descriptors

    def look() -> dict[str, str]:
        found = real()
        if any(target.endswith("instant.txt") for target in found.values()):
            seen.set()  # it goes once it has been seen
        return found

    def open_until_seen() -> None:
        descriptor = os.open(tmp_path / "instant.txt", os.O_CREAT)
        opened.set()
        seen.wait()
        os.close(descriptor)

    opened = threading.Event()
    thread = threading.Thread(target=open_until_seen)
    monkeypatch.setattr(leaks, "descriptors", look)
    with no_leaks():
        thread.start()
        assert opened.wait(60)
    assert seen.is_set()
    thread.join()
