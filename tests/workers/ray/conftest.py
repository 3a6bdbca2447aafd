"""A Ray of three nodes on this machine, and an event loop that stays connected to it, for all tests: to start them takes long. A test that has killed or
drained a node adds another."""

import asyncio
import contextlib
import gc
import os
import time
import warnings
from collections.abc import Coroutine, Iterator
from inspect import iscoroutinefunction, signature
from typing import Any, TypeVar

import psutil
import pytest
from tests.leaks import PATIENCE, descriptors, left_over, shared_memory
from tests.workers.ray.clusters import Nodes

from weir.workers.ray.pool import RayLink

T = TypeVar("T")

# Nothing is reported, and no token is written to the home directory. Nodes that are gone are noticed soon.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", RAY_health_check_period_ms="500",
    RAY_health_check_failure_threshold="3", RAY_health_check_initial_delay_ms="0", RAY_DEDUP_LOGS="0",
    RAY_gcs_rpc_server_reconnect_timeout_s="5",
)  # fmt: skip


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Three nodes of two CPUs each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = Nodes(3)
        try:
            yield nodes
        finally:
            nodes.shut_down()


class Loop:
    """Runs coroutines on one event loop, which stays connected to a cluster."""

    def __init__(self, address: str) -> None:
        self._runner = asyncio.Runner()
        self._address = address
        self.run(self._connect())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end."""
        return self._runner.run(asyncio.wait_for(work, 60))

    def close(self) -> None:
        """Disconnect."""
        self.run(self._link.release())
        self._runner.close()

    async def _connect(self) -> None:
        self._link = RayLink.shared(self._address)
        await self._link.connect()


@pytest.fixture(scope="session")
def loop(nodes: Nodes) -> Iterator[Loop]:
    loop = Loop(nodes.address)
    yield loop
    loop.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on `loop`, if it asks for that."""
    loop = pyfuncitem.funcargs.get("loop")
    if not isinstance(loop, Loop) or not iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in signature(pyfuncitem.obj).parameters}
    loop.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(autouse=True)
def nothing_is_left_by_any() -> Iterator[None]:
    """In place of the check for worker processes: every test must leave no actor, no descriptor and no shared memory behind. Ray's own processes stay."""
    gc.collect()
    files, before = descriptors(), actors()
    yield
    gc.collect()
    until = time.monotonic() + 5 * PATIENCE
    while actors() - before and time.monotonic() < until:
        time.sleep(0.05)
    assert actors() <= before
    assert shared_memory() == []
    assert not left_over(files)


def actors() -> set[int]:
    """Return the processes of actors, on the nodes that these tests have started, and of drivers."""
    names = ("ray::WorkerActor", "weir.workers.ray.driver")
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if any(name in part for part in process.cmdline() for name in names):
                found.add(process.pid)
    return found
