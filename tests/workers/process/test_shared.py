"""Worker processes that several models share, with real services and processes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import until
from tests.workers.models import Doubles, DoublesInPlace, Reports, ReportsToo, Unloadable, WithoutWeights

from weir.catalog.loading import load_target
from weir.errors import Conflict, ModelCrashed, ModelError, ModelNotReady, SettingsError
from weir.model import Model
from weir.serving.service import Service
from weir.workers.executor import READY
from weir.workers.process.pool import ProcessPool
from weir.workers.process.shared import PoolMember, SharedPool, WorkersNeed, environment_of, share_workers
from weir.workers.settings import WorkerSettings


def service(pool: SharedPool, model: type[Model], **settings: Any) -> Service:
    settings = {"workers": 2, "max_batch_size": 1, **settings}
    return Service(model, executor=pool.member, **settings)


@asynccontextmanager
async def serving(
    *models: type[Model], pool: SharedPool | None = None, **settings: Any
) -> AsyncIterator[list[Service]]:
    """Run services of these models on shared workers."""
    pool = pool or SharedPool()
    services = [service(pool, model, **settings) for model in models]
    try:
        await asyncio.gather(*[each.start() for each in services])
        yield services
    finally:
        await asyncio.gather(*[each.stop() for each in services])


def pids(of: Service) -> set[int]:
    return {pid for state in of.executor.states() if (pid := state.pid) is not None}


def pipe(folder: Path, name: str) -> str:
    os.mkfifo(folder / name)
    return str(folder / name)


def batches(of: Service) -> int:
    return int(of.state(brief=True)["in_flight_batches"])


async def let_go(path: str, *waiting: "asyncio.Future[Any]") -> None:
    """Let whoever reads the pipe go on, also one that opens it later, until all of `waiting` are done."""
    while not all(each.done() for each in waiting):
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        await asyncio.sleep(0)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_both_models_are_in_the_same_processes_which_one_alone_may_use(tmp_path: Path) -> None:
    async with serving(Reports, ReportsToo) as (first, second):
        assert isinstance(first.executor, PoolMember)
        workers = pids(first)
        assert len(workers) == 2
        assert pids(second) == workers
        held = [first.infer(pipe(tmp_path, "a")), first.infer(pipe(tmp_path, "b"))]
        late = second.infer(0)
        await asyncio.to_thread((tmp_path / "a").write_text, "")  # opens once the worker reads
        freed = (await held[0])[1]
        answer = await late
        assert answer[:2] == ("ReportsToo", freed)  # the worker that came back
        assert not held[1].done()
        await asyncio.to_thread((tmp_path / "b").write_text, "")
        (name, other, loaded_in) = await held[1]
        assert name == "Reports"
        assert {freed, other} == workers  # with nothing to do, the second model left both to the first
        assert {loaded_in, answer[2]} == {answer[2]}  # loaded once, in the template
        assert first.executor.gauges() == second.executor.gauges()
    assert not any(map(is_alive, workers))
    assert pids(first) == set()


class Sharing(Model):
    """Answers with the share of its batch."""

    def predict(self, batch: list[Any]) -> list[int]:
        return [self._share] * len(batch)


async def test_a_batch_is_for_the_workers_that_have_none_of_any_model(tmp_path: Path) -> None:
    async with serving(Reports, Sharing) as (first, second):
        assert await second.infer(0) == 2
        held = first.infer(pipe(tmp_path, "a"))
        await until(lambda: batches(first) == 1)
        assert await second.infer(0) == 1
        await let_go(str(tmp_path / "a"), held)
        assert await second.infer(0) == 2


async def test_a_worker_is_added_and_removed_for_all_models(tmp_path: Path) -> None:
    pool = SharedPool()
    async with serving(Reports, ReportsToo, pool=pool) as (first, second):
        before = pids(first)
        await first.add_worker()
        (added,) = pids(second) - before
        assert [each.worker_count for each in (first, second)] == [3, 3]
        pipes = [pipe(tmp_path, name) for name in "abc"]
        held = [second.infer(path) for path in pipes]
        await until(lambda: batches(second) == 3)
        removal = asyncio.ensure_future(first.remove_worker())
        ran = []
        for path, each in zip(pipes, held, strict=True):
            await let_go(path, each)
            assert added in ran or not removal.done()
            ran.append((await each)[1])
        assert set(ran) == before | {added}  # none ran twice
        await removal
        assert pids(first) == pids(second) == before
        assert not is_alive(added)
        await second.add_worker()
        third = service(pool, Reports, name="third")
        await third.start()  # with as many workers as there are
        assert [each.worker_count for each in (first, second, third)] == [3, 3, 3]
        assert len(pids(third)) == 3
        await asyncio.gather(first.remove_worker(), third.remove_worker())  # two, and not the same one twice
        assert len(pids(second)) == 1
        with pytest.raises(Conflict, match="one worker left"):
            await second.remove_worker()
        assert (await second.infer(0))[0] == "ReportsToo"
        await third.stop()


async def test_a_batch_of_another_model_that_takes_too_long_runs_again_elsewhere(tmp_path: Path) -> None:
    async with serving(Reports, ReportsToo, pool=SharedPool(leave_within=0.0)) as (first, second):
        kept, removed = [state.pid for state in second.executor.states()]
        pipes = [pipe(tmp_path, name) for name in "ab"]
        held = [second.infer(path) for path in pipes]
        await until(lambda: batches(second) == 2)
        removal = asyncio.ensure_future(first.remove_worker())
        await until(lambda: batches(second) == 1)
        await asyncio.gather(*[let_go(path, each, removal) for path, each in zip(pipes, held, strict=True)])
        assert {(await each)[1] for each in held} == {kept}
        assert pids(second) == {kept} and not is_alive(removed or 0)


async def test_a_request_that_ends_its_worker_fails_alone() -> None:
    async with serving(Reports, ReportsToo, max_batch_size=8) as (first, second):
        before = pids(first)
        calls = [first.infer(item) for item in (0, "exit", 1)]
        others = [second.infer(number) for number in range(8)]
        with pytest.raises(ModelCrashed):
            await calls[1]
        assert {(await call)[0] for call in (calls[0], calls[2])} == {"Reports"}
        assert {(await call)[0] for call in others} == {"ReportsToo"}
        while any(state.state != READY for state in first.executor.states()):
            await second.infer(0)
        assert pids(first) == pids(second)
        assert pids(first) != before
        assert first.executor.gauges()["restarts"] >= 1


async def test_a_model_is_loaded_and_unloaded_while_the_other_serves(tmp_path: Path) -> None:
    pool = SharedPool(shrink_after=0.0)
    first = service(pool, Reports)
    await first.start()
    before = pids(first)
    held = first.infer(pipe(tmp_path, "held"))
    second = service(pool, ReportsToo)
    starting = asyncio.ensure_future(second.start())
    while (await first.infer(0))[1] in before:  # until the new processes take over the worker that has no batch
        pass
    assert not starting.done()
    await asyncio.to_thread((tmp_path / "held").write_text, "")
    assert (await held)[1] in before
    await starting
    assert not any(map(is_alive, before))
    assert (await second.infer(0))[0] == "ReportsToo"
    both = pids(first)
    assert pids(second) == both
    await second.stop()
    assert pids(second) == set()
    while any(map(is_alive, both)):  # until processes without the second model have taken over
        await first.infer(0)
    last = pids(first)
    await first.stop()
    assert not any(map(is_alive, last))
    await first.start()  # a service can be started again
    assert (await first.infer(0))[0] == "Reports"
    await first.stop()


async def test_a_model_that_does_not_load_is_named_and_disturbs_no_other() -> None:
    async with serving(Reports) as (first,):
        pool = first.generation.executor.__self__  # type: ignore[union-attr]  # the SharedPool
        before = pids(first)
        with pytest.raises(ModelError, match="unloadable: it raised LookupError: no weights"):
            await service(pool, Unloadable).start()
        with pytest.raises(SettingsError, match=r"withoutweights: weights\.bin: is missing"):
            await service(pool, WithoutWeights).start()
        assert (await first.infer(0))[1] in before


async def test_a_start_that_is_stopped_leaves_nothing() -> None:
    pool = SharedPool()
    services = [service(pool, model) for model in (Reports, ReportsToo)]
    starts = [asyncio.ensure_future(each.start()) for each in services]
    await asyncio.sleep(0)
    await asyncio.gather(*[each.stop() for each in services])
    ends = await asyncio.gather(*starts, return_exceptions=True)
    assert [type(end) for end in ends] == [ModelNotReady, ModelNotReady]
    assert pool.processes is None


def test_a_model_with_other_settings_of_workers_has_its_own() -> None:
    pool = SharedPool()
    assert isinstance(service(pool, Reports).executor, PoolMember)
    assert isinstance(service(pool, ReportsToo, workers=3).executor, ProcessPool)
    assert isinstance(service(pool, ReportsToo, retry_in_halves=False).executor, PoolMember)


@pytest.mark.parametrize("width", [3, 40_000], ids=["in the frame", "in shared memory"])
async def test_models_with_tensors_share_workers_with_others(width: int) -> None:
    async with serving(Doubles, DoublesInPlace, Reports, max_batch_size=8) as (first, second, third):
        x = np.arange(width, dtype=np.float32)[None]
        answers = [await each.infer({"x": x}) for each in (first, second) for _ in range(4)]
        _, pid, _ = await third.infer(0)
        assert {int(answer["pid"][0]) for answer in answers} | {pid} <= pids(first) == pids(third)
        for answer in answers:
            np.testing.assert_array_equal(answer["y"], x * 2)
            answer["y"][:] = 0  # a caller's own
        del answers, answer
        gauges = first.executor.gauges()
        assert gauges["arena_free_bytes"] == gauges["arena_bytes"]


async def test_models_whose_folders_have_modules_of_one_name_share_no_workers(tmp_path: Path) -> None:
    code = "from weir.model import Model\nimport names\nclass Named(Model):\n    def predict(self, batch):\n        return [names.NAME] * len(batch)\n"
    targets = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "names.py").write_text(f"NAME = {name!r}\n")
        (tmp_path / name / f"model_{name}.py").write_text(code)
        targets.append(f"{tmp_path / name / f'model_{name}.py'}:Named")
    pool = SharedPool()
    first, second = (load_target(target) for target in targets)
    models: list[Any] = [first, Reports, second]  # the targets are classes
    services = [service(pool, model) for model in models]
    await asyncio.gather(*[each.start() for each in services])
    try:
        assert [await each.infer(0) for each in (services[0], services[2])] == ["a", "b"]
        assert pids(services[0]) == pids(services[1])
        assert not pids(services[0]) & pids(services[2])
    finally:
        await asyncio.gather(*[each.stop() for each in services])


def test_the_cpus_of_a_server_are_divided_among_pools() -> None:
    needs = [WorkersNeed("a"), WorkersNeed(None), WorkersNeed(None, 2), WorkersNeed(None), WorkersNeed("a")]
    first, alone, own, other, second = share_workers(needs, 9)
    assert [each.cpus for each in (first, alone, own, other, second)] == [3, 2, None, 2, 3]
    assert first.pool is second.pool is not None
    assert [each.pool for each in (alone, own, other)] == [None] * 3
    assert [each.models for each in (first, alone, second)] == [2, 1, 2]
    assert [each.cpus for each in share_workers(needs, 1)] == [1, 1, None, 1, 1]
    assert environment_of(WorkerSettings(executor="thread")) is environment_of(WorkerSettings(workers="1..2")) is None


SCRIPT = """
import asyncio
from dataclasses import dataclass
import weir
from weir.workers.process.shared import SharedPool

@dataclass
class Item:
    number: int

@dataclass
class Other:
    number: int

class First(weir.Model):
    def predict(self, batch):
        return [Item(each.number + 1) for each in batch if type(each) is Item]

class Second(weir.Model):
    def predict(self, batch):
        return [Other(each.number + 2) for each in batch if type(each) is Other]

async def main():
    pool = SharedPool()
    first, second = weir.Service(First, executor=pool.member), weir.Service(Second, executor=pool.member)
    await asyncio.gather(first.start(), second.start())
    print(await first.infer(Item(1)), await second.infer(Other(1)))
    await asyncio.gather(first.stop(), second.stop())

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_models_of_a_script_that_share_workers_have_items_of_its_own_types(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("Item(number=2) Other(number=3)\n", "")
