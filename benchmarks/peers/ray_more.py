"""Runs in the environment of Ray Serve: what single calls, HTTP, large tensors and a killed node cost, on Ray Serve and with Weir on Ray.

    python ray_more.py overhead|http|tensors|recovery CONTENDER SECONDS

It prints what was found as JSON. The contenders are those of ray_serve.py.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import aiohttp
import numpy as np
import ray
from ray import serve
from ray_serve import SERVE, WORKERS, contender, deployment, found, put_on, start_ray

import weir

SHAPE = (3, 224, 224)  # of float32: 602 KB
CONNECTIONS = 16
HTTP_RATE = 100
GOOD = 0.5  # seconds within which an answer counts, when a node is killed
BIN = 0.5  # seconds
KILLED_AT, WATCHED = 4.0, 25.0


class Instant(weir.Model):
    """Answers at once."""

    def predict(self, batch):
        return batch


class Plain:
    """What an actor does for a batch without Weir."""

    def run(self, items):
        return items


class Total(weir.Model):
    """Adds up the numbers of each image."""

    inputs = (weir.Tensor("x", "FP32", (-1, *SHAPE)),)
    outputs = (weir.Tensor("y", "FP32", (-1, 1)),)

    def predict(self, batch):
        return {"y": batch["x"].reshape(len(batch["x"]), -1).sum(1, keepdims=True)}


@serve.deployment(max_ongoing_requests=64, **SERVE)
class TotalOfServe:
    """The same behind Ray Serve's HTTP."""

    async def __call__(self, request):
        return float(np.frombuffer(await request.body(), np.float32).sum())


