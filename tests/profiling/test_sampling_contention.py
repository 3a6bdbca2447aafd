import os
from pathlib import Path

import pytest

from weir.profiling.sampling import Contention


def waited(proc: Path, pid: int, thread: int, nanoseconds: int) -> None:
    """Let a thread have waited for so long."""
    folder = proc / str(pid) / "task" / str(thread)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedstat").write_text(f"123456789 {nanoseconds} 17\n")


def test_of_a_process_the_thread_that_waited_most_counts_and_processes_add_up(tmp_path: Path) -> None:
    for pid, thread in ((7, 7), (7, 8), (9, 9)):
        waited(tmp_path, pid, thread, 1_000_000_000)
    contention = Contention([7, 9], tmp_path)
    before = contention.look()
    assert contention.since(before) == 0.0
    waited(tmp_path, 7, 7, 1_010_000_000)
    waited(tmp_path, 7, 8, 1_030_000_000)
    waited(tmp_path, 9, 9, 1_005_000_000)
    assert contention.since(before) == pytest.approx(0.035)


def test_a_thread_that_began_meanwhile_counts_with_all_that_it_waited(tmp_path: Path) -> None:
    waited(tmp_path, 7, 7, 5_000_000)
    contention = Contention([7], tmp_path)
    before = contention.look()
    waited(tmp_path, 7, 8, 5_400_000)  # and ran 17 times
    assert contention.since(before) == pytest.approx(0.002)


def test_waking_up_is_no_contention(tmp_path: Path) -> None:
    """2 ms in ten times are waking up; what is more is not."""
    waited(tmp_path, 7, 7, 0)
    contention = Contention([7], tmp_path)
    before = contention.look()
    for nanoseconds, seconds in ((2_000_000, 0.0), (3_500_000, 0.0015)):
        (tmp_path / "7" / "task" / "7" / "schedstat").write_text(f"123456789 {nanoseconds} 27\n")
        assert contention.since(before) == pytest.approx(seconds)


def test_a_kernel_that_does_not_count_and_a_process_that_has_ended_have_waited_for_nothing(tmp_path: Path) -> None:
    waited(tmp_path, 7, 7, 1)
    (tmp_path / "7" / "task" / "7" / "schedstat").write_text("")
    contention = Contention([7, 8], tmp_path)
    assert contention.since(contention.look()) == 0.0


def test_this_process_can_be_watched() -> None:
    contention = Contention([os.getpid()])
    assert contention.since(contention.look()) >= 0.0
