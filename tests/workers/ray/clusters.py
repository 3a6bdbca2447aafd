"""A Ray of several nodes on one machine, whose nodes and actors the tests kill, and helpers for what runs on it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.workers.pools import Pool, Recorder

from weir.model import Model
from weir.workers.ray.pool import RayExecutor
from weir.workers.settings import WorkerSettings

STORE_BYTES = 80 << 20  # the least that Ray takes is 75 MiB


class Nodes:
    """The nodes of a cluster, which this process has started."""

    def __init__(self, count: int, port: int | None = None) -> None:
        from ray.cluster_utils import Cluster

        more = {} if port is None else {"gcs_server_port": port}
        self._cluster = Cluster(initialize_head=True, head_node_args=self._arguments() | more)
        self.address: str = self._cluster.address
        self._others = [self.add(wait=False) for _ in range(count - 1)]
        self._cluster.wait_for_nodes()

    def add(self, *, wait: bool = True) -> Any:
        """Add a node of two CPUs, and return it; `wait` until the cluster knows it."""
        return self._cluster.add_node(wait=wait, **self._arguments())

    def kill(self, node: Any) -> None:
        """Kill every process of a node at once, as when its machine is gone."""
        self._cluster.worker_nodes.discard(node)
        node.kill_all_processes(check_alive=False, allow_graceful=False)

    def kill_head(self) -> None:
        """Kill the head, and with it the whole cluster."""
        self._cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)

    def shut_down(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()

    def by_id(self, node_id: str) -> Any:
        """Return the node with this id."""
        return next(node for node in self._cluster.list_all_nodes() if node.node_id == node_id)

    @property
    def head(self) -> str:
        """The id of the head node."""
        return str(self._cluster.head_node.node_id)

    def drain(self, node_id: str) -> None:
        """Give the notice that a node is preempted soon, as a cloud's would be given."""
        code = (
            "import sys, time, ray._raylet as r; c = r.GcsClient(address=sys.argv[1]);"
            "print(c.drain_node(sys.argv[2], 2, 'preempted', int(time.time() * 1000) + 600_000))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, self.address, node_id], capture_output=True, text=True, timeout=60, check=True
        )
        assert "True" in done.stdout, done

    @staticmethod
    def _arguments() -> dict[str, Any]:
        return {"num_cpus": 2, "object_store_memory": STORE_BYTES, "include_dashboard": False}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end_detached(address: str, name: str) -> list[str]:
    """Return what `weir.ray.end_detached` returns, in a process of its own: it connects to Ray."""
    code = "import sys, weir.ray; print(*weir.ray.end_detached(*sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, name, address], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def kill_actor(pool: Any, worker: int) -> None:
    """Kill the process of a worker's actor, which is on this machine."""
    pid = pool.states()[worker].pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def make_pool(
    model: type[Model] | str, address: str, params: dict[str, Any] | None = None, **settings: Any
) -> RayExecutor:
    """Return a pool that was not started."""
    options = {"num_cpus": 0.5, "start_timeout": 40.0, "arena_bytes": 8 << 20, **settings}
    if "ray_runtime_env" in options:
        options["ray_runtime_env"] = json.dumps(options["ray_runtime_env"])
    worker_settings = WorkerSettings(executor="ray", ray_address=address or None, **options)
    return RayExecutor(model, params or {}, worker_settings, name="tried", max_batch_size=64)


@asynccontextmanager
async def started(
    model: type[Model] | str, address: str, params: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Pool]:
    """Run a pool of `model` on the Ray at `address`."""
    pool, heard = make_pool(model, address, params, **settings), Recorder()
    await pool.start(heard)
    try:
        yield Pool(pool, heard)
    finally:
        await pool.stop()
