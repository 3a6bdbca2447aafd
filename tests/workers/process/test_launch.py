import _thread
import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.workers.models import Draws, Forked, Reports, SharesNothing, Square, forked_from
from tests.workers.pools import Pool, Recorder, make_pool, started

import weir
from weir.config import SILENCE
from weir.errors import ModelError
from weir.policy.cost import Profile
from weir.workers.cpus import THREAD_VARIABLES
from weir.workers.process.entry import hurry
from weir.workers.process.launch import MALLOC, Launch, Popen, Template, Templates, start_process
from weir.workers.process.program import obey
from weir.workers.settings import WorkerSettings

ROOT = str(Path(weir.__file__).parents[1])


def environment(settings: WorkerSettings, index: int = 0, **inherited: str) -> dict[str, str]:
    return Launch("tried", index, b"", settings, 64).environment(inherited)


def test_the_environment_is_inherited_and_each_worker_adds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerSettings(workers=3, env=[{"GPU": "0"}, {"GPU": "1"}])
    found = [environment(settings, index, HOME="/here", GPU="9") for index in range(3)]
    assert [(one["GPU"], one["HOME"]) for one in found] == [("0", "/here"), ("1", "/here"), ("0", "/here")]
    # Memory is kept between batches by default, and the process finds this Weir wherever it lies.
    assert environment(WorkerSettings()).items() >= (MALLOC | SILENCE | {"PYTHONPATH": ROOT}).items()
    assert environment(WorkerSettings(), MALLOC_TRIM_THRESHOLD_="1")["MALLOC_TRIM_THRESHOLD_"] == "1"
    assert environment(WorkerSettings(), PYTHONPATH="/there")["PYTHONPATH"] == f"{ROOT}{os.pathsep}/there"
    assert environment(WorkerSettings(), PYTHONPATH=ROOT)["PYTHONPATH"] == ROOT
    monkeypatch.setattr("sysconfig.get_path", lambda name: ROOT)
    assert "PYTHONPATH" not in environment(WorkerSettings())  # it is installed


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("entry", {"numpy", "msgspec", "asyncio", "pydantic", "cloudpickle", "logging"}),
        ("program", {"numpy", "asyncio", "pydantic", "cloudpickle", "pathlib", "urllib"}),
    ],
)
def test_a_worker_loads_little_of_its_own(module: str, heavy: set[str]) -> None:
    """And nothing before it is bound to its server and its CPUs."""
    script = f"import sys, weir.workers.process.{module}; print(*sys.modules)"
    env = {"PATH": os.environ["PATH"]}  # without what plants faults or slows, which loads modules
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    assert not heavy & set(done.stdout.split())


def test_a_process_whose_server_has_gone_already_does_not_start() -> None:
    program = [
        sys.executable,
        "-m",
        "weir.workers.process.entry",
        *["worker", "tried/0", "1"],
        "",
        *["0", "-1", "0", "-1", "0"],
    ]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_command_that_solves_computes_in_one_thread(tmp_path: Path) -> None:
    """OpenBLAS has a thread for each processor, all of which spin while one is late."""
    profile = tmp_path / "tried.toml"
    profile.write_text(Profile.linear(alpha_ms=1.0, tau0_ms=2.0, max_batch_size=4).to_toml())
    script = (
        "import os, sys; from weir.cli import main; sys.argv[1:] = ['solve', sys.argv[1], '--rate', '100']\n"
        "try: main()\nexcept SystemExit: print(len(os.listdir('/proc/self/task')))"
    )
    without = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    command = [sys.executable, "-c", script, str(profile)]

    said = subprocess.run(command, env=without, capture_output=True, text=True, check=True).stdout

    assert said.splitlines()[-1] == "1"


