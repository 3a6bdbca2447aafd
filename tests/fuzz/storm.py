"""Attacks a real server in every protocol at once: `python -m tests.fuzz.storm [--minutes 60] [--threads 16] [--seed N] [--only TEXT]`

Hostile threads send mutated and worst inputs (hostile.py) to a server of 2 GB with every protocol, an honest client in each asks it
all the while, and everything that it is answered is checked. After every few minutes the attack rests: then all honest clients must be
answered, the account of bytes be empty, and the memory be what it was. At the end there is a report; the exit code is 1 if something
was found: a server that ended, a traceback that it logged (but of a model's error), an answer of 500, a hang, a wrong answer, memory that grew beyond its limit, bytes that nobody gave back.

An input is made of its seed and its number alone: `--replay NAME NUMBER` sends one again.
"""

import argparse
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import IO, Any

import httpx
import numpy
import psutil
from benchmarks.parsers import Ports, Probe, serving
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from tests.catalog.repository.shelf import write
from tests.frontends.http.sockets import FILES
from tests.fuzz.callers import ATTACKS_OF_CALLERS, CUT_JOBS, FORGED
from tests.fuzz.held import hold
from tests.fuzz.hostile import ATTACKS as ATTACKS_OF_STRANGERS
from tests.fuzz.hostile import SILENT, Room
from tests.served import Served
from tests.text_models import tiny

from weir.client import EmbeddingClient, GrpcClient, HttpClient, WebSocketClient
from weir.errors import CapacityError, DeadlineExceeded, Overloaded
from weir.text_server.bert_as_service.client import BertTransport

ON_DEMAND = 60  # models, each of which takes half a second to load, in room for five
SLOW = """
import time

import weir

class Slow(weir.Model):
    def load(self):
        time.sleep(0.5)

    def predict(self, batch):
        return [item + 1 for item in batch]
"""


def many_models(room: Room) -> str:
    """Ask for a model that is not loaded and cannot be in time, or leave before it is: nobody waits for it then."""
    number, patience = room.chance.randrange(1, ON_DEMAND), room.chance.choice((0.01, 0.1, 30.0))
    head = f"POST /infer/m{number} HTTP/1.1\r\nHost: a\r\nX-Request-Timeout: {patience}\r\nContent-Length: 1\r\n\r\n1"
    with socket.create_connection(("127.0.0.1", room.ports["demand"]), timeout=60.0) as client:
        client.sendall(head.encode())
        if patience > 1.0:
            client.settimeout(room.chance.random())
            with suppress(TimeoutError):
                client.recv(4096)
            return "left"
        return client.recv(4096)[9:12].decode() or SILENT


ATTACKS = {**ATTACKS_OF_STRANGERS, **ATTACKS_OF_CALLERS, "models on demand": (many_models, 8)}
WAITING_BYTES = 256 << 20  # an eighth of 2 GB
MEMORY = 2 << 30  # bytes that all processes of the server may have together
ROUND = 300.0  # seconds between two rests
REST = 25.0  # seconds until all must be quiet: more than the server gives clients that do not read
MOST_OPEN = 40  # connections that one thread leaves open
LONGEST_TURN_MS = 1000.0  # of CPU time, of the event loop
PAUSE = 0.5  # seconds between two calls of an honest client
LONGEST_JOB = 240.0  # seconds that a job whose file was cut may run
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")  # the states of a job that has not ended
HOLDING = 0.1  # so much longer it goes on, with a server of two fronts whose connections are held
GROWTH = 1.3  # times the memory after the first rests

_WRONG = {str(status) for status in range(500, 600)} - {"501", "503", "504", "505"}
REFUSALS = (CapacityError, DeadlineExceeded)


