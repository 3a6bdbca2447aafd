import os
import subprocess
import sys
from pathlib import Path

import pytest

import weir
from weir.errors import SettingsError
from weir.policy.cost.profile import Profile
from weir.workers.launch import MALLOC, SILENCE, THREAD_VARIABLES, Launch, available_cpus, pinned, unpinned
from weir.workers.settings import WorkerSettings

ROOT = str(Path(weir.__file__).parents[1])


def environment(settings: WorkerSettings, index: int = 0, **inherited: str) -> dict[str, str]:
    return Launch("tried", index, b"", settings, 64).environment(inherited)


def test_the_environment_is_inherited_and_each_worker_adds_its_own() -> None:
    settings = WorkerSettings(workers=3, env=[{"GPU": "0"}, {"GPU": "1"}])

    found = [environment(settings, index, HOME="/here", GPU="9") for index in range(3)]

    assert [one["GPU"] for one in found] == ["0", "1", "0"]
    assert all(one["HOME"] == "/here" for one in found)


def test_thread_limits_are_variables_that_the_workers_own_environment_overrides() -> None:
    settings = WorkerSettings(threads=2, env=[{"OMP_NUM_THREADS": "5"}])

    found = environment(settings, MKL_NUM_THREADS="16")

    assert {name: found[name] for name in THREAD_VARIABLES} == {
        **dict.fromkeys(THREAD_VARIABLES, "2"),
        "OMP_NUM_THREADS": "5",
    }
    assert not set(THREAD_VARIABLES) & set(environment(WorkerSettings()))


def test_memory_is_kept_between_batches_unless_the_server_was_told_otherwise() -> None:
    assert environment(WorkerSettings()).items() >= (MALLOC | SILENCE).items()
    assert environment(WorkerSettings(), MALLOC_TRIM_THRESHOLD_="1")["MALLOC_TRIM_THRESHOLD_"] == "1"


def test_the_process_finds_this_weir_wherever_it_lies() -> None:
    assert environment(WorkerSettings())["PYTHONPATH"] == ROOT
    assert environment(WorkerSettings(), PYTHONPATH="/there")["PYTHONPATH"] == f"{ROOT}{os.pathsep}/there"
    assert environment(WorkerSettings(), PYTHONPATH=ROOT)["PYTHONPATH"] == ROOT


def test_a_weir_that_is_installed_needs_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: ROOT)

    assert "PYTHONPATH" not in environment(WorkerSettings())


def test_nothing_is_loaded_before_the_process_is_bound_to_its_server_and_its_cpus() -> None:
    heavy = {"numpy", "msgspec", "asyncio", "pydantic", "cloudpickle", "logging"}
    script = "import sys, weir.workers.process; print(*sys.modules)"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert not heavy & set(done.stdout.split())


def test_a_process_whose_server_has_gone_already_does_not_start() -> None:
    program = [sys.executable, "-m", "weir.workers.process", "tried/0", "1", "", "0", "-1", "0", "-1", "0"]

    done = subprocess.run(program, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_computes_for_a_server_that_is_pinned_is_not() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    chosen = Launch("tried", 0, b"", WorkerSettings(cpu_affinity=[allowed[:1]]), 64)
    free = Launch("tried", 0, b"", WorkerSettings(), 64)

    assert (unpinned(), available_cpus(), free._cpus) == ([], allowed, [])
    with pinned([]):
        assert unpinned() == []
    with pinned(allowed[:1]):
        assert sorted(os.sched_getaffinity(0)) == allowed[:1]
        assert unpinned() == available_cpus() == free._cpus == allowed
        assert chosen._cpus == allowed[:1]
    assert (sorted(os.sched_getaffinity(0)), unpinned()) == (allowed, [])
    with pytest.raises(SettingsError, match=r"server_cpu_affinity=\[999\]: must be among the CPUs"), pinned([999]):
        pass


def test_a_command_that_solves_computes_in_one_thread(tmp_path: Path) -> None:
    """OpenBLAS has a thread for each processor, all of which spin while one is late."""
    profile = tmp_path / "tried.toml"
    profile.write_text(Profile.linear(alpha_ms=1.0, tau0_ms=2.0, max_batch_size=4).to_toml())
    script = (
        "import os, sys; from weir.cli import main; sys.argv[1:] = ['solve', sys.argv[1]]\n"
        "try: main()\nexcept SystemExit: print(len(os.listdir('/proc/self/task')))"
    )
    without = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    command = [sys.executable, "-c", script, str(profile)]

    said = subprocess.run(command, env=without, capture_output=True, text=True, check=True).stdout

    assert said.splitlines()[-1] == "1"
