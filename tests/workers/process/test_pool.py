import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.rings import spread
from tests.waiting import until
from tests.workers import models
from tests.workers.pools import Pool, Recorder, make_pool, started

from weir.errors import ModelError, ModelNotReady, SettingsError
from weir.model import Model
from weir.workers.executor import shortage
from weir.workers.process import supervision


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_batches_go_out_and_come_back(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with started(models.Square, workers=2) as pool:
            assert sorted(pool.heard.ready) == [(0, 1), (1, 1)]
            first, second = await asyncio.gather(pool.ask(1, 2, 3), pool.ask(4, worker=1))
            assert (first, second) == ([1, 4, 9], [16])
            assert [state.state for state in pool.pool.states()] == ["ready", "ready"]
            assert [state.in_flight for state in pool.pool.states()] == [0, 0]
            assert pool.heard.events[1].final
            assert pool.heard.events[1].timing is not None
        assert [state.state for state in pool.pool.states()] == ["stopped", "stopped"]
        assert [state.pid for state in pool.pool.states()] == [None, None]
        assert (pool.heard.lost, pool.heard.reasons) == ([], [])

    run(main())


class Sharing(Model):
    """Answers with the share of its batch, when the file that is its item is there."""

    def predict(self, batch: list[str]) -> list[int]:
        while not Path(batch[0]).exists():
            time.sleep(0.001)
        return [self._share] * len(batch)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_batch_is_for_the_workers_that_have_none(depth: int, tmp_path: Path) -> None:
    (there := tmp_path / "there").touch()
    later = tmp_path / "later"
    async with started(Sharing, workers=4, pipeline_depth=depth) as pool:
        assert await pool.ask(str(there)) == [4]
        batches = [pool.send(str(later), worker=worker) for worker in (2, 0, 1, 3)]
        later.touch()
        assert [await pool.answer(batch) for batch in batches] == [[4], [2], [1], [1]]
        assert await pool.ask(str(there), worker=3) == [4]
        for others, share in ((1, 2), (2, 1), (60, 1)):
            assert await pool.answer(pool.send(str(there), others=others)) == [share]
        await pool.pool.remove_worker(3)
        assert await pool.ask(str(there)) == [3]


async def test_bulk_work_takes_no_share_and_leaves_all_to_others(tmp_path: Path) -> None:
    (there := tmp_path / "there").touch()
    later = tmp_path / "later"
    async with started(Sharing, workers=2, bulk_workers=1) as pool:
        pool.pool.start_bulk_workers()
        await pool.again(3)
        bulk = pool.send(str(later), worker=2)
        assert await pool.ask(str(there)) == [2]
        later.touch()
        assert await pool.answer(bulk) == [1]


@pytest.mark.parametrize("depth", spread([1, 2]))
async def test_a_worker_may_poll_before_it_sleeps(depth: int) -> None:
    async with started(models.Square, spin=0.001, pipeline_depth=depth) as pool:
        for number in range(20):
            assert await pool.ask(number) == [number * number]


async def test_a_model_may_be_named_instead_of_given(tmp_path: Path) -> None:
    file = tmp_path / "twice.py"
    file.write_text(
        "import weir\nclass Twice(weir.Model):\n    def predict(self, batch): return [2 * x for x in batch]\n"
    )
    async with started("tests.workers.models:Square") as pool:
        assert await pool.ask(3) == [9]
    async with started(f"{file}:Twice") as pool:
        assert await pool.ask(3) == [6]
    with pytest.raises(SettingsError, match="no such class"):
        await make_pool("tests.workers.models:Cube").start(Recorder())
    with pytest.raises(ModelError, match="ModuleNotFoundError"):
        await make_pool("tests.workers.nowhere:Cube").start(Recorder())


@pytest.mark.parametrize(
    ("model", "original", "line", "workers"),
    [
        (models.FailsInConstructor, "ValueError", 'raise ValueError("no weights for a constructor")', 1),
        (models.FailsInLoad, "LookupError", 'raise LookupError("no weights to load")', 3),
    ],
)
async def test_a_failure_at_the_start_has_the_traceback_of_the_worker(
    model: type[Model], original: str, line: str, workers: int
) -> None:
    heard = Recorder()
    with pytest.raises(ModelError, match="no weights") as caught:
        await make_pool(model, workers=workers).start(heard)
    assert caught.value.original_type == original
    assert line in caught.value.remote_traceback
    assert type(caught.value.__cause__).__name__ == original
    assert (heard.ready, heard.lost) == ([], [])


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        (models.ExitsInLoad, {}, "worker 0 of 'tried' did not start: it exited with code 5"),
        (models.NeverLoads, {"start_timeout": 0.3}, r"had not loaded within start_timeout=0\.3"),
    ],
)
async def test_a_worker_that_exits_or_hangs_while_it_loads_ends_the_start(
    model: type[Model], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        await make_pool(model, **settings).start(Recorder())


async def test_a_worker_that_ends_while_others_still_load_ends_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    pool, heard = make_pool(models.SecondWaits, {"fifo": str(tmp_path / "go")}, workers=2), Recorder()
    starting = asyncio.ensure_future(pool.start(heard))
    await until(lambda: pool.states() and pool.states()[0].state == "ready")
    pid = pool.states()[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: pool.states()[0].state == "failed")
    await asyncio.to_thread((tmp_path / "go").write_text, "now")
    with pytest.raises(ModelError, match="signal 9"):
        await starting
    assert heard.ready == []
    await pool.stop()


async def test_stopping_during_the_start_ends_it() -> None:
    pool = make_pool(models.NeverLoads)
    start = asyncio.ensure_future(pool.start(Recorder()))
    await asyncio.sleep(0)
    await pool.stop()
    with pytest.raises(ModelNotReady, match="stopped before it was ready"):
        await start


async def test_stop_unloads_each_model_and_may_be_called_at_any_time(tmp_path: Path) -> None:
    pool = make_pool(models.Noted, {"note": str(tmp_path / "note")})
    await pool.stop()
    await pool.start(Recorder())
    await asyncio.gather(pool.stop(), pool.stop())
    await pool.stop()
    assert (tmp_path / "note").read_text() == "unloaded 0"


async def test_a_model_that_accepts_it_receives_what_ended_its_worker(tmp_path: Path) -> None:
    async with started(models.ToldWhy, {"note": str(tmp_path / "note")}) as pool:
        pool.send("exit")
        await pool.heard.until(lambda: bool(pool.heard.lost))
        assert pool.heard.lost == [(0, "it exited with code 7")]
        assert (tmp_path / "note").read_text() == "SystemExit(7)"
        await pool.again()
    assert (tmp_path / "note").read_text() == "None"


async def test_a_worker_that_does_not_stop_is_killed_after_the_grace() -> None:
    pool = Pool(make_pool(models.Obedient, stop_grace=0.1), Recorder())
    await pool.pool.start(pool.heard)
    pool.send("spin")
    await pool.pool.stop()
    assert pool.pool.states()[0].pid is None


async def test_a_stop_that_is_cancelled_leaves_nothing_either() -> None:
    pool = Pool(make_pool(models.Obedient), Recorder())
    await pool.pool.start(pool.heard)
    pool.send("spin")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await pool.pool.stop()
    assert pool.pool.states()[0].pid is None


async def test_with_depth_two_a_batch_is_prepared_while_another_is_computed() -> None:
    async with started(models.Overlapping, pipeline_depth=2) as pool:
        assert pool.heard.ready == [(0, 2)]
        first, second = pool.send("first"), pool.send("second")
        assert pool.pool.states()[0].in_flight == 2
        assert await pool.answer(first) == [True]
        assert await pool.answer(second) == ["second"]


async def test_the_settings_of_each_worker_reach_it() -> None:
    cpu = min(os.sched_getaffinity(0))
    settings: dict[str, Any] = {
        "env": [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "7"}],
        "cpu_affinity": [[cpu]],
        "threads": 2,
    }
    async with started(models.Obedient, workers=2, **settings) as pool:
        first, affinity = await pool.ask("environment", "affinity", worker=0)
        (second,) = await pool.ask("environment", worker=1)
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    assert (first["OMP_NUM_THREADS"], second["OMP_NUM_THREADS"]) == ("2", "7")
    assert first["MKL_NUM_THREADS"] == "2"
    assert affinity == [cpu]