class Findings:
    """What was found, each kind once with its first case and counted."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def add(self, what: str, case: str) -> None:
        """Note one; the first of its kind is shown at once."""
        with self._lock:
            self.counts[what] += 1
            if self.counts[what] <= 3:
                self._console.print(f"{time.strftime('%H:%M:%S')} {what}: {case}", markup=False)


_STEERING = re.compile(rb"[\x00\x07\x08\x0b\x0c\r\x1b]|\xc2[\x80-\x9f]")  # in a line: it steers a terminal


class Tracebacks:
    """Finds the tracebacks in what a server logs, and lines that a caller has written. The traceback of a model's own error is no
    finding: its first line says "model error"."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._before = ""  # the last line outside of a traceback
        self._lines: list[str] | None = None  # of the traceback that has begun
        self._rest = b""

    def read(self, logged: bytes) -> None:
        """Read on; a line, and a traceback, may come in parts."""
        *lines, self._rest = (self._rest + logged).split(b"\n")
        for line in lines:
            self._read_line(line.decode(errors="replace"))
            if line.startswith(FORGED.encode()) or _STEERING.search(line):
                self._findings.add("a forged line", repr(line[:200]))

    def _read_line(self, line: str) -> None:
        if "Traceback (most recent call last):" in line:
            self._lines = [self._before]
        elif self._lines is None:
            if line and "above exception" not in line:  # one that caused another is about the same
                self._before = line
        elif line[:1] in (" ", "|"):
            self._lines.append(line)
        else:
            if "model error" not in self._before:
                self._findings.add(f"a traceback: {line:.80}", "\n".join(self._lines))
            self._lines = None


class Hostile(threading.Thread):
    """Attacks, one input after the other, while `goes` is set."""

    def __init__(self, storm: "Storm", number: int) -> None:
        super().__init__(daemon=True)
        self._storm = storm
        self._number = number
        self.now = ""  # what is being sent
        self.last: deque[str] = deque(maxlen=20)

    def run(self) -> None:
        """Attack until the end."""
        storm, left_open = self._storm, list[Any]()
        while not storm.over:
            if not storm.goes.is_set():
                _close(left_open, 0)
                storm.goes.wait(0.2)
                continue
            name, number = storm.next_input()
            self.now = f"{name} {number}"
            self.last.append(self.now)
            began = time.monotonic()
            outcome = attack(name, storm.seed, number, storm.ports, left_open, storm.jobs)
            storm.note(name, number, outcome, time.monotonic() - began)
            _close(left_open, MOST_OPEN)
        _close(left_open, 0)


def attack(name: str, seed: int, number: int, ports: Ports, left_open: list[Any], jobs: Path) -> str:
    """Send one input; return how it was answered."""
    try:
        return ATTACKS[name][0](Room(ports, left_open, Random(f"{seed} {name} {number}"), jobs))
    except TimeoutError:
        return "not connected"
    except OSError as error:
        return f"{type(error).__name__}"


def _close(sockets: list[Any], most: int) -> None:
    while len(sockets) > most:
        with suppress(OSError):
            sockets.pop(0).close()


class Honest(threading.Thread):
    """Asks one protocol again and again, and checks each answer: `ask` raises AssertionError for a wrong one."""

    def __init__(self, storm: "Storm", name: str, ask: Callable[[Random], None]) -> None:
        super().__init__(daemon=True)
        self._storm = storm
        self.name = name
        self._ask = ask
        self.answers: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.fine_since_rest = 0

    def run(self) -> None:
        """Ask until the end."""
        chance = Random(self.name)
        while not self._storm.over:
            began = time.monotonic()
            outcome = self._outcome(chance)
            self.seconds.append(time.monotonic() - began)
            self.answers[outcome] += 1
            if outcome == "answered":
                self.fine_since_rest += 1
            elif outcome != "refused":
                self._storm.findings.add(f"honest, {self.name}: {outcome}", "")
            elif self._storm.quiet.is_set():
                self._storm.findings.add(f"honest, {self.name}: refused while nobody attacks", "")
            time.sleep(PAUSE)

    def _outcome(self, chance: Random) -> str:
        try:
            self._ask(chance)
        except REFUSALS:
            return "refused"
        except AssertionError as error:
            return f"WRONG {error!s:.60}"
        except Exception as error:  # whatever a client says
            return f"{type(error).__name__}: {error!s:.60}"
        return "answered"


