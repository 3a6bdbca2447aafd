"""A real `weir serve --fronts 2`, and connections to a front of one's choice."""

import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy
import psutil
from tests.frontends.http.sockets import FILES
from tests.served import MODELS as SERVED_MODELS
from tests.served import Served, still_running, until

SQUARE = f"{SERVED_MODELS}:Square"
TEMPLATE = "weir.fronts.front"  # what their template, and so they, were started to run
MODELS = Path(__file__).with_name("models.py")


def fronts_of(served: Served) -> list[psutil.Process]:
    """Return the processes of the fronts."""
    found = []
    for each in served.children():
        with suppress(psutil.Error):
            if TEMPLATE in each.cmdline() and TEMPLATE in psutil.Process(each.ppid()).cmdline():
                found.append(each)
    return sorted(found, key=lambda front: front.pid)


def workers_of(served: Served) -> list[psutil.Process]:
    """Return the processes of the server that are no fronts and have no children: workers, and templates that wait."""
    fronts = {front.pid for front in fronts_of(served)}
    found = []
    for each in served.children():
        with suppress(psutil.Error):
            if each.pid not in fronts and TEMPLATE not in each.cmdline() and not each.children():
                found.append(each)
    return found


LOST = (ConnectionError, ssl.SSLEOFError)  # with TLS, a front that is killed does not say that it closes
TLS = ssl.create_default_context(cafile=FILES["tls_certfile"])
ENCRYPTED = ("--tls-certfile", FILES["tls_certfile"], "--tls-keyfile", FILES["tls_keyfile"])
MOST_GROWTH = 8 << 20  # bytes by which a process may be larger after a soak


def figures(process: psutil.Process) -> tuple[int, int]:
    """Return how many descriptors a process has, and its own memory in bytes."""
    return process.num_fds(), process.memory_full_info().uss


def admitted(served: Served, path: str = "/infer/square", method: str = "POST") -> bool:
    """Return whether a new connection gets its response."""
    with suppress(*LOST), Caller(served.url) as caller:
        return caller.call(path, b"2" if method == "POST" else b"", method)[0] == 200
    return False