async def test_what_predict_prints_appears_where_the_server_prints(capfd: pytest.CaptureFixture[str]) -> None:
    async with started(models.Obedient) as pool:
        await pool.ask("write")
    assert capfd.readouterr() == ("said by predict\n", "complained by predict\n")


async def test_predict_reads_nothing_of_what_the_server_reads() -> None:
    async with started(models.Obedient) as pool:
        assert await pool.ask("read") == [""]


async def test_an_arena_of_no_bytes_is_none_at_all() -> None:
    async with started(models.Echo, arena_bytes=0) as pool:
        assert pool.pool.reserve(1) is None
        assert await pool.ask(b"x" * 100_000) == [b"x" * 100_000]
        assert pool.pool.gauges()["arena_bytes"] == 0


@pytest.mark.parametrize("refused", ["subprocess.Popen", "os.pidfd_open"])
def test_what_the_system_refuses_ends_the_start_and_leaves_nothing(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(refused, refuse)

    with pytest.raises(ModelError, match=r"worker 0 of 'tried': the process cannot be started: .* Too many open files"):
        asyncio.run(make_pool(models.Square).start(Recorder()))


@pytest.mark.parametrize(
    ("settings", "params", "rule"),
    [
        ({"arena_bytes": 1 << 60}, {}, rf"arena_bytes={1 << 60}: the system cannot allocate that much"),
        ({"arena_bytes": 1 << 70}, {}, rf"arena_bytes={1 << 70}: must be a number of at most 64 bits"),
        ({"cpu_affinity": [[999]]}, {}, r"cpu_affinity=\[999\]: must be among the CPUs"),
        ({}, {"note": threading.Lock()}, r"tried: model and params=.* must be picklable"),
    ],
)
async def test_what_the_machine_or_a_process_cannot_have_is_a_wrong_setting(
    settings: dict[str, Any], params: dict[str, Any], rule: str
) -> None:
    with pytest.raises(SettingsError, match=rule):
        await make_pool(models.Noted, params, **settings).start(Recorder())


# Workers for bulk work.


def policies(pid: int) -> set[int]:
    """Return the scheduling classes of the threads of a process."""
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}


