"""Clients of every kind that ask one server of texts at the same time, and are not always polite."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy
from bert_serving.client import ConcurrentBertClient

from weir.client import EmbeddingClient
from weir.errors import CapacityError, DeadlineExceeded

Ask = Callable[[Sequence[str], float], Any]

MOST = 300  # texts of a request
TIMEOUTS = (0.02, 60.0)  # seconds
SLACK = 10.0  # seconds after its timeout by which a request has its end, on a machine that has other things to do
STOCK_TIMEOUT = 60.0  # of all requests of a stock client
MAY_BE = {408, 429, 503, 504}  # statuses of who is too late, and of a server whose workers are being killed


class Crowd:
    """Asks until it is told to stop. `reference` has each text's vector as it is alone.

    `ends` counts how requests ended, by client; what must not be is in `faults`.
    """

    def __init__(self, url: str, ports: tuple[int, int], reference: dict[str, Any]) -> None:
        self.url = url
        self.ports = ports
        self.ends: Counter[tuple[str, str]] = Counter()
        self.faults: list[str] = []
        self._texts = list(reference)
        self._reference = reference
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._shared: list[Any] = []

    def start(self, number: int) -> None:
        """Begin with so many clients, of all kinds in turn."""
        kinds = (self._own, self._encode, self._stock)
        for place in range(number):
            ask = kinds[place % len(kinds)]
            name = ask.__name__.strip("_")
            self._threads.append(threading.Thread(target=self._live, args=(place, name, ask), name=f"{name}-{place}"))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each finish what it has asked; those that do not are at fault."""
        self._stop.set()
        until = time.monotonic() + 3 * TIMEOUTS[1] + SLACK
        for thread in self._threads:
            thread.join(max(0.1, until - time.monotonic()))
            if thread.is_alive():
                self.faults.append(f"{thread.name} waits for ever")
        for client in self._shared:
            client.close()

    def _live(self, seed: int, name: str, connect: Callable[[random.Random], tuple[Ask, Callable[[], None]]]) -> None:
        chance = random.Random(seed)

        ask, close = self._connected(connect, chance)
        while not self._stop.is_set():
            texts = chance.sample(self._texts, int(MOST ** chance.random()))
            low, high = TIMEOUTS
            timeout = STOCK_TIMEOUT if name == "stock" else low * (high / low) ** chance.random()
            began = time.monotonic()
            end = self._end(ask, texts, timeout)
            took = time.monotonic() - began
            self.ends[name, end] += 1
            if took > timeout + SLACK and name != "stock":  # that one counts anew with every message that it hears
                self.faults.append(f"{name}: {len(texts)} texts, timeout {timeout:.2f}: {end} after {took:.2f} s")
            if chance.random() < 0.05:
                close()
                ask, close = self._connected(connect, chance)
        close()

    def _connected(self, connect: Any, chance: random.Random) -> tuple[Ask, Callable[[], None]]:
        while True:
            try:
                made: tuple[Ask, Callable[[], None]] = connect(chance)
                return made
            except (DeadlineExceeded, CapacityError) as error:
                self.ends[connect.__name__.strip("_"), f"connect: {type(error).__name__}"] += 1

    def _end(self, ask: Ask, texts: Sequence[str], timeout: float) -> str:
        try:
            vectors = ask(texts, timeout)
        except _Left:
            return "left"
        except (DeadlineExceeded, CapacityError, TimeoutError, httpx.TimeoutException) as error:
            return type(error).__name__
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in MAY_BE:
                self.faults.append(f"{len(texts)} texts: {error.response.status_code} {error.response.text[:300]}")
            return str(error.response.status_code)
        except Exception as error:
            self.faults.append(f"{len(texts)} texts: {error!r:.300}")
            return type(error).__name__
        found = numpy.asarray(vectors, numpy.float64)
        wanted = numpy.stack([self._reference[text] for text in texts])
        if found.shape != wanted.shape:
            self.faults.append(f"{len(texts)} texts: vectors of the shape {found.shape}")
            return "wrong"
        cosines = (found * wanted).sum(1) / numpy.linalg.norm(found, axis=1) / numpy.linalg.norm(wanted, axis=1)
        if cosines.min() < 0.99999:
            self.faults.append(f"{len(texts)} texts: a vector with cosine {cosines.min()}")
            return "wrong"
        return "answered"

    # The clients: each returns how it asks, and how it is closed.

    def _own(self, chance: random.Random) -> tuple[Ask, Callable[[], None]]:
        client = EmbeddingClient(self.url, timeout=30.0, identity=f"own-{chance.randrange(4)}", check_length=False)
        return lambda texts, timeout: client.encode(texts, timeout=timeout), client.close

    def _encode(self, chance: random.Random) -> tuple[Ask, Callable[[], None]]:
        client = httpx.Client(base_url=self.url)

        def ask(texts: Sequence[str], timeout: float) -> Any:
            leaves = chance.random() < 0.3
            headers = {"X-Request-Timeout": f"{timeout:.6f}"}
            if chance.random() < 0.7:
                headers["X-Client-Id"] = f"encode-{chance.randrange(3)}"
            patience = timeout * chance.random() if leaves else timeout + SLACK / 2
            try:
                said = client.post("/encode", json={"id": 1, "texts": list(texts)}, headers=headers, timeout=patience)
            except httpx.TimeoutException:
                if leaves:
                    raise _Left from None
                raise
            return said.raise_for_status().json()["result"]

        return ask, client.close

    def _stock(self, chance: random.Random) -> tuple[Ask, Callable[[], None]]:
        with _SHARING:
            if not self._shared:
                port, out = self.ports
                timeout = int(1e3 * STOCK_TIMEOUT)
                self._shared.append(
                    ConcurrentBertClient(
                        64, ip="127.0.0.1", port=port, port_out=out, timeout=timeout, check_length=False
                    )
                )
        client = self._shared[0]
        return lambda texts, timeout: client.encode(list(texts)), lambda: None


class _Left(Exception):
    """The client has gone away before the answer."""


_SHARING = threading.Lock()
