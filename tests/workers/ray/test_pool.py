"""Workers on a real Ray of three nodes do what worker processes do."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.served import serving
from tests.streaming_models import Count
from tests.workers.models import Echo, FailsInLoad, NeverLoads, Obedient, Square
from tests.workers.pools import Recorder
from tests.workers.ray.clusters import Nodes, end_detached, make_pool, started
from tests.workers.ray.conftest import Loop

import weir
from weir.errors import Conflict, ModelError, SettingsError
from weir.messages import JSON
from weir.model import Model, Tensor

pytestmark = pytest.mark.ray


class Doubled(Model):
    """Returns each tensor times two."""

    inputs = (Tensor("x", "FP32", (-1, -1)),)
    outputs = (Tensor("y", "FP32", (-1, -1)),)

    def predict(self, batch: Any) -> Any:
        return {"y": batch["x"] * 2}


COUNTED = """
import weir


class Counted(weir.Model):
    def load(self):
        self.items = self.metrics.counter("own_items", "Items.", labels=["kind"])
        self.values = self.metrics.histogram("own_value", "Values.", buckets=[4])
        self.metrics.gauge("own_loaded", "Set in load.").set(7)

    def predict(self, batch):
        for item in batch:
            self.items.inc(kind=type(item).__name__)
            self.values.observe(item)
        return batch
