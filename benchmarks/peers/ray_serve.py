"""Runs in the environment of Ray Serve: one contender under open load, handle to handle, without HTTP.

    python ray_serve.py CONTENDER SECONDS RATE [RATE ...]

Four workers sleep 20 + 0.5·b ms for a batch of b, whoever cuts it. It prints a JSON list with what was found at each rate; a rate with a p99 above
LATE is the last.
"""

import asyncio
import json
import math
import os
import random
import sys
import time

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray
from ray import serve

import weir
import weir.ray

WORKERS = 4
LATE = 0.5  # seconds of p99 at which a contender is overloaded
SERVE = {"num_replicas": WORKERS, "ray_actor_options": {"num_cpus": 0.1}}


def seconds_of(size: int) -> float:
    """Return for how long a worker sleeps for a batch of `size`."""
    return 0.02 + 0.0005 * size


class Sleeper(weir.Model):
    """Answers each item with the size of its batch."""

    def predict(self, batch):
        time.sleep(seconds_of(len(batch)))
        return [len(batch)] * len(batch)


def batched(decorate):
    """Return a class for deployments whose batches `decorate` cuts."""

    class Replica:
        @decorate
        async def answer(self, items):
            await asyncio.sleep(seconds_of(len(items)))
            return [len(items)] * len(items)

        async def __call__(self, item):
            return await self.answer(int(await item.body()) if hasattr(item, "body") else item)

    return Replica


async def contender(name):
    """Start a contender; return the function that makes a call, and one that ends everything."""
    kind, _, settings = name.partition(":")
    if kind == "weir":
        service = weir.Service(
            Sleeper, executor=weir.Ray(workers=WORKERS, **SERVE["ray_actor_options"], address=ray.get_runtime_context().gcs_address),
            policy=settings, max_batch_size=64, max_queue_size=1 << 16, timeout=60.0, arena_bytes=0,
        )  # fmt: skip
        await service.start()
        return service.infer, service.stop
    await asyncio.to_thread(serve.start, proxy_location="Disabled")  # its port may be taken, and no call goes by HTTP
    handle = await asyncio.to_thread(serve.run, deployment(kind, settings))
    return handle.remote, lambda: asyncio.to_thread(serve.shutdown)


def deployment(kind, settings):
    """Return the application of a contender on Ray Serve; `settings` are the size of a batch and the wait in ms."""
    size = settings.partition(",")[0]
    more = {"max_ongoing_requests": 4 * int(size)} if size else {}
    if kind == "capacity":
        more |= capacity_router()
    return serve.deployment(**SERVE, **more)(batched(decorator(kind, settings))).bind()


def decorator(kind, settings):
    """Return what cuts a contender's batches."""
    size, _, wait = settings.partition(",")
    options = {"max_batch_size": int(size), "batch_wait_timeout_s": float(wait) / 1000} if wait else {}
    if kind == "drop-in":
        return weir.ray.batch(**options or {"policy": "auto:p99=45ms", "max_batch_size": int(size)})
    return serve.batch(**options)


def capacity_router():
    """Return the options with which Ray Serve's own queue of free places routes calls."""
    from ray.serve.config import DeploymentActorConfig, RequestRouterConfig
    from ray.serve.experimental.capacity_queue import CapacityQueue

    queue = DeploymentActorConfig(
        name="queue",
        actor_class=CapacityQueue,
        init_kwargs={"acquire_timeout_s": 30.0, "token_ttl_s": None},
        actor_options={"num_cpus": 0},
    )
    router = RequestRouterConfig(
        request_router_class="ray.serve.experimental.capacity_queue_router:CapacityQueueRouter",
        request_router_kwargs={"capacity_queue_actor_name": "queue"},
    )
    return {"deployment_actors": [queue], "request_router_config": router}


async def put_on(call, rate, seconds):
    """Call at Poisson instants for `seconds`; return the latencies and the sizes of the batches."""
    clock = random.Random(7)
    latencies, sizes, failed = [], [], 0

    async def one(due):
        nonlocal failed
        try:
            size = await call(1)
        except Exception:
            failed += 1
            return
        latencies.append(time.perf_counter() - due)
        sizes.append(size)

    tasks, start = set(), time.perf_counter()
    due = start
    while due < start + seconds:
        due += clock.expovariate(rate)
        wait = due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.add(asyncio.create_task(one(due)))
    await asyncio.wait(tasks, timeout=30)
    return latencies, sizes, failed + sum(not task.done() for task in tasks)


def found(rate, seconds, latencies, sizes, failed):
    """Return what was measured at a rate, as JSON."""
    ordered = sorted(latencies) or [math.inf]
    busy = sum(seconds_of(size) / size for size in sizes)
    return {
        "rate": rate, "p50": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "busy": 1000 * busy / max(1, len(sizes)), "size": sum(sizes) / max(1, len(sizes)), "answered": len(sizes), "failed": failed,
    }  # fmt: skip


async def main(name, seconds, rates):
    """Measure one contender at each rate."""
    call, end = await contender(name)
    results = []
    await put_on(call, 50, 4.0)  # replicas, connections and rules that learn get to know what they need
    for rate in rates:
        results.append(found(rate, seconds, *await put_on(call, rate, seconds)))
        if results[-1]["p99"] > LATE:
            break
    await end()
    return results


def start_ray(store_bytes):
    """Start a Ray of this program alone, which prints nothing."""
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=store_bytes,
    )


if __name__ == "__main__":
    start_ray(100 << 20)
    print(json.dumps(asyncio.run(main(sys.argv[1], float(sys.argv[2]), [float(rate) for rate in sys.argv[3:]]))))
