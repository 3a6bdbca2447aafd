"""How batches reach actors: by a connection of their own, also those that are detached."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.waiting import until
from tests.workers.ray.certificates import certificate
from tests.workers.ray.clusters import Nodes, end_detached, started
from tests.workers.ray.conftest import Loop, actors
from tests.workers.ray.test_pool import Doubled

import weir

pytestmark = pytest.mark.ray

SERVER = """
import asyncio, sys, weir
from tests.streaming_models import Tick

async def read(stream):
    try:
        async for _ in stream:
            pass
    except weir.WeirError as error:
        print(type(error).__name__, flush=True)

async def main():
    ray = weir.Ray(workers=2, address=sys.argv[1], num_cpus=0.1, detached=sys.argv[2], placement="strict-spread")
    async with weir.Service(Tick, executor=ray) as service:
        ticks = [service.infer_stream(number) for number in range(2)]
        print([await anext(each) for each in ticks], flush=True)
        readers = [asyncio.create_task(read(each)) for each in ticks]
        await asyncio.to_thread(sys.stdin.readline)
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)

asyncio.run(main())
"""

# In the process that speaks with Ray: the addresses that actors of other nodes name are replaced.
ELSEWHERE = """
from weir.workers.ray import connection

connect = connection.connect
connection.PATIENCE = 0.5


def connect_elsewhere(address, token, descriptors=()):
    return connect(address if isinstance(address, str) else ("127.0.0.1", {port}), token, descriptors)


connection.connect = connect_elsewhere
"""


def memory_shared_with(pid: int) -> list[str]:
    """Return the memory of servers that the process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sorted({line.partition("memfd:")[2].split()[0] for line in lines if "memfd:weir" in line})


def unshared(pids: list[int]) -> bool:
    return not any(map(memory_shared_with, pids))


async def test_each_server_of_detached_actors_has_a_connection_of_its_own(nodes: Nodes, loop: Loop) -> None:
    settings: dict[str, Any] = {
        "workers": 3, "num_cpus": 0.1, "placement": "strict-spread", "ray_detached": "met", "pipeline_depth": 2,
    }  # fmt: skip

    pids: list[int] = []
    for server in range(3):
        async with started(Doubled, nodes.address, **settings) as pool:
            states: Any = pool.pool.states()
            pids += [state.pid for state in states if server == 0]
            assert [state.pid for state in states] == pids
            arrays = [np.full((1, 150_000), number, np.float32) for number in range(6)]
            sent = [pool.send({"x": array}, worker=place % 3) for place, array in enumerate(arrays)]
            for batch, array in zip(sent, arrays, strict=True):
                (answer,) = await pool.answer(batch)
                assert np.array_equal(answer["y"], array * 2)
            mapped = {worker: memory_shared_with(pid) for worker, pid in enumerate(pids)}
            (near,) = [worker for worker, names in mapped.items() if names]  # the others are on other nodes
            assert mapped[near] == ["weir-requests-tried", f"weir-results-tried-{near}"]
        await until(partial(unshared, pids))  # it is given back when a server leaves
    assert len(await asyncio.to_thread(end_detached, nodes.address, "met")) == 3


@contextmanager
def server(address: str, name: str) -> Iterator[subprocess.Popen[str]]:
    """Run a server whose two detached workers are both busy with a stream that does not end."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, address, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "[0, 1]\n"
            yield program
        finally:
            program.kill()


def workers() -> set[int]:
    return {pid for pid in actors() if "driver" not in " ".join(psutil.Process(pid).cmdline())}


def test_detached_workers_outlive_servers_that_are_killed_or_stand_still(nodes: Nodes) -> None:
    before = actors()
    with server(nodes.address, "prod") as killed:
        first = workers()
        killed.kill()
    with server(nodes.address, "prod") as suspended:
        second = workers()
        below = psutil.Process(suspended.pid).children()
        for process in below:
            process.suspend()  # and with it the process that speaks with Ray, as when a whole machine stands still
        suspended.send_signal(signal.SIGSTOP)
        with server(nodes.address, "prod") as last:
            third = workers()
            suspended.send_signal(signal.SIGCONT)
            for process in below:
                process.resume()
            assert suspended.stdout is not None
            assert [suspended.stdout.readline() for _ in range(2)] == ["WorkerLost\n"] * 2
            last.communicate("leave\n", timeout=30)
        suspended.kill()
    assert len(first - before) == 2
    assert first == second == third
    assert sorted(end_detached(nodes.address, "prod")) == ["tick/0", "tick/1"]
    asyncio.run(until(lambda: actors() == before))


# Two nodes that speak TLS. What it prints: the answers of the workers on both, and how a server without certificates ends.
ENCRYPTED = """
import asyncio, os, subprocess, sys, weir
from tests.workers.models import Square
from tests.workers.ray.clusters import Nodes

async def main(address):
    ray = weir.Ray(workers=2, address=address, num_cpus=0.1, placement="strict-spread")
    async with weir.Service(Square, executor=ray, max_batch_size=1) as service:
        print(sorted(await asyncio.gather(*[service.infer(number) for number in range(6)])), flush=True)
        print(len({worker.node for worker in service.executor.states()}), flush=True)

nodes = Nodes(2)
try:
    asyncio.run(main(nodes.address))
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_USE_TLS", "RAY_TLS_"))}
    command = ["serve", "tests.workers.models:Square", "--executor", "ray", "--ray-address", nodes.address, "--start-timeout", "4", "--port", "0"]
    done = subprocess.run([sys.executable, "-m", "weir", *command], env=plain, capture_output=True, text=True, timeout=60)
    print(done.returncode, done.stderr.splitlines()[-1], flush=True)
finally:
    nodes.shut_down()
"""


def test_batches_for_other_nodes_are_encrypted_with_rays_certificates(tmp_path: Path) -> None:
    from ray.util import get_node_ip_address

    done = subprocess.run(
        [sys.executable, "-c", ENCRYPTED],
        env=os.environ | certificate(tmp_path, {"127.0.0.1", get_node_ip_address()}), capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    answers, count, refusal = done.stdout.splitlines()[-3:]
    assert (answers, count) == ("[0, 1, 4, 9, 16, 25]", "2")
    assert "no connection to node" not in done.stderr
    assert refusal.startswith("2 weir: ray_address=")
    assert refusal.endswith("; if its nodes use TLS, set RAY_USE_TLS=1 and the RAY_TLS_ variables here too")


@pytest.fixture
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address that refuses connections, or takes them and then says nothing, stands for those of actors on other nodes. Return what is logged."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if request.param == "is silent":
            taken.listen()
        (tmp_path / "sitecustomize.py").write_text(ELSEWHERE.format(port=taken.getsockname()[1]))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        yield "Connection refused" if request.param == "refuses" else "timed out"


@pytest.mark.parametrize("elsewhere", ["refuses", "is silent"], indirect=True)
def test_an_actor_that_cannot_be_reached_is_refused_with_the_reason(nodes: Nodes, elsewhere: str) -> None:
    before = actors()
    for detached in (None, "far"):
        executor = weir.Ray(
            workers=3, address=nodes.address, num_cpus=0.1, placement="strict-spread", detached=detached
        )
        with pytest.raises(weir.ModelError, match=rf"no connection to node \w+ at .*{elsewhere}.*directly"):
            asyncio.run(weir.Service(Doubled, executor=executor, max_batch_size=1).start())
        end_detached(nodes.address, "far")  # those that could be reached
        asyncio.run(until(lambda: actors() == before))
