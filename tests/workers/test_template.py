"""Workers that are forked from one process, which has loaded what they share."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.workers.models import Forked, SharesNothing, forked_from
from tests.workers.pools import Pool, Recorder, make_pool, started

from weir.messages import OBJECT, Batch
from weir.workers.forking import _obey
from weir.workers.local.inline import make_runner
from weir.workers.settings import WorkerSettings
from weir.workers.template import Template


def test_what_is_loaded_for_all_is_loaded_once_and_each_worker_has_it() -> None:
    async def main() -> None:
        async with started(Forked, workers=3, pipeline_depth=2) as pool:
            told = [(await pool.ask("tell", worker=worker))[0] for worker in range(3)]
            pids = [state.pid for state in pool.pool.states()]
            assert [each["pid"] for each in told] == pids
            assert [each["index"] for each in told] == [0, 1, 2]
            assert {each["loaded_by"] for each in told} == {forked_from(told[0]["pid"])}
            assert len({each["address"] for each in told}) == 1
            assert all(each["own"] == each["pid"] for each in told)
            assert [os.getpgid(pid) for pid in pids if pid] == pids

    asyncio.run(main())


def test_a_worker_that_dies_is_forked_again() -> None:
    async def main() -> None:
        async with started(Forked, workers=2) as pool:
            before = (await pool.ask("tell"))[0]
            os.kill(before["pid"], signal.SIGKILL)
            await pool.heard.until(lambda: len(pool.heard.ready) == 3)
            after = (await pool.ask("tell"))[0]
            assert after["pid"] != before["pid"]
            assert after["loaded_by"] == before["loaded_by"]
            assert "signal 9" in pool.heard.lost[0][1]

    asyncio.run(main())


def test_the_code_that_a_forked_worker_exits_with_is_told() -> None:
    async def main() -> None:
        async with started(Forked, workers=2) as pool:
            pool.send("exit")
            await pool.heard.until(lambda: len(pool.heard.ready) == 3)
            assert pool.heard.lost == [(0, "it exited with code 7")]

    asyncio.run(main())


def test_workers_end_with_what_they_are_forked_from_and_load_by_themselves_then() -> None:
    async def main() -> None:
        async with started(Forked, workers=2) as pool:
            template = (await pool.ask("tell"))[0]["loaded_by"]
            os.kill(template, signal.SIGKILL)
            await pool.heard.until(lambda: len(pool.heard.ready) == 4)
            told = [(await pool.ask("tell", worker=worker))[0] for worker in range(2)]
            assert all(each["loaded_by"] == each["pid"] for each in told)

    asyncio.run(main())


def test_where_nothing_can_be_shared_each_worker_loads_by_itself() -> None:
    async def main() -> None:
        async with started(SharesNothing, workers=2) as pool:
            told = [(await pool.ask("tell", worker=worker))[0] for worker in range(2)]
            assert all(each["loaded_by"] == each["pid"] for each in told)

    asyncio.run(main())


def test_workers_of_different_environments_share_nothing() -> None:
    async def main() -> None:
        async with started(Forked, workers=2, env=[{"A": "1"}, {"A": "2"}]) as pool:
            told = [(await pool.ask("tell", worker=worker))[0] for worker in range(2)]
            assert all(each["loaded_by"] == each["pid"] for each in told)

    asyncio.run(main())


def test_one_worker_needs_no_other_process_and_those_that_join_it_share() -> None:
    async def main() -> None:
        async with started(Forked) as pool:
            for _ in range(2):
                await pool.pool.add_worker()
            told = [(await pool.ask("tell", worker=worker))[0] for worker in range(3)]
            assert told[0]["loaded_by"] == told[0]["pid"]
            assert told[1]["loaded_by"] == told[2]["loaded_by"] == forked_from(told[1]["pid"])

    asyncio.run(main())


def test_a_pool_that_is_given_up_while_it_loads_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        os.mkfifo(tmp_path / "begun")
        pool = make_pool(Forked, {"slow": str(tmp_path / "begun")}, workers=2)
        starting = asyncio.ensure_future(pool.start(Recorder()))
        assert await asyncio.to_thread((tmp_path / "begun").read_text) == "begun"
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        await pool.stop()

    asyncio.run(main())


def test_a_cpu_and_a_priority_are_the_workers_own() -> None:
    cpu = min(os.sched_getaffinity(0))

    async def main() -> None:
        async with started(Forked, workers=2, cpu_affinity=[[cpu]], load_niceness=5) as pool:
            assert (await pool.ask("tell"))[0]["cpus"] == [cpu]

    asyncio.run(main())


def test_an_executor_without_processes_loads_it_in_each_worker() -> None:
    runner = make_runner(Forked, {}, WorkerSettings(executor="thread"), 0, 4, fatal=(), label="forked")
    runner.start()
    told = runner.compute(runner.prepare(Batch(0, ["tell"], OBJECT, OBJECT))).outputs[0]
    assert told["loaded_by"] == told["own"] == os.getpid()


async def answer(ask: Callable[..., None], *arguments: Any) -> Any:
    """Return what a template answers."""
    answered = asyncio.get_running_loop().create_future()
    ask(*arguments, answered.set_result)
    return await answered


def test_a_fork_that_the_system_refuses_leaves_the_others_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def main() -> None:
        ours, theirs = socket.socketpair()
        monkeypatch.setattr("os.fork", refuse)
        obeying = threading.Thread(target=_obey, args=(theirs, SharesNothing()))
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

    asyncio.run(main())


async def hang(pool: Pool) -> int:
    """Stop the process that the workers are forked from, then kill one of them."""
    victim = (await pool.ask("tell"))[0]
    os.kill(victim["loaded_by"], signal.SIGSTOP)
    os.kill(victim["pid"], signal.SIGKILL)
    await pool.heard.until(lambda: bool(pool.heard.lost))
    return int(victim["loaded_by"])


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_template_that_hangs_holds_up_nobody_else(
    run: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.workers.template.PATIENCE", 1000.0)
    monkeypatch.setattr("weir.workers.child.END_GRACE", 0.01)

    async def main() -> None:
        async with started(Forked, workers=2) as pool:
            template = await hang(pool)
            for _ in range(3):
                assert (await pool.ask("tell", worker=1))[0]["loaded_by"] == template
            os.kill(template, signal.SIGCONT)
            await pool.heard.until(lambda: len(pool.heard.ready) == 3)
            assert (await pool.ask("tell"))[0]["loaded_by"] == template

    run(main())


def test_a_template_that_goes_on_hanging_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with started(Forked, workers=2) as pool:
            # Not before: a busy machine takes longer to fork the first.
            monkeypatch.setattr("weir.workers.template.PATIENCE", 0.05)
            monkeypatch.setattr("weir.workers.child.END_GRACE", 0.01)
            await hang(pool)
            await pool.heard.until(lambda: len(pool.heard.ready) == 4)
            told = [(await pool.ask("tell", worker=worker))[0] for worker in range(2)]
            assert all(each["loaded_by"] == each["pid"] for each in told)

    asyncio.run(main())


def test_a_pool_stops_while_its_template_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.workers.child.END_GRACE", 0.01)

    async def main() -> None:
        async with started(Forked, workers=3) as pool:
            await hang(pool)

    asyncio.run(main())
