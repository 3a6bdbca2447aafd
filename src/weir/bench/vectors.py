"""How fast a server of sentence vectors answers clients that each wait for one answer before they ask again, or keep several requests under way."""

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from pathlib import Path
from statistics import median
from threading import Barrier, Event, Lock
from typing import IO, Any, NamedTuple

import msgspec

from weir.client import EmbeddingClient, Unreachable
from weir.client.embedding import EmbeddingTransport
from weir.errors import SettingsError
from weir.figures import figure, styles

# Each is one token for the usual models of English.
_WORDS = (
    "the of and to in was he is for it with as his on be at by had not are but from or have an they which one you were all her she "
    "there would their we him been has when who will more no if out so up said what its about than into them can only other time new some"
)
WORDS: Sequence[str] = tuple(_WORDS.split())
WARM = 64  # texts of a first request, which is not counted

Connect = Callable[[], EmbeddingClient]


class Clients(NamedTuple):
    """So many, each of which asks for so many texts of so many words at once, and keeps `ahead` such requests under way."""

    number: int
    batch: int
    words: int
    ahead: int = 1

    @property
    def under_way(self) -> int:
        """Texts of all of them together that the server has at a time."""
        return self.number * self.batch * self.ahead


class Patience(NamedTuple):
    """How often each client asks: at most `repeats` times, and no more once `seconds` are over; at least once."""

    repeats: int
    seconds: float


def texts_of(clients: Clients, vocabulary: Sequence[str] = WORDS, seed: int = 0) -> list[list[str]]:
    """Return what each client asks for: words by chance, no text twice but by chance. All together are the same texts
    wherever as many are under way."""
    chance = random.Random(seed)
    return [
        [" ".join(chance.choices(vocabulary, k=clients.words)) for _ in range(clients.batch * clients.ahead)]
        for _ in range(clients.number)
    ]


def measure(connect: Connect, clients: Clients, patience: Patience, vocabulary: Sequence[str] = WORDS) -> list[float]:
    """Return the texts per second that each client got that waits for each answer. Begins when all of them are connected and
    have had an answer. Raises what a call raises."""
    return _together(connect, clients, vocabulary, lambda client, texts: _waiting(client, texts, patience), Event())


def measure_steady(
    connect: Connect, clients: Clients, seconds: float, vocabulary: Sequence[str] = WORDS
) -> list[float]:
    """Return the texts per second that each client got that keeps `clients.ahead` requests under way, for `seconds` and at least
    one answer. Counted is only while all of them ask: from when all that was asked first is answered, and the others go on until the
    last has been counted. All is answered at the end. Raises what a call raises."""
    over, lock, left = Event(), Lock(), [clients.number]

    def counted() -> None:
        with lock:
            left[0] -= 1
            if not left[0]:
                over.set()

    def one(client: EmbeddingClient, texts: list[str]) -> float:
        return _Steady(clients, seconds, counted, over).rate(client, texts)

    return _together(connect, clients, vocabulary, one, over)


def _together(
    connect: Connect, clients: Clients, vocabulary: Sequence[str], one: Callable[[EmbeddingClient, list[str]], float], over: Event
) -> list[float]:  # fmt: skip
    start = Barrier(clients.number)

    def connected(texts: list[str]) -> float:
        try:
            with connect() as client:
                client.encode(texts[:WARM])
                start.wait()
                return one(client, texts)
        except BaseException:
            start.abort()  # the others would wait for this one
            over.set()
            raise

    with ThreadPoolExecutor(clients.number) as pool:
        asking = [pool.submit(connected, texts) for texts in texts_of(clients, vocabulary)]
        failed = [error for each in asking if (error := each.exception()) is not None]
        # One whose call failed says why; those that waited for it only know that somebody did.
        for error in sorted(failed, key=lambda error: type(error).__name__ == "BrokenBarrierError"):
            raise error
        return [each.result() for each in asking]


def _waiting(client: EmbeddingClient, texts: list[str], patience: Patience) -> float:
    began = time.perf_counter()
    spent, repeats = 0.0, 0
    while not repeats or (repeats < patience.repeats and spent < patience.seconds):
        client.encode(texts)
        repeats += 1
        spent = time.perf_counter() - began
    return repeats * len(texts) / spent