def honest_clients(ports: Ports) -> dict[str, Callable[[Random], None]]:
    """Return what asks each protocol once, in the way of a user."""
    url = f"http://127.0.0.1:{ports['http']}"
    http = HttpClient(url, timeout=60.0)

    def native(chance: Random) -> None:
        size = chance.choice((1, 10, 1000, 50_000))
        assert http.infer("length", "x" * size) == size

    def native_tensor(chance: Random) -> None:
        rows = [[chance.randrange(9) for _ in range(3)] for _ in range(chance.randrange(1, 4))]
        answer = httpx.post(f"{url}/infer/grid", json={"x": rows}, timeout=60.0)
        if answer.status_code in (408, 429, 503, 504):
            raise Overloaded(answer.text)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"sum": [float(sum(row)) for row in rows]}

    def on_demand(chance: Random) -> None:
        answer = httpx.post(f"http://127.0.0.1:{ports['demand']}/infer/m0", json=1, timeout=60.0)
        assert (answer.status_code, answer.text) == (200, "2")  # it is in use: others cannot evict it for long

    def encode(client: EmbeddingClient, chance: Random) -> None:
        asked = ["x" * chance.randrange(1, 50) for _ in range(chance.choice((1, 5, 300)))]
        assert [int(row[0]) for row in client.encode(asked)] == [len(each) for each in asked]

    def over_zeromq(chance: Random) -> None:
        transport = BertTransport("127.0.0.1", ports["zmq"], ports["zmq_out"])
        with EmbeddingClient(url, timeout=60.0, ignore_all_checks=True, transport=transport) as client:
            for _ in range(5):
                encode(client, chance)

    return {
        "HTTP": native,
        "HTTP, a tensor": native_tensor,
        "texts, HTTP": partial(encode, EmbeddingClient(url, timeout=60.0)),
        "texts, ZMTP": over_zeromq,
        "on demand": on_demand,
        "gRPC": _open_protocol(GrpcClient(f"127.0.0.1:{ports['grpc']}", timeout=60.0)),
        "WebSocket": _open_protocol(WebSocketClient(url.replace("http", "ws"), timeout=60.0)),
        "KServe HTTP": _open_protocol(http),
    }


def _open_protocol(client: Any) -> Callable[[Random], None]:
    def ask(chance: Random) -> None:
        size = chance.choice((1, 4, 900)), 3
        rows = numpy.random.default_rng(chance.randrange(1 << 30)).integers(0, 9, size).astype(numpy.float32)
        assert numpy.array_equal(client.infer("grid", {"x": rows})["sum"], rows.sum(axis=1))

    return ask


