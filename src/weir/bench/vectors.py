"""Measures how fast a server of text vectors responds to clients each of which waits for its response. The tables are those of bert-as-service's
benchmark."""

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import inf
from threading import Barrier, BrokenBarrierError, Event
from typing import IO, Any, NamedTuple

from weir.client import EmbeddingClient, Unreachable
from weir.client.embedding import EmbeddingTransport
from weir.errors import ModelNotReady, SettingsError, counted

# Each word is one token for the usual English models.
_WORDS = (
    "the of and to in was he is for it with as his on be at by had not are but from or have an they which one you were all her she "
    "there would their we him been has when who will more no if out so up said what its about than into them can only other time new some"
)
WORDS: Sequence[str] = tuple(_WORDS.split())
WARM = 64  # texts in the first request, which is not counted

Connect = Callable[[], EmbeddingClient]


class Clients(NamedTuple):
    """`number` clients. Each sends `batch` texts of `words` words per request."""

    number: int
    batch: int
    words: int


class Patience(NamedTuple):
    """Tells each client to repeat its request at most `repeats` times and for `seconds` seconds, but at least once."""

    repeats: float
    seconds: float

    def is_over(self, repeats: int, seconds: float) -> bool:
        """Return whether that is enough."""
        return repeats >= self.repeats or seconds >= self.seconds


def texts_of(clients: Clients, vocabulary: Sequence[str] = WORDS, seed: int = 0) -> list[list[str]]:
    """Return the texts of each client, made of random words."""
    generator = random.Random(seed)
    return [
        [" ".join(generator.choices(vocabulary, k=clients.words)) for _ in range(clients.batch)]
        for _ in range(clients.number)
    ]


