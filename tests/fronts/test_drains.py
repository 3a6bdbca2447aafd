"""Drains and reloads under load before two fronts, in every protocol: what a worker has computed has been answered, and nothing is left."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from tests.fronts.kit import LOST, MOST_GROWTH, Caller, figures, fronts_of, metric
from tests.served import Served, still_running, until

from weir.client import NEVER, Client, ConnectionLost, GrpcClient, Unreachable, WebSocketClient
from weir.errors import Cancelled, CapacityError

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
PATIENCE = 250  # seconds that a drain may take
IDLE = 50  # connections that ask nothing

# Notes what it computes, before it answers.
MODEL = """
import time
import weir

def noted(numbers, adds={adds}):
    time.sleep(0.005)
    with open({file!r}, "a") as file:
        file.write("".join(f"{{number}}\\n" for number in numbers))
    return [number + adds for number in numbers]

class Items(weir.Model):
    def predict(self, batch):
        return noted(batch)

class Tensors(weir.Model):
    inputs = (weir.Tensor("number", "INT64", (-1,)),)
    outputs = (weir.Tensor("sum", "INT64", (-1,)),)

    def predict(self, batch):
        import numpy
        return {{"sum": numpy.array(noted(batch["number"].tolist()))}}
"""

Ask = Callable[[int], int]


class Refused(Exception):
    """The server has refused a request."""


class Closed(Exception):
    """The server has closed a connection, or accepts none."""


def body_of(caller: Caller, path: str, body: bytes) -> Any:
    """Return the response to a request as JSON. Raises Refused if it says when to try again."""
    try:
        caller.send(path, body)
        status, headers, answered = caller.answer()
    except LOST as error:
        raise Closed from error
    if status == 503 and "retry-after" in headers:
        raise Refused
    if status == 0:
        assert not answered
        raise Closed
    assert status == 200, (status, answered)
    return json.loads(answered)


@contextmanager
def by_http(served: Served, path: str, body: Callable[[int], Any], read: Callable[[Any], int]) -> Iterator[Ask]:
    """Give what asks over one connection of HTTP."""
    try:
        caller = Caller(served.url)
    except LOST as error:
        raise Closed from error
    with caller:
        yield lambda number: read(body_of(caller, path, json.dumps(body(number)).encode()))


@contextmanager
def by_client(client: Client) -> Iterator[Ask]:
    """Give what asks with a client."""

    def ask(number: int) -> int:
        try:
            found = client.infer("tensors", {"number": numpy.array([number])})
        except (ConnectionLost, Unreachable, Cancelled) as error:  # the last one as gRPC closes a connection
            raise Closed from error
        except CapacityError as error:
            raise Refused from error
        return int(found["sum"][0])

    with client:
        yield ask


def tensor(number: int) -> Any:
    return {"inputs": [{"name": "number", "datatype": "INT64", "shape": [1], "data": [number]}]}


WAYS: dict[str, Callable[[Served], Any]] = {
    "items": lambda served: by_http(served, "/infer/items", lambda number: number, int),
    "lists": lambda served: by_http(served, "/infer/items/batch", lambda number: [number], lambda each: each[0]["output"]),
    "KServe": lambda served: by_http(served, "/v2/models/tensors/infer", tensor, lambda each: each["outputs"][0]["data"][0]),
    "gRPC": lambda served: by_client(GrpcClient(served.grpc, retry=NEVER)),
    "WebSocket": lambda served: by_client(WebSocketClient(served.url, retry=NEVER)),
}  # fmt: skip


class Load:
    """Callers in every protocol, three of each, which go on until the block ends. Each asks with numbers that nobody else has.

    `adds` has what the models have added, in order, up to a version that may be about to be loaded; from `least` on they may add it to a new request.
    """

    def __init__(self, served: Served) -> None:
        self.adds = [1]
        self.least = 0
        self.answered: dict[str, list[int]] = {way: [] for way in WAYS}
        self.wrong: list[tuple[str, int, int]] = []
        self.refused: list[int] = []
        self.closed: list[int] = []  # those whose connection was closed before their response
        self._served = served
        self._numbers = count(1)
        self._over = threading.Event()

    def __enter__(self) -> "Load":
        self._pool = ThreadPoolExecutor(3 * len(WAYS))
        self._asking = [self._pool.submit(self._run, way) for way in WAYS for _ in range(3)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        for each in self._asking:
            each.result()

    def until_more(self, least: int) -> None:
        """Return when so many more requests were answered in every protocol."""
        before = {way: len(numbers) for way, numbers in self.answered.items()}
        until(lambda: self._failed() or all(len(self.answered[way]) >= before[way] + least for way in WAYS), 60)

    def _failed(self) -> bool:
        return any(each.done() for each in self._asking)

    def _run(self, way: str) -> None:
        while not self._over.is_set():
            number = None
            try:
                with WAYS[way](self._served) as ask:
                    while not self._over.is_set():
                        number, least = next(self._numbers), self.least
                        answer = ask(number)
                        if answer - number not in self.adds[least:]:
                            self.wrong.append((way, number, answer))
                        self.answered[way].append(number)
                        number = None
            except Refused:
                self.refused.append(number or 0)
            except Closed:
                self.closed.append(number or 0)
                self._over.wait(0.01)  # no server may listen any more


def computed(notes: Path) -> set[int]:
    """Return the numbers that a worker has computed, without that of its first try."""
    return set(map(int, notes.read_text().split())) - {0}


def serve(folder: Path) -> Served:
    """Serve MODEL with two fronts."""
    file = folder / "model.py"
    file.write_text(MODEL.format(adds=1, file=str(folder / "notes")))
    return Served(
        f"{file}:Items", f"{file}:Tensors", "--fronts", 2, "--grpc-port", 0, "--drain-timeout", PATIENCE, "--log-level", "info",
        env={"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


def drain_once(folder: Path) -> int:
    """Start a server, end it under load, and return how many requests it has answered."""
    with serve(folder) as served, ExitStack() as stack:
        served.until_grpc().until_ready()
        processes = served.children()
        idle = [stack.enter_context(Caller(served.url)) for _ in range(IDLE)]
        with Load(served) as load:
            load.until_more(20)
            served.signal(signal.SIGTERM)
            code = served.wait()  # less than PATIENCE
        assert code == 0
        assert [caller.answer()[0] for caller in idle] == [0] * IDLE
        assert not still_running(processes)
    assert not load.wrong
    answered = {number for numbers in load.answered.values() for number in numbers}
    unanswered = computed(folder / "notes") - answered
    assert not unanswered, f"{sorted(unanswered)} were computed; closed: {load.closed}, refused: {load.refused}"
    return len(answered)


def reload_for(folder: Path, seconds: float, first: int) -> None:
    """Reload models under load for so long: no request is lost or refused, and no former model answers what is asked once a load call has been answered.

    The `first` reloads load code and fill caches.
    """
    with serve(folder) as served:
        served.until_grpc().until_ready()
        processes = [psutil.Process(served.process.pid), *fronts_of(served)]

        with Load(served) as load, Caller(served.url) as control:
            end, before, version = time.monotonic() + seconds, list(map(figures, processes)), 0
            while version <= first or time.monotonic() < end:
                load.until_more(20)
                version += 1
                load.adds.append(1_000_000 * version)
                (folder / "model.py").write_text(MODEL.format(adds=load.adds[-1], file=str(folder / "notes")))
                for model in ("items", "tensors"):
                    assert control.call(f"/v2/repository/models/{model}/load")[0] == 200
                load.least = version
                if version == first:
                    before = list(map(figures, processes))
            load.until_more(20)
            # Calls are under way, and workers that were replaced may still be ending.
            until(lambda: all(now.num_fds() <= then[0] + 4 for now, then in zip(processes, before, strict=True)))
            after = list(map(figures, processes))
        print(f"{sum(map(len, load.answered.values()))} answered, {version} reloads; before {before}, after {after}")
        assert not (load.wrong or load.closed or load.refused), (load.wrong, load.closed, load.refused)
        for (_, memory), (_, memory_then) in zip(before, after, strict=True):
            assert memory_then <= memory + MOST_GROWTH
        until(lambda: metric(served, "weir_connections") == 1)


def test_a_drain_under_load_answers_what_was_computed(tmp_path: Path, nothing_is_left: None) -> None:
    assert drain_once(tmp_path) >= 100


def test_reloads_under_load_reach_every_protocol(tmp_path: Path) -> None:
    reload_for(tmp_path, 0, 1)


@pytest.mark.soak
@pytest.mark.timeout(2 * SECONDS + 300)
def test_drains_and_reloads_under_load_again_and_again(tmp_path: Path, nothing_is_left: None) -> None:
    reload_for(tmp_path, SECONDS, 5)
    end, drains = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        drains += 1
        folder = tmp_path / str(drains)
        folder.mkdir()
        drain_once(folder)