class _Steady:
    """One client's requests. `counted` is called once it has been measured; it asks on until `over`."""

    def __init__(self, clients: Clients, seconds: float, counted: Callable[[], None], over: Event) -> None:
        self._clients = clients
        self._seconds = seconds
        self._counted = counted
        self._over = over
        self._answered = 0
        self._began: float | None = None  # when all that was asked first was answered
        self._rate: float | None = None

    def rate(self, client: EmbeddingClient, texts: list[str]) -> float:
        for _ in client.encode_async(self._asked(texts), ahead=self._clients.ahead):
            self._answered += 1
            self._look(time.perf_counter())
        if self._rate is None:
            raise RuntimeError("another client's call failed")
        return self._rate

    def _asked(self, texts: list[str]) -> Iterator[list[str]]:
        batch = self._clients.batch
        requests = cycle([texts[place : place + batch] for place in range(0, len(texts), batch)])
        while not self._over.is_set():
            yield next(requests)

    def _look(self, now: float) -> None:
        since = self._answered - self._clients.ahead
        if since == 0:
            self._began = now
        elif self._rate is None and self._began is not None and now - self._began >= self._seconds:
            self._rate = since * self._clients.batch / (now - self._began)
            self._counted()


# The tables that bert-as-service has been measured by: length, size of a request, clients, size of a batch, layer.


UNDER_WAY = 256  # texts, in small requests or in large ones
CALLERS = 8  # clients of small requests, of one text each
LARGE_CLIENTS = 2  # so that one's texts are computed while the other's answer is on its way
ROUNDS = 3
WISHED = 0.9

# A server with these flags, for the length of a block.
Serve = Callable[[Sequence[str]], AbstractContextManager[Connect]]


