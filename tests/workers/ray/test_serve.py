"""A model of Weir as a deployment of a real Ray Serve, by HTTP and by handles; and the decorator in a replica."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.documentation.pages import ROOT, do
from tests.workers.ray.clusters import Nodes, free_port

pytestmark = pytest.mark.ray

PROGRAM = """
import asyncio, json, sys, ray, weir.ray
from ray import serve
import weir
from examples.ray.batched import app as lengths


class Square(weir.Model):
    def predict(self, batch):
        return [(item * item, len(batch)) for item in batch]


class Count(weir.Model):
    streaming = True

    def predict(self, batch):
        for number in range(1, max(batch) + 1):
            yield {index: number for index, item in enumerate(batch) if number <= item}


@serve.deployment(max_ongoing_requests=64)
class Shouter:
    @weir.ray.batch(max_batch_size=8, batch_wait_timeout_s=0.05)
    async def shout(self, words):
        return [f"{word.upper()} {len(words)}" for word in words]

    async def __call__(self, word):
        return await self.shout(word)


def main():
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    serve.start(http_options={"port": int(sys.argv[1])})
    square = weir.ray.deployment(Square, policy="control-limit:4", max_batch_size=4, max_queue_delay=30.0, ray_actor_options={"num_cpus": 0.1})
    handle = serve.run(square.bind(), name="square", route_prefix="/square")
    count = weir.ray.deployment(Count, policy="greedy", ray_actor_options={"num_cpus": 0.1})
    counts = serve.run(count.bind(), name="count", route_prefix="/count")
    shouter = serve.run(Shouter.options(ray_actor_options={"num_cpus": 0.1}).bind(), name="shouter", route_prefix="/shouter")
    serve.run(lengths, name="lengths", route_prefix="/lengths")
    answers = [handle.remote(number) for number in range(4)]
    print(json.dumps([answer.result() for answer in answers]))
    print(json.dumps(list(counts.options(stream=True).stream.remote(3))))
    words = [shouter.remote(word) for word in "abcdefgh"]
    print(json.dumps([word.result() for word in words]), flush=True)
    sys.stdin.readline()
    serve.shutdown()
    ray.shutdown()


main()
"""


def test_deployments_and_the_decorator_on_ray_serve(tmp_path: object) -> None:
    port = free_port()
    environment = {**os.environ, "RAY_SERVE_HTTP_KEEP_ALIVE_TIMEOUT_S": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        lines = [json.loads(line) for line in (program.stdout.readline() for _ in range(3)) if line]
        assert lines == [
            [[0, 4], [1, 4], [4, 4], [9, 4]],  # the policy had the replica wait for four
            [1, 2, 3],
            [f"{letter} 8" for letter in "ABCDEFGH"],
        ]
        assert post(port, "/count", b"2") == (200, "1\n2\n")
        assert post(port, "/lengths", b'"abc"') == (200, "3")  # examples/ray/batched.py
        code, body = post(port, "/square", b"{nonsense")
        assert code == 400
        assert json.loads(body)["error"]["type"] == "InvalidRequest"
        program.communicate("\n", timeout=60)


def post(port: int, path: str, body: bytes) -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# docs/how-to/scale-out.md and the example do what they show, on the nodes of a real Ray.


def test_the_page_does_what_it_shows(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    do(ROOT / "docs/how-to/scale-out.md", tmp_path, {})


@pytest.mark.parametrize("own", [True, False], ids=["a Ray of its own", "the nodes"])
def test_the_example(nodes: Nodes, own: bool) -> None:
    arguments = [] if own else [nodes.address]
    environment = {**os.environ, "RAY_ADDRESS": ""}
    done = subprocess.run(
        [sys.executable, ROOT / "examples/ray/sentiment.py", *arguments],
        capture_output=True, text=True, env=environment, timeout=100, check=True,
    )  # fmt: skip
    assert done.stdout.count("is ready on") == 2
    assert "[1, -2, 1]" in done.stdout
    assert done.stdout.count("[1, -2, 1] after a worker was killed") == own