def measure(connect: Connect, clients: Clients, patience: Patience, vocabulary: Sequence[str] = WORDS) -> list[float]:
    """Return the texts per second of each client.

    Only times count at which all clients send: they begin when each is connected and has had a response, and go on until the last one has been
    counted. Raises what a call raises.
    """
    start, over = Barrier(clients.number), Event()
    rates: dict[int, float] = {}

    def count(client: EmbeddingClient, number: int, texts: list[str]) -> None:
        began, answered = time.perf_counter(), 0
        while not over.is_set():
            client.encode(texts)
            answered, passed = answered + 1, time.perf_counter() - began
            if number not in rates and patience.is_over(answered, passed):
                rates[number] = answered * clients.batch / passed
                if len(rates) == clients.number:
                    over.set()

    def run(number: int, texts: list[str]) -> None:
        try:
            with connect() as client:
                client.encode(texts[:WARM])
                start.wait()
                count(client, number, texts)
        except BaseException:
            start.abort()  # the others would wait for this one
            over.set()
            raise

    with ThreadPoolExecutor(clients.number) as pool:
        ended = [pool.submit(run, number, texts) for number, texts in enumerate(texts_of(clients, vocabulary))]
    failed = [error for each in ended if (error := each.exception()) is not None]
    # The client whose call failed knows the reason. Those that waited for it have a BrokenBarrierError only.
    for error in sorted(failed, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [rates[number] for number in range(clients.number)]


# Runs a server with these flags while the block runs.
Serve = Callable[[Sequence[str]], AbstractContextManager[Connect]]


class Table(NamedTuple):
    """A table of results: ints are counts, floats are rates. `remark` is shown below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[float]]
    remark: str = ""

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.columns, ["---:"] * len(self.columns), *(map(_shown, row) for row in self.rows)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"### {self.title}\n\n{table}\n" + (f"\n{self.remark}\n" if self.remark else "")


class TablesPlan(NamedTuple):
    """Says what is to be measured. An empty list leaves its table out.

    `length` and `batch` are the tokens of a text and the texts of a request in tables where they do not vary.
    """

    lengths: Sequence[int] = (20, 40, 80, 160, 320)
    batches: Sequence[int] = (1, 4, 8, 16, 64, 256, 512, 1024, 2048, 4096)
    clients: Sequence[int] = (1, 2, 4, 8, 16, 32)
    batch_sizes: Sequence[int] = (32, 64, 128, 256, 512)
    layers: Sequence[int] = ()
    length: int = 40
    batch: int = 256
    patience: Patience = Patience(8, 5.0)
    vocabulary: Sequence[str] = WORDS

    @property
    def steps(self) -> int:
        """The number of measurements."""
        return sum(map(len, (self.lengths, self.batches, self.clients, self.batch_sizes, self.layers)))


class Tables:
    """Measures the tables of `plan` with servers from `serve`; `progress` is called with a text after each measurement."""

    def __init__(self, plan: TablesPlan, serve: Serve, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._serve = serve
        self._progress = progress

    def measure(self) -> Iterator[Table]:
        """Yield each table when it is done. Where a setting of the server varies, a server is started for each value."""
        plan = self._plan
        if plan.lengths:
            yield self._by_setting("Length of texts", "tokens", "--max-length", plan.lengths)
        if plan.batch_sizes:
            yield self._by_setting(
                "Texts in a batch of the server", "max batch size", "--max-batch-size", plan.batch_sizes
            )
        if plan.layers:
            yield self._by_setting("Pooled layer", "layer", "--layers", plan.layers)
        if plan.batches or plan.clients:
            with self._serve(["--max-length", str(plan.length)]) as connect:
                yield from self._of_one_server(connect)

    def _of_one_server(self, connect: Connect) -> Iterator[Table]:
        plan = self._plan
        if plan.batches:
            rates = {batch: self._rate(connect, Clients(1, batch, plan.length)) for batch in plan.batches}
            least = min(rates)
            remark = (
                "The client waits for each response before it sends again, so that nothing else is in flight. "
                f"With {least} at a time it gets {rates[least] / max(rates.values()):.2f} of its best rate."
            )
            yield Table("Texts in a request of one client", ["texts", "texts/s"], list(rates.items()), remark)
        if plan.clients:
            yield self._by_clients(connect)

    def _by_clients(self, connect: Connect) -> Table:
        """Measure while all clients send: otherwise those that have responses first would seem faster than all together."""
        plan, rows = self._plan, []
        for count in plan.clients:
            rate = self._rate(connect, Clients(count, plan.batch, plan.length))
            rows.append((count, rate / count, rate))
        remark = f"{plan.batch} texts a request; each client waits for its response before it sends again."
        return Table("Clients", ["clients", "texts/s each", "texts/s in all"], rows, remark)

    def _by_setting(self, title: str, column: str, flag: str, values: Sequence[int]) -> Table:
        plan, rows = self._plan, []
        for value in values:
            length = value if flag == "--max-length" else plan.length
            flags = ["--max-length", str(length)]
            if flag == "--max-batch-size":  # full batches, each of which is computed as a whole
                cost = str(value * length)
                flags += [flag, str(value), "--max-batch-cost", cost, "--run-tokens", cost]
            elif flag != "--max-length":
                flags += [flag, str(value)]
            with self._serve(flags) as connect:
                rows.append((value, self._rate(connect, Clients(1, plan.batch, length), f"{flag} {value}: ")))
        return Table(title, [column, "texts/s"], rows, f"One client, {plan.batch} texts a request.")

    def _rate(self, connect: Connect, clients: Clients, what: str = "") -> float:
        """Return the texts per second of all `clients` together. Only a single client stops after some requests."""
        patience = self._plan.patience if clients.number == 1 else Patience(inf, self._plan.patience.seconds)
        rate = sum(measure(connect, clients, patience, self._plan.vocabulary))
        who = f"{counted(clients.number, 'client')}, {counted(clients.batch, 'text')} a request"
        self._progress(f"{what}{who}: {_shown(rate)} texts/s")
        return rate


def _shown(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.1f}"


def as_markdown(tables: Sequence[Table], machine: Mapping[str, Any]) -> str:
    """Return `tables` as Markdown, followed by the facts about the machine."""
    return "\n".join([*(table.markdown() for table in tables), f"<sub>{_listed(machine)}.</sub>\n"])


def _listed(facts: Mapping[str, Any]) -> str:
    inner = ((name, _listed(each) if isinstance(each, Mapping) else each) for name, each in facts.items())
    return ", ".join(f"{name} {each}" for name, each in inner)


ANSWER_SECONDS = 600.0  # a request of thousands of texts takes long on a CPU


class RunningServer(NamedTuple):
    """A running server: its URL, and its ZeroMQ ports for requests and responses (None: clients use HTTP). Calling it returns a new
    client."""

    http: str
    zmq_ports: tuple[int, int] | None = None

    def __call__(self) -> EmbeddingClient:
        transport: EmbeddingTransport | None = None
        if self.zmq_ports is not None:
            from weir.text_server.bert_as_service.client import BertTransport

            transport = BertTransport("127.0.0.1", *self.zmq_ports)
        return EmbeddingClient(self.http, timeout=ANSWER_SECONDS, ignore_all_checks=True, transport=transport)


@contextmanager
def text_server(flags: Sequence[str], *, zmq: bool = False, timeout: float = 300.0) -> Iterator[RunningServer]:
    """Run `weir embed serve` with `flags` in a process of its own while the block runs, which begins when the server is ready.

    Clients use ZeroMQ if `zmq`, else HTTP. Raises SettingsError with the server's output if it does not start, and if it is not ready
    after `timeout` seconds.
    """
    with reserve_ports(3 if zmq else 1) as (port, *others), tempfile.TemporaryFile() as output:
        ports = ["--port", str(port), "--host", "127.0.0.1"]
        if zmq:
            ports += ["--zmq-port", str(others[0]), "--zmq-port-out", str(others[1])]
        command = [sys.executable, "-m", "weir", "embed", "serve", *flags, *ports, "--log-level", "warning"]
        server = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=output, stdin=subprocess.DEVNULL, env=_without_key()
        )
        http = f"http://127.0.0.1:{port}"
        try:
            _wait(server, http, timeout, output)
            yield RunningServer(http, (others[0], others[1]) if zmq else None)
        finally:
            _end(server)


def _without_key() -> dict[str, str]:
    """Return the environment without API keys: the clients here would not send the key of the user's other servers."""
    return {name: value for name, value in os.environ.items() if name not in ("WEIR_API_KEY", "WEIR_API_KEY_FILE")}


@contextmanager
def reserve_ports(count: int) -> Iterator[list[int]]:
    """Yield ports that the system gives to nobody else until the end of the block; a server that names one may listen there.

    A socket that is bound but does not listen keeps its port, and SO_REUSEADDR lets another bind the same one (socket(7)).
    """
    with ExitStack() as sockets:
        ports = []
        for _ in range(count):
            reserved = sockets.enter_context(socket.socket())
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            ports.append(int(reserved.getsockname()[1]))
        yield ports


def _wait(server: "subprocess.Popen[bytes]", url: str, timeout: float, output: IO[bytes]) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if server.poll() is not None:
            output.seek(0)
            text = output.read().decode(errors="replace").strip()
            raise SettingsError(f"the server did not start: {text[-2000:]}")
        try:
            with EmbeddingClient(url, timeout=10.0, ignore_all_checks=True) as client:
                client.encode(["ready"])
                return
        except (Unreachable, ModelNotReady):  # it starts, or loads its model
            time.sleep(0.1)
    raise SettingsError(f"the server was not ready after {timeout:g} s (wait_till_ready)")


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
