"""Actors, nodes and a whole Ray that die under load: every request is answered, and rightly; and nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest
from tests.waiting import until
from tests.workers.models import Square
from tests.workers.ray.clusters import Nodes, free_port, kill_actor
from tests.workers.ray.conftest import Loop, actors

import weir
from weir.model import Model

pytestmark = pytest.mark.ray


class SlowSquare(Model):
    def predict(self, batch: list[int]) -> list[int]:
        time.sleep(0.005)
        return [item * item for item in batch]


class Load:
    """Callers who ask one after the other, and remember each answer that is wrong or missing."""

    def __init__(self, service: weir.Service, callers: int = 8) -> None:
        self.answered = [0] * callers
        self.wrong: list[Any] = []
        self._service = service
        self._over = False
        self._callers = [asyncio.create_task(self._call(place)) for place in range(callers)]

    async def _call(self, place: int) -> None:
        number = place
        while not self._over:
            number += len(self._callers)
            try:
                answer = await self._service.infer(number, timeout=40.0)
            except weir.WeirError as error:
                self.wrong.append(error)
                await asyncio.sleep(0.01)  # a refusal comes at once, and the loop has more to do
            else:
                if answer != number * number:
                    self.wrong.append((number, answer))
                self.answered[place] += 1

    async def go_on(self) -> None:
        """Wait until each caller has two more answers: no request is left that has lost its worker before. One that loses two in a row, the second
        time when it runs alone, counts as the one that ends them."""
        enough = [count + 2 for count in self.answered]
        await until(lambda: all(map(int.__ge__, self.answered, enough)))

    async def end(self) -> None:
        self._over = True
        await asyncio.gather(*self._callers)


def serving(address: str, **options: Any) -> weir.Service:
    return weir.Service(
        SlowSquare, executor=weir.Ray(address=address, **{"workers": 3, "num_cpus": 1, **options}), max_batch_size=8
    )


def states(service: weir.Service) -> list[Any]:
    return list(service.executor.states())


def all_ready(service: weir.Service) -> bool:
    return all(worker.state == "ready" for worker in states(service))


def runs(worker: Any) -> bool:
    return bool(worker.state == "ready")


def lost(worker: Any) -> bool:
    return bool(worker.state != "ready")


def waits(worker: Any) -> bool:
    return "no room" in worker.reason


async def test_actors_are_killed_in_a_loop_under_load(nodes: Nodes, loop: Loop) -> None:
    async with serving(nodes.address) as service:
        load = Load(service)
        for kill in range(9):
            await load.go_on()
            await until(partial(runs, states(service)[kill % 3]))
            kill_actor(service.executor, kill % 3)
        await until(lambda: sum(worker.restarts for worker in states(service)) == 9 and all_ready(service))
        await load.go_on()
        await load.end()
        assert load.wrong == []


async def test_nodes_are_killed_and_added_under_load(nodes: Nodes, loop: Loop) -> None:
    async with serving(nodes.address, placement="strict-spread") as service:
        load = Load(service)
        for _ in range(2):
            await load.go_on()
            victim = next(worker for worker in states(service) if worker.node not in (nodes.head, ""))
            await asyncio.to_thread(nodes.kill, nodes.by_id(victim.node))
            await until(partial(lost, victim))
            await load.go_on()  # by those that are left
            await until(partial(waits, victim))
            assert "2 nodes, 2 with a worker already" in victim.reason
            state = service.state()
            assert state["ready"]
            assert "2 of 3 workers are ready" in state["shortage"]
            added = nodes.add()
            await until(lambda: all_ready(service))
            assert victim.node == added.node_id
            assert service.state()["shortage"] == ""
        await load.go_on()
        await load.end()
        assert load.wrong == []


async def test_a_node_that_is_drained_gets_no_new_batch(nodes: Nodes, loop: Loop) -> None:
    async with serving(nodes.address, num_cpus=0.5) as service:
        load = Load(service)
        await load.go_on()
        victim = next(worker for worker in states(service) if worker.node != nodes.head)
        node = victim.node
        on_node = [worker for worker in states(service) if worker.node == node]
        await asyncio.to_thread(nodes.drain, node)
        await until(lambda: all(worker.node not in (node, "") for worker in on_node) and all_ready(service))
        assert [worker.restarts for worker in on_node] == [1] * len(on_node)
        await load.go_on()
        await load.end()
        assert load.wrong == []
    await asyncio.to_thread(nodes.kill, nodes.by_id(node))
    nodes.add()


def test_ray_goes_away_and_comes_back() -> None:
    port = free_port()
    before = Nodes(1, port)

    async def main() -> Nodes:
        async with serving(before.address, workers=2, num_cpus=0.5) as service:
            assert await service.infer(3) == 9
            waiting = [asyncio.ensure_future(service.infer(number, timeout=30.0)) for number in range(50)]
            await asyncio.to_thread(before.shut_down)
            began = time.monotonic()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert time.monotonic() - began < 31.0
            assert all(
                answer == number * number or isinstance(answer, weir.ModelNotReady)
                for number, answer in enumerate(results)
            )
            await until(lambda: not service.ready)
            assert f"no Ray can be reached at {before.address}" in service.not_ready_reason
            with pytest.raises(weir.ModelNotReady, match="no Ray can be reached"):
                await service.infer(4)
            after = Nodes(1, port)
            await until(lambda: service.ready)
            assert await service.infer(5) == 25
            await until(lambda: all_ready(service))
            return after

    after = asyncio.run(main())
    after.shut_down()


PROGRAM = """
import asyncio, sys, weir
from tests.workers.models import Square

class Loud(Square):
    def predict(self, batch):
        print("predicts", batch)
        return super().predict(batch)

async def main():
    async with weir.Service(Square if sys.argv[1] else Loud, executor=weir.Ray(workers=2, address=sys.argv[1] or None, num_cpus=0.1)) as service:
        assert await service.infer(3) == 9
        sys.stdout.write("ready\\n")  # at once: what actors print comes on the same pipe
        sys.stdout.flush()
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_however_a_program_ends_no_actor_is_left(nodes: Nodes, how: signal.Signals) -> None:
    before = actors()
    with subprocess.Popen([sys.executable, "-c", PROGRAM, nodes.address], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        assert len(actors() - before) == 3  # two of actors, and the driver
        program.send_signal(how)
    asyncio.run(until(lambda: actors() == before))


def test_a_ray_of_its_own_ends_with_the_program() -> None:
    environment = {**os.environ, "RAY_ADDRESS": ""}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, ""], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        printed = program.stdout.readline()
        while "ready" not in printed or "predicts [3]" not in printed:  # the server prints what actors print
            assert program.poll() is None
            printed += program.stdout.readline()
        began = daemons(program.pid)
        assert began
        while "no Ray address was given (--ray-address), so Ray was started" not in program.stderr.readline():
            assert program.poll() is None
        program.send_signal(signal.SIGKILL)
    asyncio.run(until(lambda: not any(process.is_running() for process in began)))


def daemons(program: int) -> list[Any]:
    """Return Ray's own processes that a program has started."""
    import psutil

    return [
        process
        for process in psutil.Process(program).children(recursive=True)
        if process.name() in ("raylet", "gcs_server")
    ]


async def test_models_of_one_server_share_a_connection(nodes: Nodes, loop: Loop) -> None:
    first = weir.Service(Square, executor=weir.Ray(workers=1, address=nodes.address, num_cpus=0.1))
    before = actors()
    async with serving(nodes.address, workers=1, num_cpus=0.1) as second, first:
        assert (await first.infer(2), await second.infer(3)) == (4, 9)
        assert len(actors() - before) == 2