async def overhead(_, seconds):
    """Return the median seconds of a plain actor call, got and awaited, and of a batch of one through a service, which take turns."""
    actor = ray.remote(Plain).options(num_cpus=0.1).remote()
    executor = weir.Ray(workers=1, num_cpus=0.1, address=ray.get_runtime_context().gcs_address)
    times = {"got": [], "awaited": [], "weir": []}
    async with weir.Service(Instant, executor=executor, pipeline_depth=1) as service:
        end = time.perf_counter() + seconds + 1.0
        while time.perf_counter() < end:
            instants = [time.perf_counter()]
            ray.get(actor.run.remote([1]))
            instants.append(time.perf_counter())
            await actor.run.remote([1])
            instants.append(time.perf_counter())
            await service.infer(1)
            instants.append(time.perf_counter())
            for each, (began, ended) in zip(times.values(), pairwise(instants), strict=True):
                each.append(ended - began)
    return {name: sorted(each[100:])[len(each[100:]) // 2] for name, each in times.items()}


@contextmanager
def over_http(kind, target, application):
    """Serve a model by Weir's command or by Ray Serve; give the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    if kind != "weir":
        serve.start(http_options={"port": port})
        serve.run(application())
        yield url
        serve.shutdown()
        return
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "weir", "serve", *target, "--executor", "ray", "--workers", str(WORKERS), "--num-cpus", "0.1",
               "--ray-address", address, "--port", str(port), "--log-level", "warning"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        while not answers(url + "/health/ready"):
            time.sleep(0.2)
        yield url
        server.terminate()


def answers(url):
    """Return whether there is an answer."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (OSError, urllib.error.URLError):
        return False


async def http(name, seconds):
    """Put an open load on a server of sleepers."""
    kind, _, settings = name.partition(":")
    target = [f"{Path(__file__).with_name('ray_serve.py')}:Sleeper", "--policy", settings, "--max-batch-size", "64"]
    path = "/infer/sleeper" if kind == "weir" else "/"
    with over_http(kind, target, lambda: deployment(kind, settings)) as url:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def call(item):
                async with session.post(url + path, json=item) as answer:
                    answer.raise_for_status()
                    return int(await answer.text())

            await put_on(call, 50, 4.0)
            return found(HTTP_RATE, seconds, *await put_on(call, HTTP_RATE, seconds))


async def tensors(name, seconds):
    """Send images by some connections, one after the other; return megabytes per second."""
    kind = name.partition(":")[0]
    array = np.random.default_rng(1).random(SHAPE, np.float32)
    body, headers = array.tobytes(), {"content-type": "application/octet-stream"}
    path = "/"
    if kind == "weir":
        about = {
            "inputs": [
                {"name": "x", "shape": [1, *SHAPE], "datatype": "FP32", "parameters": {"binary_data_size": len(body)}}
            ]
        }
        head = json.dumps(about).encode()
        headers["inference-header-content-length"] = str(len(head))
        body, path = head + body, "/v2/models/total/infer"
    target = [f"{Path(__file__)}:Total", "--max-batch-size", "16"]
    with over_http(kind, target, TotalOfServe.bind) as url:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def connection(until):
                sent = 0
                while time.perf_counter() < until:
                    async with session.post(url + path, data=body, headers=headers) as answer:
                        answer.raise_for_status()
                        await answer.read()
                    sent += 1
                return sent

            for stretch in (2.0, seconds):
                until = time.perf_counter() + stretch
                sent = await asyncio.gather(*[connection(until) for _ in range(CONNECTIONS)])
    return {"rate": sum(sent) * array.nbytes / 1e6 / seconds}


async def recovery(name, cluster):
    """Kill a node of four under load; return the seconds until calls are answered in time again, and how many failed."""
    call, end = await contender(name)
    await put_on(call, 50, 4.0)
    latest, failed, start = {}, 0, time.perf_counter()
    due = start
    tasks = set()

    async def one(due):
        nonlocal failed
        try:
            await call(1)
        except Exception:
            failed += 1
            return
        latest[due] = time.perf_counter() - due

    instants = []
    killed = False
    while due < start + WATCHED:
        due += 1 / HTTP_RATE
        instants.append(due)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.add(asyncio.create_task(one(due)))
        if not killed and due > start + KILLED_AT:
            killed = True
            kill_a_node(cluster)
    await asyncio.wait(tasks, timeout=30)
    bins = [
        [each for each in instants if number * BIN <= each - start < (number + 1) * BIN]
        for number in range(int(WATCHED / BIN))
    ]
    shares = [sum(latest.get(each, GOOD + 1) <= GOOD for each in there) / max(1, len(there)) for there in bins]
    bad = [number for number, share in enumerate(shares) if share < 0.9 and number * BIN >= KILLED_AT - BIN]
    await end()
    return {
        "seconds": ((bad[-1] + 1) * BIN - KILLED_AT) if bad else 0.0,
        "failed": failed + sum(not task.done() for task in tasks),
        "shares": shares,
    }


def kill_a_node(cluster):
    """Kill the node on which the most is in use, other than the head."""
    free = ray._private.state.available_resources_per_node()
    node = min(cluster.worker_nodes, key=lambda each: free[each.node_id].get("CPU", 0))
    cluster.worker_nodes.discard(node)
    node.kill_all_processes(check_alive=False, allow_graceful=False)


def start_cluster():
    """Start four nodes, of which one is the head, and connect to them."""
    from ray.cluster_utils import Cluster

    os.environ.update(
        RAY_health_check_period_ms="1000", RAY_health_check_failure_threshold="3", RAY_health_check_initial_delay_ms="0"
    )
    node = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **node})
    SERVE["ray_actor_options"] = {"num_cpus": 1}
    for _ in range(3):
        cluster.add_node(num_cpus=2, **node)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    return cluster


def main(what, name, seconds):
    """Measure one thing of one contender."""
    if what == "recovery":
        result = asyncio.run(recovery(name, start_cluster()))
    else:
        start_ray(200 << 20)
        result = asyncio.run({"overhead": overhead, "http": http, "tensors": tensors}[what](name, seconds))
    ray.shutdown()
    return result


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], float(sys.argv[3]))))