async def test_what_is_loaded_for_all_is_loaded_once_and_each_worker_has_it() -> None:
    async with started(Forked, workers=3, pipeline_depth=2) as pool:
        told = await pool.ask_all("tell")
        pids = [state.pid for state in pool.pool.states()]
        assert [each["pid"] for each in told] == pids
        assert [each["index"] for each in told] == [0, 1, 2]
        assert {each["loaded_by"] for each in told} == {forked_from(told[0]["pid"])}
        assert len({each["address"] for each in told}) == 1
        assert all(each["own"] == each["pid"] for each in told)
        assert [os.getpgid(pid) for pid in pids if pid] == pids


async def test_a_worker_that_dies_is_forked_again_and_the_reason_reported() -> None:
    async with started(Forked, workers=2) as pool:
        before = (await pool.ask("tell"))[0]
        os.kill(before["pid"], signal.SIGKILL)
        await pool.again(3)
        after = (await pool.ask("tell"))[0]
        assert after["pid"] != before["pid"]
        assert after["loaded_by"] == before["loaded_by"]
        pool.send("exit")
        await pool.again(4)
        (_, killed), exited = pool.heard.lost
        assert "signal 9" in killed and exited == (0, "it exited with code 7")


async def test_workers_end_with_what_they_are_forked_from() -> None:
    async with started(Forked, workers=2) as pool:
        template = (await pool.ask("tell"))[0]["loaded_by"]
        os.kill(template, signal.SIGKILL)
        await pool.heard.until(lambda: len(pool.heard.ready) == 4)
        told = await pool.ask_all("tell")
        assert all(each["loaded_by"] == each["pid"] for each in told)


@pytest.mark.parametrize(("model", "settings"), [(SharesNothing, {}), (Forked, {"env": [{"A": "1"}, {"A": "2"}]})])
async def test_where_nothing_can_be_shared_each_worker_loads_by_itself(model: Any, settings: dict[str, Any]) -> None:
    async with started(model, workers=2, **settings) as pool:
        told = await pool.ask_all("tell")
        assert all(each["loaded_by"] == each["pid"] for each in told)


async def test_one_worker_needs_no_other_process_and_those_that_join_it_share() -> None:
    async with started(Forked) as pool:
        for _ in range(2):
            await pool.pool.add_worker()
        told = await pool.ask_all("tell")
        assert told[0]["loaded_by"] == told[0]["pid"]
        assert told[1]["loaded_by"] == told[2]["loaded_by"] == forked_from(told[1]["pid"])


async def test_a_pool_that_is_given_up_while_it_loads_leaves_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    pool = make_pool(Forked, {"slow": str(tmp_path / "begun")}, workers=2)
    starting = asyncio.ensure_future(pool.start(Recorder()))
    assert await asyncio.to_thread((tmp_path / "begun").read_text) == "begun"
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    await pool.stop()


def parents(*pools: Pool) -> list[int]:
    return [forked_from(state.pid) for pool in pools for state in pool.pool.states() if state.pid is not None]


async def test_workers_of_different_models_are_forked_from_one_template() -> None:
    templates = Templates()
    async with started(Forked, templates=templates) as first, started(Reports, templates=templates) as second:
        (template, other) = parents(first, second)
        assert template == other != os.getpid()
        assert (await first.ask("tell"))[0]["loaded_by"] == first.pool.states()[0].pid
        name, pid, loaded_in = (await second.ask(1))[0]
        assert (name, pid, loaded_in) == ("Reports", second.pool.states()[0].pid, pid)
        assert os.getpgid(pid) == pid
        second.send("exit")
        await second.again()
        assert second.heard.lost == [(0, "it exited with code 3")]
        assert parents(second) == [template]
    await templates.close()


async def test_a_template_that_dies_is_replaced_and_so_are_its_workers() -> None:
    templates = Templates()
    async with started(Reports, templates=templates) as pool:
        (template,) = parents(pool)
        os.kill(template, signal.SIGKILL)
        await pool.again()
        assert parents(pool) == [os.getpid()]
        async with started(Reports, templates=templates) as later:
            assert (await later.ask(1))[0][0] == "Reports"
            assert template not in parents(later)
            assert os.getpid() not in parents(later)
    await templates.close()