class Caller:
    """One connection to a server."""

    def __init__(self, url: str, session: ssl.SSLSession | None = None) -> None:
        scheme, _, address = url.partition("://")
        host, _, port = address.rpartition(":")
        self.socket = socket.socket()
        self.socket.settimeout(200)
        if scheme == "https":  # before it connects: of one that is reset first, `ssl` would leave a socket open
            self.socket = TLS.wrap_socket(self.socket, server_hostname=host, session=session)
        try:
            self.socket.connect((host, int(port)))
        except OSError:
            self.socket.close()
            raise
        self._file = BufferedReader(socket.SocketIO(self.socket, "r"))  # does not keep it open, as a file would

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, path: str, body: bytes = b"", method: str = "POST", headers: str = "") -> None:
        """Send a request."""
        head = f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        self.socket.sendall(head.encode() + body)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the next response; status 0 if the server has closed the connection."""
        try:
            first = self._file.readline()
        except LOST:
            first = b""
        if not first.endswith(b"\n"):
            return 0, {}, first
        headers = {}
        while (line := self._file.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers.get("content-length", 0))
        body = self._file.read(length)
        if len(body) < length:
            raise ConnectionResetError("the response ends early")
        return int(first.split()[1]), headers, body

    def call(self, path: str, body: bytes = b"", method: str = "POST", headers: str = "") -> tuple[int, bytes]:
        """Send a request, and return status and body of its response."""
        self.send(path, body, method, headers)
        status, _, answered = self.answer()
        return status, answered

    def ask(self, path: str, body: bytes, headers: str = "") -> tuple[int, bytes]:
        """As `call`. Raises ConnectionError if the server has closed the connection."""
        status, answered = self.call(path, body, headers=headers)
        if status == 0:
            raise ConnectionResetError("no response")
        return status, answered


def squares_around_a_page(url: str) -> list[bytes]:
    """Send, in one piece, a request that a front answers, one that the dispatcher answers, and again one; return the squares of 3 and 5."""
    with Caller(url) as caller:
        hot = b"POST /infer/square HTTP/1.1\r\nHost: test\r\nContent-Length: 1\r\n\r\n"
        caller.socket.sendall(hot + b"3" + b"GET /health/live HTTP/1.1\r\nHost: test\r\n\r\n" + hot + b"5")
        return [caller.answer()[2] for _ in range(3)][::2]


class Callers:
    """Threads that ask, while the block runs, each on one connection after another.

    `ask` gets a connection and a number that nobody else gets, and returns whether the response was right, or None if there was none; it raises
    ConnectionError if the connection is lost.
    """

    def __init__(self, served: Served, count: int, ask: Callable[[Caller, int], bool | None], on_one: int = 50) -> None:
        self.answered = [0] * count
        self.wrong: list[int] = []
        self.lost = 0  # connections
        self._served = served
        self._ask = ask
        self._on_one = on_one
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> Self:
        self._asking = [self._pool.submit(self._run, index) for index in range(len(self.answered))]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._pool.shutdown()
        for each in self._asking:
            each.result()

    def until_more(self, count: int) -> None:
        """Return when so many more requests have been answered."""
        least = sum(self.answered) + count
        until(lambda: sum(self.answered) > least)

    def lose(self, victim: psutil.Process, count: int) -> None:
        """Kill a process of the server, and return when there are two fronts, and so many more requests have been answered."""
        victim.kill()
        still_running([victim])
        until(lambda: len(fronts_of(self._served)) == 2)
        self.until_more(count)

    def _run(self, index: int) -> None:
        number = 1000 * index
        while not self._over.is_set():
            try:
                with Caller(self._served.url) as caller:
                    for _ in range(self._on_one):
                        number += 1
                        right = self._ask(caller, number)
                        if right is False:
                            self.wrong.append(number)
                        self.answered[index] += right is not None
            except LOST:
                self.lost += 1


def is_squared(caller: Caller, number: int) -> bool:
    """Ask for the square of `number`; return whether it came."""
    return caller.ask("/infer/square", b"%d" % number) == (200, b"%d" % number**2)


DATATYPES = {"<f4": "FP32", "<f8": "FP64"}


def with_header(data: bytes, datatype: str, shape: Sequence[int], **more: Any) -> tuple[bytes, str]:
    """Return the body and the header of a request with a binary tensor `a`."""
    tensor = {"name": "a", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(data)}}
    header = json.dumps({"inputs": [tensor], **more}).encode()
    return header + data, f"Inference-Header-Content-Length: {len(header)}\r\n"


def binary(array: numpy.ndarray[Any, Any], **more: Any) -> tuple[bytes, str]:
    """Return the body and the header of a request with a binary tensor of numbers."""
    return with_header(array.tobytes(), DATATYPES[array.dtype.str], array.shape, **more)


def texts_of(*texts: bytes) -> tuple[bytes, str]:
    """Return the body and the header of a request for texts twice."""
    elements = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return with_header(elements, "BYTES", [len(texts)], parameters={"binary_data_output": True})


@contextmanager
def calling(served: Served, front: psutil.Process) -> Iterator[Caller]:
    """Give a connection that `front` has accepted: the kernel divides connections among the fronts, so some are tried."""
    tried: list[Caller] = []
    try:
        for _ in range(100):
            caller = Caller(served.url)
            tried.append(caller)
            until(partial(owners, served, caller))
            if owners(served, caller) == [front.pid]:
                break
        else:
            raise AssertionError(f"none of 100 connections has come to front {front.pid}")
        for each in tried[:-1]:
            each.socket.close()
        yield tried[-1]
    finally:
        for each in tried:
            each.socket.close()


def owners(served: Served, caller: Caller) -> list[int]:
    """Return the fronts that have the connection of `caller`."""
    wanted = f":{caller.socket.getsockname()[1]:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{fields[9]}]" for fields in lines if fields[2].endswith(wanted)}
    found = []
    for process in fronts_of(served):
        for descriptor in Path(f"/proc/{process.pid}/fd").glob("*"):
            with suppress(OSError):
                if os.readlink(descriptor) in sockets:
                    found.append(process.pid)
    return found


def connections_of(served: Served) -> int:
    """Return how many connections of clients the processes of a server have."""
    port = int(served.url.rpartition(":")[2])
    processes = {served.process.pid, *(front.pid for front in fronts_of(served))}
    found = [
        each
        for each in psutil.net_connections("tcp")
        if each.pid in processes and each.laddr and each.laddr.port == port
    ]
    return sum(each.status != psutil.CONN_LISTEN and bool(each.raddr) for each in found)


def limit_descriptors(served: Served) -> None:
    """Have each process of a server, and those that it starts from now on, open 256 files at most."""
    for process in (psutil.Process(served.process.pid), *served.children()):
        process.rlimit(psutil.RLIMIT_NOFILE, (256, 256))


def get(served: Served, path: str = "/metrics", headers: str = "") -> str:
    """Return a page of a server, or its metrics."""
    with Caller(served.url) as caller:
        return caller.call(path, method="GET", headers=headers)[1].decode()


def metric(served: Served, name: str, headers: str = "", **labels: Any) -> float:
    """Return the sum of the samples `name` with these labels, now."""
    return total(get(served, headers=headers), name, **labels)


class Increase:
    """What a server has counted since this was made."""

    def __init__(self, served: Served) -> None:
        self._served, self._before = served, get(served)

    def __call__(self, name: str, **labels: Any) -> float:
        return metric(self._served, name, **labels) - total(self._before, name, **labels)


def outcomes(served: Served, path: str, body: bytes, headers: str) -> list[tuple[Any, ...]]:
    """Return status, headers and body of the responses to two requests on one connection: the second finds its head in the memo, or a
    connection that was handed over."""
    found: list[tuple[Any, ...]] = []
    with Caller(served.url) as caller:
        while len(found) < 2:
            caller.send(path, body, headers=headers)
            while (answer := caller.answer())[0] == 100:
                pass
            answer[1].pop("date", None)
            found.append(answer)
            if answer[1].get("connection") == "close":
                break
    return found


class Gate:
    """A model that waits, and its pipes."""

    def __init__(self, folder: Path) -> None:
        self.begun, self.gate = folder / "begun", folder / "gate"
        os.mkfifo(self.begun)
        os.mkfifo(self.gate)

    @property
    def arguments(self) -> list[object]:
        """Those of a server with the model and two fronts."""
        params = ("--param", f"begun={self.begun}", "--param", f"gate={self.gate}")
        return [f"{SERVED_MODELS}:Gated", *params, "--max-batch-size", 1, "--fronts", 2]

    def open(self) -> None:
        """Let the model go on."""
        self.gate.write_text("go")


def total(metrics: str, name: str, **labels: Any) -> float:
    """Return the sum of the samples `name` with these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if line.startswith((name + "{", name + " ")) and all(each in line for each in wanted)
    )
