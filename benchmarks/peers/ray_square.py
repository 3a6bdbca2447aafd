"""Ray Serve 2.60.0: square; one replica, batches of up to 64 that wait for 10 ms, its defaults. Run with --port PORT."""

import os
import sys
import time

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray
from ray import serve


@serve.deployment(ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=1000)
class Square:
    @serve.batch(max_batch_size=64)
    async def square(self, numbers):
        return [x * x for x in numbers]

    async def __call__(self, request):
        return await self.square(await request.json())


if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    port = int(sys.argv[2]) + ("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT" in os.environ)  # else the proxy would be asked
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Square.bind(), route_prefix="/infer")
    while True:
        time.sleep(3600)