async def test_a_worker_with_variables_of_its_own_is_a_program() -> None:
    templates = Templates()
    async with (
        started(Reports, templates=templates, env=[{"A": "1"}]) as own,
        started(Reports, templates=templates, threads=1) as one,
    ):
        assert parents(own) == [os.getpid()]
        async with started(Reports, templates=templates, threads=2) as two:
            assert len({os.getpid(), *parents(one, two)}) == 3
    await templates.close()


async def test_forked_workers_draw_different_numbers_and_end_as_programs_do(tmp_path: Path) -> None:
    templates = Templates(["no_such_module", "numpy.random"])
    async with started(Draws, templates=templates) as first, started(Draws, templates=templates) as second:
        drawn = [(await pool.ask(str(tmp_path / str(number))))[0] for number, pool in enumerate((first, second))]
        assert drawn[0] != drawn[1]
    assert [(tmp_path / str(number)).read_text() for number in range(2)] == ["ended", "ended"]
    await templates.close()


async def test_where_no_template_starts_workers_are_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> bool:
        raise OSError(errno.EAGAIN, "no process")

    monkeypatch.setattr(Template, "start", refuse)
    templates = Templates()
    async with started(Reports, templates=templates) as pool:
        assert parents(pool) == [os.getpid()]
    await templates.close()


async def test_a_cpu_is_the_workers_own() -> None:
    cpu = min(os.sched_getaffinity(0))
    async with started(Forked, workers=2, cpu_affinity=[[cpu]]) as pool:
        assert (await pool.ask("tell"))[0]["cpus"] == [cpu]


def never(*_: object) -> NoReturn:
    """Be a process that was not forked."""
    raise AssertionError("nothing was forked")


async def answer(ask: Callable[..., None], *arguments: Any) -> Any:
    """Return what a template answers."""
    answered = asyncio.get_running_loop().create_future()
    ask(*arguments, answered.set_result)
    return await answered


async def test_a_fork_that_the_system_refuses_leaves_the_others_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    ours, theirs = socket.socketpair()
    monkeypatch.setattr("os.fork", refuse)
    obeying = threading.Thread(target=obey, args=(theirs, never))
    obeying.start()
    template = Template()
    template.attach(ours)
    for _ in range(2):  # it goes on
        refusal = await answer(template.fork, {}, [])
        assert isinstance(refusal, BlockingIOError)
        assert "Resource temporarily unavailable" in str(refusal)
    template.close()
    assert await answer(template.fork, {}, []) is None
    assert await answer(template.reap, 1) == -signal.SIGKILL
    obeying.join()
    theirs.close()


async def hang(pool: Pool) -> int:
    """Stop the process that the workers are forked from, then kill one of them."""
    victim = (await pool.ask("tell"))[0]
    os.kill(victim["loaded_by"], signal.SIGSTOP)
    os.kill(victim["pid"], signal.SIGKILL)
    await pool.heard.until(lambda: bool(pool.heard.lost))
    return int(victim["loaded_by"])


async def test_a_template_that_hangs_holds_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.workers.process.launch.PATIENCE", 1000.0)
    monkeypatch.setattr("weir.workers.process.supervision.END_GRACE", 0.01)
    async with started(Forked, workers=2) as pool:
        template = await hang(pool)
        for _ in range(3):
            assert (await pool.ask("tell", worker=1))[0]["loaded_by"] == template
        os.kill(template, signal.SIGCONT)
        await pool.again(3)
        assert (await pool.ask("tell"))[0]["loaded_by"] == template


async def test_a_template_that_goes_on_hanging_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(Forked, workers=2) as pool:
        # Not before: a busy machine takes longer to fork the first.
        monkeypatch.setattr("weir.workers.process.launch.PATIENCE", 0.05)
        monkeypatch.setattr("weir.workers.process.supervision.END_GRACE", 0.01)
        await hang(pool)
        await pool.heard.until(lambda: len(pool.heard.ready) == 4)
        told = await pool.ask_all("tell")
        assert all(each["loaded_by"] == each["pid"] for each in told)


async def test_a_pool_stops_while_its_template_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.workers.process.supervision.END_GRACE", 0.01)
    async with started(Forked, workers=3) as pool:
        await hang(pool)


