"""Batch jobs keep their promises on a disk that fails, whatever befalls the server; what is not durable is missed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.rings import spread
from tests.simulated.disk import SimulatedDisk
from tests.simulated.jobs import JobWorld, simulate_jobs

from weir.jobs.store import Disk


@pytest.mark.parametrize("first", spread(range(0, 32, 8)))
def test_jobs_have_their_ends_on_a_disk_that_fails(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[bool] = []
    die = JobWorld.die

    def counted(self: JobWorld, *, power: bool = False) -> None:
        died.append(power)
        die(self, power=power)

    monkeypatch.setattr(JobWorld, "die", counted)
    assert [f"{seed}: {fault}" for seed in range(first, first + 8) if (fault := simulate_jobs(seed).fault)] == []
    assert died.count(True) > 0
    assert died.count(False) > 2


def test_a_seed_of_jobs_replays_to_the_byte() -> None:
    again = subprocess.run(
        [sys.executable, "-m", "tests.simulated", "--disk", "--seed", "16"],
        env=os.environ | {"PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"trace {simulate_jobs(16).trace}" in again.stdout


def test_files_that_are_not_durable_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(self: SimulatedDisk, part: Path, path: Path) -> int:
        self.rename(part, path)
        return path.stat().st_size

    monkeypatch.setattr(Disk, "keep", kept)
    assert "a job is failed" in simulate_jobs(5).fault