"""


class DiesInLoad(Model):
    """Ends its process, as a system without memory does."""

    def load(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


async def test_workers_are_actors_on_several_nodes(nodes: Nodes, loop: Loop) -> None:
    async with started(Square, nodes.address, workers=3, num_cpus=1) as pool:
        assert sorted(pool.heard.ready) == [(0, 1), (1, 1), (2, 1)]
        first, second = await asyncio.gather(pool.ask(1, 2, 3), pool.ask(4, worker=2))
        assert (first, second) == ([1, 4, 9], [16])
        states: Any = pool.pool.states()
        assert len({state.node for state in states}) > 1
        assert len({state.actor for state in states}) == 3
        assert all(state.address and state.gpus == [] and state.pid for state in states)
    assert [(state.state, state.node) for state in states] == [("stopped", "")] * 3


async def test_the_code_of_a_worker_process_runs_there(nodes: Nodes, loop: Loop) -> None:
    class ByValue(Model):
        """Exists in this test only, so it travels by value."""

        def __init__(self, add: int) -> None:
            self.add = add

        def predict(self, batch: list[int]) -> list[int]:
            return [item + self.add for item in batch]

    async with started(ByValue, nodes.address, {"add": 5}) as pool:
        assert await pool.ask(1, 2) == [6, 7]
        assert await pool.ask(b"3", content_type=JSON) == [8]
        (error,) = await pool.ask(b"nonsense", content_type=JSON)
        assert "nonsense" not in str(error)
        assert isinstance(error, weir.InvalidRequest)


async def test_worker_index_environment_and_threads(nodes: Nodes, loop: Loop) -> None:
    settings: dict[str, Any] = {"workers": 2, "threads": 3, "env": [{"ONE": "1"}, {"ONE": "2"}]}
    async with started(Obedient, nodes.address, **settings) as pool:
        for worker in (0, 1):
            environment, index = await pool.ask("environment", "index", worker=worker)
            assert index == worker
            assert (environment["ONE"], environment["OMP_NUM_THREADS"]) == (str(worker + 1), "3")


async def test_streams_keep_their_order_and_end_when_their_reader_leaves(nodes: Nodes, loop: Loop) -> None:
    service = weir.Service(Count, executor=weir.Ray(workers=1, address=nodes.address, num_cpus=0.5))
    async with service:
        numbers = await asyncio.gather(*[_read(service, count) for count in (3, 5, 1)])
        assert numbers == [[1, 2, 3], [1, 2, 3, 4, 5], [1]]
        endless = service.infer_stream(10**9)
        assert await anext(endless) == 1
        await endless.aclose()  # the batch ends, or nothing below would run
        assert await _read(service, 2) == [1, 2]


async def _read(service: weir.Service, count: int) -> list[int]:
    return [number async for number in service.infer_stream(count)]


@pytest.mark.parametrize("arena_bytes", [0, 1 << 20, 64 << 20])
async def test_large_tensors_travel_beside_the_frames(nodes: Nodes, loop: Loop, arena_bytes: int) -> None:
    """Also where the shared memory of this machine has too little room for them, or there is none."""

    executor = weir.Ray(workers=2, address=nodes.address, num_cpus=0.5)
    async with weir.Service(Doubled, executor=executor, arena_bytes=arena_bytes, max_batch_size=4) as service:
        arrays = [np.full((1, 150_000), number, np.float32) for number in range(12)]
        answers = await asyncio.gather(*[service.infer({"x": array}) for array in arrays])
        for number, answer in enumerate(answers):
            assert np.array_equal(answer["y"], arrays[number] * 2)


async def test_a_batch_that_takes_too_long_ends_its_worker(nodes: Nodes, loop: Loop) -> None:
    async with started(Obedient, nodes.address, predict_timeout=0.5) as pool:
        pool.send("spin")
        await pool.again()
        assert pool.heard.lost == [(0, "it was ended because a batch ran longer than predict_timeout=0.5")]
        assert await pool.ask(1) == [1]


@pytest.mark.parametrize("how", ["exit", "abort", "raise_system_exit"])
async def test_an_actor_that_ends_is_replaced(nodes: Nodes, loop: Loop, how: str) -> None:
    async with started(Obedient, nodes.address) as pool:
        pool.send(how)
        await pool.again()
        ((worker, reason),) = pool.heard.lost
        assert worker == 0
        assert reason
        assert "\n" not in reason
        assert len(reason) < 500
        assert pool.pool.states()[0].restarts == 1
        assert await pool.ask(1) == [1]


async def test_workers_are_added_and_removed(nodes: Nodes, loop: Loop) -> None:
    async with started(Obedient, nodes.address) as pool:
        await pool.pool.add_worker()
        assert pool.heard.ready == [(0, 1), (1, 1)]
        assert await pool.ask("index", worker=1) == [1]
        await pool.pool.remove_worker()
        assert [state.state for state in pool.pool.states()] == ["ready"]
        assert await pool.ask("index") == [0]


def test_a_model_s_own_metrics_are_in_those_of_the_server(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    ray = ("--executor", "ray", "--ray-address", nodes.address, "--num-cpus", 0.25, "--start-timeout", 100)
    with serving(tmp_path / "counted.py:Counted", "--workers", "1..2", "--max-batch-size", 1, *ray) as (_, client):
        assert [client.post("/infer/counted", json=item).json() for item in (3, 4, 5, 6)] == [3, 4, 5, 6]
        shown = client.get("/metrics").text
    assert 'own_items_total{kind="int",model="counted"} 4.0' in shown
    assert 'own_value_sum{model="counted"} 18.0' in shown and 'own_loaded{model="counted",worker="0"} 7.0' in shown


async def test_placement(nodes: Nodes, loop: Loop) -> None:
    async with started(Square, nodes.address, workers=2, placement="pack") as pool:
        states: Any = pool.pool.states()
        assert len({state.node for state in states}) == 1
    async with started(Square, nodes.address, workers=3, placement="strict-spread") as pool:
        states = pool.pool.states()
        assert len({state.node for state in states}) == 3


async def test_detached_actors_are_found_or_replaced(nodes: Nodes, loop: Loop) -> None:
    detached: dict[str, Any] = {"ray_detached": "kept", "num_cpus": 0.1}

    async def actors_of(workers: int, **settings: Any) -> list[str]:
        async with started(Square, nodes.address, workers=workers, **detached, **settings) as pool:
            states: Any = pool.pool.states()
            assert await pool.ask(3, worker=workers - 1) == [9]
            return [state.actor for state in states]

    first = await actors_of(2)
    assert await actors_of(2) == first
    assert await actors_of(1) == first[:1]
    assert (await actors_of(2))[1] != first[1]  # it was ended, as nobody wanted two
    replaced = await actors_of(1, env={"OTHER": "1"})
    assert replaced != first[:1]
    async with started(Square, nodes.address, **detached) as pool:
        rival = make_pool(Square, nodes.address, **detached)
        with pytest.raises(ModelError, match="another server has the actor 'tried/0' that is detached as 'kept'"):
            await rival.start(Recorder())
        assert await pool.ask(4) == [16]
        assert await asyncio.to_thread(end_detached, nodes.address, "kept") == []
        await pool.pool.add_worker()
        await pool.pool.remove_worker()
    assert await asyncio.to_thread(end_detached, nodes.address, "kept") == ["tried/0"]
    with pytest.raises(SettingsError, match="ray_detached='kept': a Ray that is started for this server ends with it"):
        make_pool(Square, "", **detached)


async def refused(pool: Any) -> str:
    """Return the one line with which a pool refuses to start."""
    with pytest.raises((SettingsError, ModelError, Conflict)) as caught:
        await pool.start(None)
    text = str(caught.value)
    assert "\n" not in text
    return text


def refusal(loop: Loop, pool: Any) -> str:
    """Return what `refused` does."""
    return loop.run(refused(pool))


def test_what_cannot_start_says_why_in_one_line(nodes: Nodes, loop: Loop) -> None:
    address = nodes.address
    lacking: dict[str, Any] = {"resources": {"A10": 1.0}, "num_gpus": 1.0, "start_timeout": 4.0}

    assert "it had not loaded within start_timeout=4.0" in refusal(
        loop, make_pool(NeverLoads, address, start_timeout=4.0)
    )
    text = refusal(loop, make_pool(Square, address, **lacking))
    assert "start_timeout=4.0: no room: a worker asks for CPU 0.5, GPU 1, A10 1; the cluster has CPU 6 (" in text
    # The actor before may not have given its CPU back.
    assert " free), GPU 0 (0 free), A10 0 (0 free) on 3 nodes" in text
    text = refusal(loop, make_pool(Square, address, workers=4, placement="strict-spread", start_timeout=20.0))
    assert "on 3 nodes, 3 with a worker already (placement=strict-spread)" in text
    assert "no weights to load" in refusal(loop, make_pool(FailsInLoad, address))
    text = refusal(loop, make_pool(DiesInLoad, address))
    assert "worker process has died" in text
    assert "it died while it loaded the model: what it printed is in this log; if its node ran out of memory" in text
    assert "must be picklable to reach a worker" in refusal(loop, make_pool(Echo, address, {"a": threading.Lock()}))
    text = refusal(loop, make_pool(Square, "127.0.0.1:9"))
    assert text.startswith("ray_address='127.0.0.1:9': nothing answers there (")
    assert "Connection refused" in text


def test_another_version_of_ray_is_named(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text('import ray\n\nray.__version__ = "2.41.0"\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def main() -> str:
        with pytest.raises(SettingsError) as caught:
            await make_pool(Square, nodes.address).start(Recorder())
        return str(caught.value)

    text = asyncio.run(main())
    assert "\n" not in text
    assert "Version mismatch" in text
    assert "2.41.0" in text


async def test_files_travel_by_the_runtime_environment(nodes: Nodes, loop: Loop, tmp_path: Path) -> None:
    (tmp_path / "vocabulary.txt").write_text("one two three")

    class Words(Model):
        """Reads a file that only the runtime environment brings to its node."""

        def load(self) -> None:
            self.words = Path("vocabulary.txt").read_text().split()

        def predict(self, batch: list[int]) -> list[str]:
            return [self.words[item] for item in batch]

    async with started(Words, nodes.address, ray_runtime_env={"working_dir": str(tmp_path)}) as pool:
        assert await pool.ask(0, 2) == ["one", "three"]
    text = await refused(make_pool(Words, nodes.address))
    assert "vocabulary.txt" in text