class Storm:
    """All that goes on: `goes` while the attack does, `quiet` when all must be answered."""

    def __init__(
        self, ports: Ports, probe: Probe, seed: int, only: str, console: Console, log: IO[bytes], jobs: Path
    ) -> None:
        self.ports, self.seed, self.jobs = ports, seed, jobs
        self.findings = Findings(console)
        self._log, self._tracebacks = log, Tracebacks(self.findings)
        self._console, self._probe, self._lock, self._chance = console, probe, threading.Lock(), Random(seed)
        self.goes, self.quiet = threading.Event(), threading.Event()
        self.over = self.ends_early = False
        self.outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.slowest: dict[str, float] = {}
        self.rests: list[tuple[int, int, int]] = []  # bytes of memory, bytes held, connections
        self.peak = self.longest_ms = 0.0
        self.tried = 0  # inputs that were sent
        self._names = [name for name in ATTACKS if only in name]
        self._weights = [ATTACKS[name][1] for name in self._names]
        self.server = psutil.Process(ports["pid"])

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.ports['http']}", timeout=60.0)

    @property
    def lives(self) -> bool:
        """Whether the server runs."""
        return self.server.is_running() and self.server.status() != psutil.STATUS_ZOMBIE

    def next_input(self) -> tuple[str, int]:
        """Return the name of an attack and the number of its input."""
        with self._lock:
            self.tried += 1
            return self._chance.choices(self._names, self._weights)[0], self.tried

    def note(self, name: str, number: int, outcome: str, seconds: float) -> None:
        """Count how an input was answered."""
        with self._lock:
            self.outcomes[name][outcome] += 1
            self.slowest[name] = max(self.slowest.get(name, 0.0), seconds)
        wrong = outcome.startswith((SILENT, "INTERNAL", "UNKNOWN")) or outcome[-3:] in _WRONG
        if wrong and self.lives:
            self.findings.add(f"{name}: {outcome}", f"--replay {name!r} {number}")

    def memory(self) -> int:
        """Return how many bytes all processes of the server have; shared ones once."""
        with suppress(psutil.NoSuchProcess):
            return sum(each.memory_full_info().pss for each in [self.server, *self.server.children(recursive=True)])
        return 0

    def read_log(self) -> None:
        """Look for tracebacks in what the server has logged since the last time."""
        self._tracebacks.read(self._log.read())

    def look(self, threads: list[Hostile]) -> None:
        """Look at the server, while it is attacked."""
        now = ", ".join(thread.now for thread in threads)
        memory = self.memory()
        self.peak = max(self.peak, memory)
        if memory > MEMORY:
            self.findings.add(f"more than {MEMORY >> 20} MB", f"{memory >> 20} MB, with {now}")
        longest = self._probe.ask(b"longest")[0]
        self._probe.ask(b"reset")
        self.longest_ms = max(self.longest_ms, longest)
        if longest > LONGEST_TURN_MS:
            self.findings.add(f"a turn of more than {LONGEST_TURN_MS:g} ms", f"{longest:.0f} ms, with {now}")

    def rest(self, clients: list[Honest]) -> None:
        """Stop the attack, and see that nothing of it is left."""
        self.goes.clear()
        began = time.time()
        self._cancel_jobs()
        time.sleep(REST)
        self._wait_for_jobs()
        for client in clients:
            client.fine_since_rest = 0
        self.quiet.set()
        time.sleep(3.0)
        self.quiet.clear()
        for client in clients:
            if not client.fine_since_rest:
                self.findings.add(f"honest, {client.name}: no answer at rest", "")
        held, connections = min(self._probe.held() for _ in range(20))  # honest clients hold some
        self.rests.append((self.memory(), held, connections))
        memory = f"{self.rests[-1][0] >> 20} MB, {held} bytes held, {connections} connections"
        self._console.print(f"{time.strftime('%H:%M:%S')} at rest after {self.tried} inputs: {memory}")
        self._look_at_jobs(began)
        with httpx.Client(base_url=f"http://127.0.0.1:{self.ports['demand']}") as asking:
            states = Counter(each["state"] for each in asking.get("/models").json()["models"])
            self._console.print(f"models on demand: {dict(states)}", markup=False)
            if states["waiting"]:
                self.findings.add("loads that nobody waits for", str(states))
        if held > 1 << 20:
            self.findings.add("bytes that nobody gives back", f"{held} at rest")
        if len(self.rests) > 2 and self.rests[-1][0] > GROWTH * self.rests[1][0] + (50 << 20):
            self.findings.add("memory grows from rest to rest", str([each[0] >> 20 for each in self.rests]))

    def _jobs(self, client: httpx.Client) -> Iterator[dict[str, Any]]:
        after = ""
        while True:
            page = client.get(f"/v1/batches?limit=100{after}").json()
            yield from page["data"]
            if not page["has_more"]:
                return
            after = f"&after={page['last_id']}"

    def _cancel_jobs(self) -> None:
        """Cancel the jobs that the attack has left, which hold the bodies of their lines. Those whose file was cut go on: they must end by themselves."""
        with self._client() as client:
            for job in self._jobs(client):
                if job["status"] in ACTIVE and job["id"] not in CUT_JOBS:
                    client.post(f"/v1/batches/{job['id']}/cancel")

    def _wait_for_jobs(self) -> None:
        """Wait until no job runs, or one has run for too long: jobs hold the bodies of their lines. An attack that was slow has begun some in the rest."""
        until = time.monotonic() + LONGEST_JOB
        while time.monotonic() < until:
            with self._client() as client:
                if not any(job["status"] in ACTIVE for job in self._jobs(client)):
                    return
            self._cancel_jobs()
            time.sleep(1.0)

    def _look_at_jobs(self, began: float) -> None:
        """See that no job runs for ever, and that other users of the machine may read no file. The rest has begun at `began`."""
        with self._client() as client:
            for job in self._jobs(client):
                cancelled = job["id"] not in CUT_JOBS and job["created_at"] < began - 1
                if job["status"] in ACTIVE and (cancelled or time.time() - job["created_at"] > LONGEST_JOB):
                    self.findings.add("a job that does not end", str(job))
        for path in (self.jobs, *self.jobs.rglob("*")):
            with suppress(FileNotFoundError):
                if path.stat().st_mode & 0o077:
                    self.findings.add("a file that others may read", f"{path} {path.stat().st_mode:o}")