async def test_bulk_workers_start_when_wanted_and_are_idle_for_the_kernel() -> None:
    async with started(models.Obedient, workers=1, bulk_workers=2) as pool:
        assert pool.heard.ready == [(0, 1)]
        for _ in range(2):  # once is enough
            pool.pool.start_bulk_workers()
        await pool.again(3)
        assert sorted(pool.heard.ready) == [(0, 1), (1, 1), (2, 1)]
        pids = {state.index: state.pid for state in pool.pool.states()}
        assert list(pids) == [0, 1, 2]
        assert await pool.ask("pid", "index", worker=2) == [pids[2], 2]
        assert [policies(pid or 0) for pid in pids.values()] == [
            {os.sched_getscheduler(0)}, {os.SCHED_IDLE}, {os.SCHED_IDLE}
        ]  # fmt: skip
        os.kill(pids[1] or 0, 9)
        await pool.again(4)
        assert [index for index, _ in pool.heard.lost] == [1]
        replaced = next(state.pid for state in pool.pool.states() if state.index == 1)
        assert policies(replaced or 0) == {os.SCHED_IDLE}
        await pool.pool.add_worker()
        assert pool.heard.ready[-1] == (3, 1)
        await pool.pool.remove_worker()
        assert [state.index for state in pool.pool.states()] == [0, 1, 2]
    assert {state.pid for state in pool.pool.states()} == {None}


async def test_bulk_workers_that_do_not_start_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with started(models.ForAllWorkOnly, workers=1, bulk_workers=1) as pool:
        pool.pool.start_bulk_workers()
        starts = pool.pool._bulk_starts
        assert starts is not None
        assert [state.index for state in pool.pool.states()] in ([0], [0, 1])
        assert shortage(pool.pool.states()) == ""
        await starts
        assert [state.index for state in pool.pool.states()] == [0]
        assert (pool.heard.ready, pool.heard.lost, pool.heard.reasons) == ([(0, 1)], [], [])
    assert "tried: no worker for bulk work was started: " in caplog.text
    assert "no bulk work here" in caplog.text


async def test_a_pool_can_be_stopped_while_bulk_workers_start() -> None:
    async with started(models.Square, workers=1, bulk_workers=1) as pool:
        pool.pool.start_bulk_workers()
        await asyncio.sleep(0)
    assert {state.state for state in pool.pool.states()} == {"stopped"}


@pytest.mark.parametrize(
    "looks",
    [
        [(0.0, 0.0), (0.0, 5.0), (0.0, 5.0)],  # when the batch begins; in time, as it has waited; too late
        [(7.0, 0.0), (7.05, 5.0), (7.15, 9.0)],  # the same of one that always waits, but has run for as long as it may
    ],
)
async def test_waiting_for_a_cpu_does_not_count_as_time_of_a_bulk_batch(
    looks: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(looks)
    monkeypatch.setattr(supervision, "cpu_times", lambda pid: next(left))
    async with started(models.Obedient, workers=1, bulk_workers=1, predict_timeout=0.1) as pool:
        pool.pool.start_bulk_workers()
        await pool.again()
        pool.send("spin", worker=1)
        await pool.heard.until(lambda: bool(pool.heard.lost))
        assert pool.heard.lost == [(1, "it was ended because a batch ran longer than predict_timeout=0.1")]
        assert next(left, None) is None
