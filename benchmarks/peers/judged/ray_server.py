"""Ray Serve 2.60.0 over HTTP. Run with --port PORT."""

import os
import sys
import time

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray
from computing import compute, judged
from ray import serve

KIND, BATCH, WAIT = judged()


class One:
    async def __call__(self, request):
        item = await request.json()
        compute(KIND, 1)
        return item


class Many:
    @serve.batch(max_batch_size=max(1, BATCH), batch_wait_timeout_s=WAIT / 1000)
    async def answer(self, items):
        compute(KIND, len(items))
        return items

    async def __call__(self, request):
        return await self.answer(await request.json())


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
    more = {"max_ongoing_requests": 4 * BATCH} if BATCH else {}
    kind = serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0.1}, **more)(Many if BATCH else One)
    serve.run(kind.bind(), route_prefix="/infer")
    while True:
        time.sleep(3600)
