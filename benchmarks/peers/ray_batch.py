"""Runs in the environment of Ray Serve: decorators that cut batches, inside one replica, so that no router and no call between processes is measured.

    python ray_batch.py CONTENDER SECONDS RATE [RATE ...]

The replica calls its own method at Poisson instants. It prints a JSON list with what was found at each
rate. The contenders are those of ray_serve.py.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ray
from ray import serve
from ray_serve import batched, decorator, found, put_on, start_ray


def loaded(decorate):
    """Return a class for deployments that loads itself."""

    class Loaded(batched(decorate)):
        async def load(self, rate, seconds):
            await put_on(self.answer, rate, 1.0)  # rules that learn get to know the batches
            return found(rate, seconds, *await put_on(self.answer, rate, seconds))

    return Loaded


def measure(name, rates, seconds):
    """Return what one contender did at each rate."""
    kind, _, settings = name.partition(":")
    results = []
    for rate in rates:  # each has a replica of its own: what one rate left behind is not the next one's
        options = {"num_replicas": 1, "max_ongoing_requests": 10_000, "ray_actor_options": {"num_cpus": 0.1}}
        handle = serve.run(serve.deployment(**options)(loaded(decorator(kind, settings))).bind())
        results.append(handle.load.remote(rate, seconds).result())
        serve.delete("default")
    return results


if __name__ == "__main__":
    start_ray(100 << 20)
    print(json.dumps(measure(sys.argv[1], [float(rate) for rate in sys.argv[3:]], float(sys.argv[2]))))
    ray.shutdown()
