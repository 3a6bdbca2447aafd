"""How many CPUs there are is known in one place, which knows the quota of a container too."""

import math
import os
from pathlib import Path

import pytest

import weir
from weir.catalog.loading import for_measuring
from weir.errors import SettingsError
from weir.workers import cpus
from weir.workers.process.launch import Launch
from weir.workers.settings import ONE_WORKER, WorkerSettings

SOURCE = Path(weir.__file__).parent


def quota(tmp_path: Path, groups: str, files: dict[str, str]) -> float:
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return cpus.cpu_quota(tmp_path / "cgroup", tmp_path / "sys")


V1 = "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n1:name=systemd:/docker/ab\n"
FILES_V1 = {"cpu,cpuacct/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(("groups", "files", "expected"), [
    ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
    ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
    ("0::/\n", {}, math.inf),
    ("0::/kube/pod/c\n", {"kube/pod/c/cpu.max": "max 100000", "kube/pod/cpu.max": "50000 100000", "kube/cpu.max": "400000 100000"}, 0.5),
    ("0::/docker/ab\n", {"cpu.max": "300000 100000\n"}, 3.0),  # the group of a container is mounted as the root there
    (V1, FILES_V1, 1.5),
    (V1, {"cpu/docker/ab/cpu.cfs_quota_us": "400000", "cpu/docker/ab/cpu.cfs_period_us": "100000"}, 4.0),
    (V1, {**FILES_V1, "cpu,cpuacct/cpu.cfs_quota_us": "-1\n"}, math.inf),
    (f"{V1}0::/\n", FILES_V1, 1.5),  # both versions
    ("nonsense", {}, math.inf),
])  # fmt: skip
def test_the_quota_is_read_from_either_version(
    tmp_path: Path, groups: str, files: dict[str, str], expected: float
) -> None:
    assert quota(tmp_path, groups, files) == expected


def test_where_there_are_no_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpus.cpu_quota(tmp_path / "none", tmp_path) == math.inf


def machine(monkeypatch: pytest.MonkeyPatch, count: int, limit: float = math.inf) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(count)))
    monkeypatch.setattr(cpus, "cpu_quota", lambda: limit)


@pytest.mark.parametrize(
    ("count", "limit", "expected"), [(64, math.inf, 64), (64, 2.0, 2), (64, 2.9, 2), (64, 0.5, 1), (2, 8.0, 2)]
)
def test_a_quota_and_the_affinity_bound_the_number(
    monkeypatch: pytest.MonkeyPatch, count: int, limit: float, expected: int
) -> None:
    machine(monkeypatch, count, limit)
    assert cpus.cpu_count() == expected


@pytest.mark.parametrize(("settings", "limit", "expected"), [
    (WorkerSettings(), math.inf, 8),
    (WorkerSettings(workers=2), math.inf, 4),
    (WorkerSettings(workers=3), math.inf, 2),
    (WorkerSettings(workers=16), math.inf, 1),
    (WorkerSettings(workers="1..4"), math.inf, 2),
    (WorkerSettings(workers=2), 2.0, 1),
    (WorkerSettings(workers=2, cpu_affinity=[[0, 1], [2, 3, 4]]), math.inf, 2),
    (WorkerSettings(workers=2, cpu_affinity=[[0, 1, 2, 3]]), math.inf, 2),
    (WorkerSettings(workers=2, cpu_affinity=[[0, 1], [2, 3, 4]]), 3.0, 1),
])  # fmt: skip
def test_workers_divide_the_cpus(
    monkeypatch: pytest.MonkeyPatch, settings: WorkerSettings, limit: float, expected: int
) -> None:
    machine(monkeypatch, 8, limit)
    assert cpus.share_of_cpus(settings, 0) == expected


def threads(settings: WorkerSettings, **inherited: str) -> set[str]:
    environment = Launch("tried", 0, b"", settings, 64).environment(inherited)
    return {environment[name] for name in cpus.THREAD_VARIABLES}


def test_a_worker_has_the_threads_that_it_was_told_or_else_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8)
    two = WorkerSettings(workers=2)
    assert threads(two) == {"4"}
    assert threads(two, OMP_NUM_THREADS="3") == {"3"}
    assert threads(two, MKL_NUM_THREADS="3") == {"4", "3"}
    assert threads(WorkerSettings(workers=2, env=[{"OMP_NUM_THREADS": "5"}]), OMP_NUM_THREADS="3") == {"5"}
    assert threads(WorkerSettings(workers=2, threads=6), OMP_NUM_THREADS="3") == {"6"}


def test_what_is_measured_has_the_threads_of_one_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert for_measuring({"workers": 2}) == {**ONE_WORKER, "policy": "greedy", "threads": 4}
    assert for_measuring({"workers": 2, "threads": 1})["threads"] == 1
    assert "threads" not in for_measuring({"workers": 2, "executor": "thread"})
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "threads" not in for_measuring({"workers": 2})


def test_a_library_in_a_process_asks_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8, 3.0)
    for stated, expected in (("2", 2), ("4,2", 4), ("", 3), ("many", 3), ("0", 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", stated)
        assert cpus.threads_here() == expected


def test_what_computes_for_a_server_that_is_pinned_is_not() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    chosen = Launch("tried", 0, b"", WorkerSettings(cpu_affinity=[allowed[:1]]), 64)
    free = Launch("tried", 0, b"", WorkerSettings(), 64)

    assert (cpus.unpinned(), cpus.affinity(), free._cpus) == ([], allowed, [])
    with cpus.pinned([]):
        assert cpus.unpinned() == []
    with cpus.pinned(allowed[:1]):
        assert sorted(os.sched_getaffinity(0)) == allowed[:1]
        assert cpus.unpinned() == cpus.affinity() == free._cpus == allowed
        assert chosen._cpus == allowed[:1]
    assert (sorted(os.sched_getaffinity(0)), cpus.unpinned()) == (allowed, [])
    with pytest.raises(SettingsError, match=r"server_cpu_affinity=\[999\]: must be among the CPUs"), cpus.pinned([999]):
        pass