SLEEP = ["sleep", "1000"]
ASKS_TO_END = """
import os, sys, threading
from weir.workers.process.entry import die_with
from weir.workers.run.runner import RunnableModel, Runner
die_with(int(sys.argv[1]))
os.write(int(sys.argv[2]), b"1")
threading.Event().wait()
"""


class SlowStarts:
    """Lets no process be started before the test does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.begun = threading.Event()
        self.started: list[Popen] = []
        self._start: Callable[..., Popen] = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", self._slow)

    def _slow(self, *arguments: Any, **rest: Any) -> Popen:
        self.entered.release()
        self.go_on.wait()
        self.started.append(self._start(*arguments, **rest))
        self.begun.set()
        return self.started[-1]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowStarts:
    return SlowStarts(monkeypatch)


async def test_the_loop_goes_on_while_a_process_is_started(slow: SlowStarts) -> None:
    pool = make_pool(Square)
    starting = asyncio.create_task(pool.start(Recorder()))
    await asyncio.to_thread(slow.entered.acquire)
    assert pool.pids() == []
    slow.go_on.set()
    await starting
    assert pool.pids() == [slow.started[0].pid]
    await pool.stop()


@pytest.mark.parametrize(("model", "workers"), [(Square, 1), (Forked, 2)])
async def test_a_start_that_is_cancelled_leaves_no_process(slow: SlowStarts, model: Any, workers: int) -> None:
    pool = make_pool(model, workers=workers)
    starting = asyncio.create_task(pool.start(Recorder()))
    await asyncio.to_thread(slow.entered.acquire)
    starting.cancel()
    await asyncio.sleep(0)
    slow.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    # A template ends by itself, if its socket is closed before it is killed.
    assert None not in [each.returncode for each in slow.started]


def test_a_process_whose_loop_was_closed_meanwhile_is_ended(slow: SlowStarts) -> None:
    async def main() -> None:
        start_process(SLEEP, {"PATH": "/usr/bin:/bin"}, [], lambda _: None)

    asyncio.run(main())
    slow.go_on.set()
    slow.begun.wait()
    slow.started[0].wait()
    assert slow.started[0].returncode == -9


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"), [(["/no/such/program"], {}, "No such file"), (SLEEP, {"A": "b\0c"}, "null")]
)
async def test_what_cannot_be_started_is_reported(
    arguments: list[str], environment: dict[str, str], reason: str
) -> None:
    told: asyncio.Future[Popen | OSError] = asyncio.get_running_loop().create_future()
    start_process(arguments, environment, [], told.set_result)
    assert reason in str(await told)


def test_a_system_without_threads_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    # As where no process has been started yet.
    monkeypatch.setattr("weir.workers.process.launch._of_thread", threading.local())
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    with pytest.raises(ModelError, match=r"the process cannot be started: .* can't start new thread"):
        asyncio.run(make_pool(Square).start(Recorder()))


def test_processes_end_with_the_thread_that_started_them() -> None:
    ours, theirs = os.pipe()

    async def start() -> None:
        told: asyncio.Future[Popen | OSError] = asyncio.get_running_loop().create_future()
        arguments = [sys.executable, "-c", ASKS_TO_END, str(os.getpid()), str(theirs)]
        start_process(arguments, dict(os.environ), [theirs], told.set_result)
        popen = await told
        assert not isinstance(popen, OSError)
        begun.append(popen)
        os.close(theirs)
        assert await asyncio.to_thread(os.read, ours, 1) == b"1"
        assert popen.poll() is None

    begun: list[Popen] = []
    thread = threading.Thread(target=asyncio.run, args=(start(),))
    thread.start()
    thread.join()
    os.close(ours)
    assert begun[0].wait() == -9


# The first code of a worker process.


def test_a_process_that_is_to_end_is_no_longer_idle_for_the_kernel() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        hurry(process.pid)
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER
        process.kill()
        process.wait()
        hurry(process.pid)  # it is gone