class Table(NamedTuple):
    """A measured table: whole numbers, and rates, which are no whole numbers. `remark` stands below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[float]]
    remark: str = ""

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [self.columns, ["---:"] * len(self.columns), *(map(_shown, row) for row in self.rows)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"### {self.title}\n\n{table}\n" + (f"\n{self.remark}\n" if self.remark else "")


class TablesPlan(NamedTuple):
    """What is to be measured. An empty list leaves a table out. `length` is that of texts, in tokens, where it is not what changes, `batch`
    is how many a client asks for at once."""

    lengths: Sequence[int] = (20, 40, 80, 160, 320)
    batches: Sequence[int] = (1, 4, 8, 16, 64, 256, 512, 1024, 2048, 4096)
    clients: Sequence[int] = (1, 2, 4, 8, 16, 32)
    batch_sizes: Sequence[int] = (32, 64, 128, 256, 512)
    layers: Sequence[int] = ()
    length: int = 40
    batch: int = 256
    patience: Patience = Patience(8, 5.0)
    small_and_large: bool = True
    vocabulary: Sequence[str] = WORDS

    @property
    def steps(self) -> int:
        """How many measurements that is."""
        lists = (self.lengths, self.batches, self.clients, self.batch_sizes, self.layers)
        return sum(map(len, lists)) + 2 * ROUNDS * self.small_and_large


class Tables:
    """Measures what `plan` says with servers of `serve`; `progress` hears of each measurement."""

    def __init__(self, plan: TablesPlan, serve: Serve, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._serve = serve
        self._progress = progress

    def measure(self) -> Iterator[Table]:
        """Yield each table when it is done. Servers are started anew where what changes is a setting of theirs."""
        plan = self._plan
        if plan.lengths:
            yield self._by_setting("Length of texts", "tokens", "--max-length", plan.lengths)
        if plan.batch_sizes:
            yield self._by_setting(
                "Texts in a batch of the server", "max batch size", "--max-batch-size", plan.batch_sizes
            )
        if plan.layers:
            yield self._by_setting("Pooled layer", "layer", "--layers", plan.layers)
        if plan.batches or plan.clients or plan.small_and_large:
            with self._serve(["--max-length", str(plan.length)]) as connect:
                yield from self._of_one_server(connect)

    def _of_one_server(self, connect: Connect) -> Iterator[Table]:
        plan = self._plan
        if plan.batches:
            rates = {batch: sum(self._rates(connect, Clients(1, batch, plan.length))) for batch in plan.batches}
            least = min(rates)
            said = (
                "The client waits for each answer before it asks again, so that nothing else is under way. "
                f"By {least} at a time it gets {rates[least] / max(rates.values()):.2f} of what it gets at best."
            )
            yield Table("Texts in a request of one client", ["texts", "texts/s"], list(rates.items()), said)
        if plan.clients:
            yield self._by_clients(connect)
        if plan.small_and_large:
            yield self._small_and_large(connect)

    def _by_clients(self, connect: Connect) -> Table:
        """Counted while all of them ask: who is answered first, and counted then, would seem to be faster than all together are."""
        plan, rows = self._plan, []
        for count in plan.clients:
            rate = self._steady(connect, Clients(count, plan.batch, plan.length))
            rows.append((count, rate / count, rate))
        said = f"{plan.batch} texts a request; each client waits for its answer before it asks again."
        return Table("Clients", ["clients", "texts/s each", "texts/s in all"], rows, said)

    def _by_setting(self, title: str, column: str, flag: str, values: Sequence[int]) -> Table:
        plan, rows = self._plan, []
        for value in values:
            length = value if flag == "--max-length" else plan.length
            told = ["--max-length", str(length)]
            if flag == "--max-batch-size":  # full of texts, and computed as one
                told += [flag, str(value), "--max-batch-cost", str(value * length), "--run-tokens", str(value * length)]
            elif flag != "--max-length":
                told += [flag, str(value)]
            with self._serve(told) as connect:
                rates = self._rates(connect, Clients(1, plan.batch, length), f"{flag} {value}: ")
            rows.append((value, sum(rates)))
        return Table(title, [column, "texts/s"], rows, f"One client, {plan.batch} texts a request.")

    def _small_and_large(self, connect: Connect) -> Table:
        """The same texts, as many of them under way: one a request, or in two large requests."""
        plan = self._plan
        kinds = {
            "small": Clients(CALLERS, 1, plan.length, UNDER_WAY // CALLERS),
            "large": Clients(LARGE_CLIENTS, UNDER_WAY // LARGE_CLIENTS, plan.length),
        }
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(ROUNDS):
            for kind in sorted(kinds, reverse=bool(turn % 2)):
                rates[kind].append(self._steady(connect, kinds[kind], f"{kind} requests: "))
        share = median(small / large for small, large in zip(rates["small"], rates["large"], strict=True))
        said = f"Small requests reach {share:.2f} of the throughput of large ones (wished: {WISHED} or more)."
        rows = [
            (clients.number, clients.ahead, clients.batch, clients.under_way, median(rates[kind]))
            for kind, clients in kinds.items()
        ]
        columns = ["clients", "requests each has under way", "texts in a request", "texts under way", "texts/s"]
        return Table("Small requests and large ones", columns, rows, said)

    def _steady(self, connect: Connect, clients: Clients, what: str = "") -> float:
        rate = sum(measure_steady(connect, clients, self._plan.patience.seconds, self._plan.vocabulary))
        self._progress(f"{what}{_who(clients)}, {clients.under_way} texts under way: {_shown(rate)} texts/s")
        return rate

    def _rates(self, connect: Connect, clients: Clients, what: str = "") -> list[float]:
        rates = measure(connect, clients, self._plan.patience, self._plan.vocabulary)
        self._progress(f"{what}{_who(clients)}: {_shown(sum(rates))} texts/s")
        return rates


def _who(clients: Clients) -> str:
    return f"{clients.number} client{'s' * (clients.number > 1)}, {clients.batch:,} text{'s' * (clients.batch > 1)} a request"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.1f}"


# The tables of sentence vectors in files: as Markdown or JSON, and as a picture.


_ACROSS = 3  # panels in a row


def as_json(tables: Sequence[Table], machine: Mapping[str, Any]) -> str:
    """Return `tables` and what they were measured on as an object of `tables` and `machine`."""
    said = {"machine": machine, "tables": [table._asdict() for table in tables]}
    return msgspec.json.format(msgspec.json.encode(said), indent=2).decode() + "\n"


def as_markdown(tables: Sequence[Table], machine: Mapping[str, Any]) -> str:
    """Return `tables` as Markdown, what they were measured on below."""
    return "\n".join([*(table.markdown() for table in tables), f"<sub>{_listed(machine)}.</sub>\n"])


def _listed(facts: Mapping[str, Any]) -> str:
    inner = ((name, _listed(each) if isinstance(each, Mapping) else each) for name, each in facts.items())
    return ", ".join(f"{name} {each}" for name, each in inner)


def draw(tables: Sequence[Table], path: Path) -> None:
    """Write `path` as PNG and SVG: a panel for each table whose first column is what was changed. Raises SettingsError without matplotlib."""
    shown = [table for table in tables if table.columns[1].startswith("texts/s")]
    across = min(_ACROSS, max(1, len(shown)))
    with figure(path, -(-max(1, len(shown)) // across), across) as (_, axes):
        for each in axes.flat[len(shown) :]:
            each.set_visible(False)
        for each, table in zip(axes.flat, shown, strict=False):
            _panel(each, table)


def _panel(axes: Any, table: Table) -> None:
    first, *rates = zip(*table.rows, strict=True)
    places = range(len(first))
    for name, rate, style in zip(table.columns[1:], rates, styles(), strict=False):
        axes.plot(places, rate, label=name, **style)
    axes.set_xticks(places, [f"{value:,}" for value in first], fontsize=7, rotation=45 if len(first) > 6 else 0)
    axes.set_title(table.title, fontsize=9)
    axes.set(xlabel=table.columns[0], ylabel="texts/s")
    axes.set_ylim(bottom=0)
    if len(rates) > 1:
        axes.legend(fontsize=8)


# A server of sentence vectors in a process of its own, for as long as it is measured.


ANSWER_SECONDS = 600.0  # thousands of texts in one request take their time on a CPU


class RunningServer(NamedTuple):
    """A server that runs: where HTTP is, and where clients are to ask over ZeroMQ, the ports of requests and of answers (None: over HTTP). A
    call connects a client."""

    http: str
    zmq_ports: tuple[int, int] | None = None

    def __call__(self) -> EmbeddingClient:
        transport: EmbeddingTransport | None = None
        if self.zmq_ports is not None:
            from weir.embedding.bert_as_service.client import BertTransport

            transport = BertTransport("127.0.0.1", *self.zmq_ports)
        return EmbeddingClient(self.http, timeout=ANSWER_SECONDS, ignore_all_checks=True, transport=transport)


@contextmanager
def text_server(flags: Sequence[str], *, zmq: bool = False, timeout: float = 300.0) -> Iterator[RunningServer]:
    """Run `weir embed serve` with `flags` until the end of the block, which begins when it is ready; clients ask it
    over ZeroMQ if `zmq`. Raises SettingsError with its own words if it does not start, or is not ready after `timeout` seconds.
    """
    port, *others = _free_ports(3 if zmq else 1)
    ports = ["--port", str(port), "--host", "127.0.0.1"]
    if zmq:
        ports += ["--zmq-port", str(others[0]), "--zmq-port-out", str(others[1])]
    command = [sys.executable, "-m", "weir", "embed", "serve", *flags, *ports, "--log-level", "warning"]
    with tempfile.TemporaryFile() as words:
        server = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=words, stdin=subprocess.DEVNULL, env=_without_key()
        )
        http = f"http://127.0.0.1:{port}"
        try:
            _wait(server, http, timeout, words)
            yield RunningServer(http, (others[0], others[1]) if zmq else None)
        finally:
            _end(server)


def _without_key() -> dict[str, str]:
    """Return the environment: the key of the user's other servers is none of this one, which its clients do not know."""
    return {name: value for name, value in os.environ.items() if name not in ("WEIR_API_KEY", "WEIR_API_KEY_FILE")}


def _free_ports(count: int) -> list[int]:
    """Return ports that are free at this moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait(server: "subprocess.Popen[bytes]", url: str, timeout: float, words: IO[bytes]) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if server.poll() is not None:
            words.seek(0)
            said = words.read().decode(errors="replace").strip()
            raise SettingsError(f"the server did not start: {said[-2000:]}")
        try:
            with EmbeddingClient(url, timeout=10.0, ignore_all_checks=True) as client:
                client.encode(["ready"])
                return
        except Unreachable:
            time.sleep(0.1)
    raise SettingsError(f"the server was not ready after {timeout:g} s (wait_till_ready)")


def _end(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