def report(storm: Storm, clients: list[Honest]) -> Table:
    """Return what was tried and how it was answered."""
    table = Table("input", "tried", "slowest, s", "answers")
    for name, outcomes in storm.outcomes.items():
        answers = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common(14))
        table.add_row(name, str(outcomes.total()), f"{storm.slowest[name]:.1f}", answers)
    for client in clients:
        answers = ", ".join(f"{outcome} {count}" for outcome, count in client.answers.most_common(8))
        table.add_row(f"honest, {client.name}", str(client.answers.total()), f"{max(client.seconds):.1f}", answers)
    return table


def attacked(storm: Storm, minutes: float, threads: int, console: Console) -> list[Honest]:
    """Attack for so long; return the honest clients."""
    hostile = [Hostile(storm, number) for number in range(threads)]
    clients = [Honest(storm, name, ask) for name, ask in honest_clients(storm.ports).items()]
    for thread in (*hostile, *clients):
        thread.start()
    storm.goes.set()
    began = rested = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("attack", total=60.0 * minutes)
        while time.monotonic() < began + 60.0 * minutes and storm.lives and not storm.ends_early:
            time.sleep(1.0)
            done = f"{storm.tried} inputs, {storm.findings.counts.total()} findings"
            progress.update(task, completed=time.monotonic() - began, description=done)
            storm.read_log()
            with suppress(OSError, ValueError):  # it may have ended
                storm.look(hostile)
            if time.monotonic() > rested + ROUND:
                storm.rest(clients)
                rested = time.monotonic()
                storm.goes.set()
    if not storm.lives:
        storm.findings.add("the server ended", "; ".join(", ".join(thread.last) for thread in hostile))
    else:
        storm.rest(clients)
    storm.over = True
    for client in clients:
        client.join(5.0)
    return clients


def main() -> int:
    """Attack and report; 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="for how long")
    parser.add_argument("--threads", type=int, default=16, help="that attack")
    parser.add_argument("--seed", type=int, default=0, help="of all inputs")
    parser.add_argument("--only", default="", help="attacks with this text in their names")
    parser.add_argument("--replay", nargs=2, metavar=("NAME", "NUMBER"), help="send one input of the seed again")
    asked, console = parser.parse_args(), Console(width=160)
    files = FILES["tls_certfile"], FILES["tls_keyfile"]
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.NamedTemporaryFile())
        logged = stack.enter_context(open(log.name, "rb"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models, jobs = folder / "models", folder / "jobs"
        for number in range(ON_DEMAND):
            write(models, {f"m{number}/1/model.py": SLOW, f"m{number}/config.toml": 'needs_memory = "1GB"\n'})
        demand = "--model-repository", models, "--model-control", "on-demand", "--model-memory", "5GB"
        more = str(WAITING_BYTES), *files, str(jobs), str(tiny.model(folder / "text"))
        with (
            Served(*demand, "--log-level", "error", stderr=subprocess.DEVNULL) as served,
            serving(0, *more, log=None if asked.replay else log) as (ports, probe),
        ):
            ports["demand"] = int(served.until_ready().url.rpartition(":")[2])
            if asked.replay:
                name, input_number = asked.replay
                outcome = attack(name, asked.seed, int(input_number), ports, [], jobs)
                console.print(outcome, probe.ask(b"longest"))
                return 0
            storm = Storm(ports, probe, asked.seed, asked.only, console, logged, jobs)
            signal.signal(signal.SIGINT, lambda *_: setattr(storm, "ends_early", True))  # ends it early, with a report
            clients = attacked(storm, asked.minutes, asked.threads, console)
        storm.read_log()  # its end, too
    if not storm.ends_early:
        hold(HOLDING * 60.0 * asked.minutes, asked.seed, storm.findings.add)
    console.print(report(storm, clients))
    console.print(
        f"{storm.tried} inputs; peak {int(storm.peak) >> 20} MB; longest turn of the event loop {storm.longest_ms:.0f} ms of CPU time; "
        f"findings: {dict(storm.findings.counts) or 'none'}"
    )
    return 1 if storm.findings.counts else 0


if __name__ == "__main__":
    raise SystemExit(main())
