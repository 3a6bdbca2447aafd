"""`weir embed serve` under a crowd of clients, while its processes are killed: every request has its end, nothing is left behind."""

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.commands.embed.crowd import MOST as MOST_TEXTS
from tests.commands.embed.crowd import Crowd
from tests.served import COLD, Served, until
from tests.text_models import tiny

from weir.bench.vectors import reserve_ports
from weir.client import EmbeddingClient
from weir.client.calls import NEVER, Unreachable
from weir.errors import CapacityError, Draining, WeirError
from weir.text_server.metrics import MAX_REMEMBERED
from weir.text_server.server_settings import INSTALL, installed_model

SECONDS = 120.0
CLIENTS = 64
PAUSES = (0.5, 8.0)  # seconds between two kills
MOST_THREADS = 10  # that a server of few CPUs may have begun meanwhile, for large requests
ASKING, MOST_AT_ONCE = 8, 200  # threads, and texts of each, while the server is told to end
WORDS = "the a river weir flows over stone when water rises and falls in long dry summer"


@pytest.fixture(params=["tiny", "small"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model, fast enough that all else shows; and the one that is served when none is named."""
    if request.param == "tiny":
        return tiny.model(tmp_path / "tiny", layers=2)
    directory = installed_model()
    if directory is None:
        pytest.skip(f"the model is not installed: {INSTALL}")
    return directory


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """Two that nobody else gets."""
    with reserve_ports(2) as (one, other):
        yield one, other


@pytest.fixture
def served(model: Path, ports: tuple[int, int], tmp_path: Path) -> Iterator[Served]:
    with tempfile.TemporaryFile() as log:
        with Served(
            model, "--workers", 2, "--cache", tmp_path / "cache", "--zmq-port", ports[0], "--zmq-port-out", ports[1],
            "--no-calibrate", command="embed serve", stderr=log.fileno(), env=COLD,
        ) as served:  # fmt: skip
            served.url = served.until_printed(r"curl .*?(http://\S+)/encode")[1]
            yield served
        log.seek(0)
        print(log.read().decode()[-20_000:])


def texts() -> list[str]:
    chance = random.Random(4)
    return [
        f"{number} " + " ".join(chance.choices(WORDS.split(), k=chance.randint(1, 40)))
        for number in range(MOST_TEXTS + 50)
    ]


def kill_one(server: psutil.Process, chance: random.Random, of_template: bool) -> str:
    """End a worker, or what the workers are forked from, and they with it; the server's own children only."""
    try:
        running = [child for child in server.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
        template = [child for child in running if child.ppid() == server.pid and "template" in child.cmdline()]
        victims = template if template and of_template else [child for child in running if child not in template]
        chance.choice(victims).kill()
    except (psutil.Error, IndexError):
        return "nobody"  # they are being started
    return "template" if victims is template else "worker"


def held(server: psutil.Process) -> dict[str, int]:
    """Return what the server itself has."""
    return {"descriptors": server.num_fds(), "threads": server.num_threads(), "MiB": server.memory_info().rss >> 20}


def is_at_rest(url: str) -> bool:
    """Return whether nothing waits or runs any more, and all workers are there."""
    (name,) = httpx.get(f"{url}/status/server", timeout=30).json()["models"]
    state = httpx.get(f"{url}/models/{name}", timeout=30).json()
    ready = all(worker["state"] == "ready" for worker in state["workers"])
    return (state["waiting"], state["in_flight_batches"], ready) == (0, 0, True)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_request_of_a_crowd_has_its_end(served: Served, ports: tuple[int, int]) -> None:
    chance = random.Random(1)
    server = psutil.Process(served.process.pid)
    with EmbeddingClient(served.url, check_length=False) as client:
        reference: dict[str, Any] = {text: client.encode([text])[0] for text in texts()}
    at_rest = held(server)
    crowd = Crowd(served.url, ports, reference)
    crowd.start(CLIENTS)
    end, killed = time.monotonic() + SECONDS, Counter[str]()
    while time.monotonic() < end:
        time.sleep(chance.uniform(*PAUSES))
        killed[kill_one(server, chance, of_template=time.monotonic() > end - SECONDS / 2)] += 1
        print(f"{end - time.monotonic():6.1f} {held(server)} {dict(killed)}", flush=True)
    crowd.stop()
    for key, count in sorted(crowd.ends.items()):
        print(*key, count)
    assert crowd.faults == []
    assert killed["template"] and killed["worker"]
    assert {name for name, end in crowd.ends if end == "answered"} == {"own", "encode", "stock"}
    until(lambda: is_at_rest(served.url))
    until(lambda: held(server)["descriptors"] <= at_rest["descriptors"])
    print(at_rest, held(server))
    assert held(server)["threads"] <= at_rest["threads"] + MOST_THREADS
    assert len(httpx.get(f"{served.url}/status/client").json()["clients"]) <= MAX_REMEMBERED
    drains(served, reference)


def drains(served: Served, reference: dict[str, Any]) -> None:
    """Whoever asks on and on while the server is told to end gets answers until it is refused, and the server ends by itself."""
    batch = list(reference)[:MOST_AT_ONCE]
    begun = threading.Barrier(ASKING + 1)

    def ask_on() -> WeirError:
        begun.wait()
        while True:
            try:
                assert client.encode(batch).shape == (len(batch), len(reference[batch[0]]))
            except CapacityError as refusal:
                return refusal

    with ThreadPoolExecutor(ASKING) as threads, EmbeddingClient(served.url, check_length=False, retry=NEVER) as client:
        refusals = [threads.submit(ask_on) for _ in range(ASKING)]
        begun.wait()
        served.process.terminate()
        assert {type(each.result(60)) for each in refusals} <= {Draining, Unreachable}
        assert served.wait() == 0
