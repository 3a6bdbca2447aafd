"""Batch jobs of a simulated server that is killed, loses its power and starts again on the same disk: `python -m tests.simulated --disk`.

A job must end, and each of its requests have exactly one end: its own answer, or an error of the table. What was accepted is kept.
"""

import asyncio
import gc
import json
import logging
import random
import sqlite3
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

from tests.simulated.asking import Ask, fault_of, wanted_of
from tests.simulated.channels import ChannelClient, Incoming
from tests.simulated.disk import Killed, SimulatedDisk, Storage
from tests.simulated.loop import SimulatedLoop, T, Ts, settle
from tests.simulated.models import RAISED, STATUS
from tests.simulated.plans import Plan, draw_plan
from tests.simulated.processes import SimulatedProcess
from tests.simulated.transport import Ordered, SimulatedTransport
from tests.simulated.watching import Watch
from tests.simulated.world import OrderedAccount, Result, SimulatedServer, World, run_in

from weir.catalog.registry import Registry
from weir.errors import SettingsError
from weir.frontends.http.application import AddedEndpoints, InferencePaths, inference_protocols, make_app
from weir.frontends.http.fast.shared import Clocks
from weir.jobs import JobSettings
from weir.jobs.routes import JobRoutes
from weir.jobs.running import JobContext, Reply, call
from weir.jobs.store import STALE, JobStore
from weir.protocols import HttpSettings
from weir.protocols.kserve import KserveContext
from weir.telemetry.recorder import Metrics

_EPOCH = 2_000_000_000.0  # the wall clock at the beginning
_LATEST = 300.0  # seconds after its window, or after the last that has befallen the server, in which a job has its end
_PATIENCE = 300.0  # seconds in which any request has its end
_TRIES = 500
_AGAIN = (408, 429, 503, 504)  # a machine that was suspended finds its clients late
_WINDOWS = {"2m": 120.0, "1h": 3600.0}
_LATER = tuple(name for name, status in STATUS.items() if status in (429, 503))  # a request is sent again for these
_DOS = (*[name for name in RAISED if name not in _LATER], "returns", "unwritable", "crash")
_KINDS = ("kill", "power", "in_the_middle", "restart", "full", "fails", "slow", "clock", "suspended")
_PATH = "/infer/items"
_SHARED = "/dev/shm" if Path("/dev/shm").is_dir() else None


class ThreadedLoop(SimulatedLoop):
    """Work of other threads takes a while. An executor does one thing after the other."""

    def __init__(self, draw: random.Random, *, coarse: bool) -> None:
        super().__init__(coarse=coarse)
        self._draw = draw
        self.slow = False
        self._last: dict[Any, float] = {}
        self._begun: list[asyncio.Task[Any]] = []  # what a killed process has begun would do more when it is collected

    def create_task(self, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        """See AbstractEventLoop."""
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        self._begun.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> "asyncio.Future[T]":
        """Do the work later, in this thread."""
        future: asyncio.Future[T] = self.create_future()
        at = self.now + self._draw.choice((0.0, 0.0001, 0.002)) + (self._draw.random() if self.slow else 0.0)
        if executor is not None:
            at = self._last[executor] = max(at, self._last.get(executor, 0.0))
        self.call_at(at, self._work, future, partial(func, *args))
        return future

    def _work(self, future: "asyncio.Future[Any]", work: Callable[[], Any]) -> None:
        if future.cancelled() and self._draw.random() < 0.5:
            return  # it had not begun
        with suppress(Killed):
            settle(future, work)


class _Life:
    """The server from one start to its end."""

    def __init__(self, world: "JobWorld") -> None:
        self._world = world
        self.process = SimulatedProcess(world.loop)
        self.disk = SimulatedDisk(world.storage, world.die)
        self.connections = Ordered()
        self.server: SimulatedServer | None = None
        self.jobs: JobRoutes | None = None
        self.registry: Registry | None = None
        self.started = False
        self.loading = False  # what ends then leaves coroutines that Python cannot close

    async def begin(self) -> None:
        """Start, if the disk allows it."""
        world = self._world
        world.watch, world.metrics = Watch(world), Metrics()
        world.device = world.new_device()  # with its process, its turns are over
        registry = self.registry = Registry([world.make_service("items")])
        settings = HttpSettings(port=0)
        context = KserveContext(registry, settings, account=OrderedAccount(settings))
        protocols = inference_protocols(context)
        options = JobSettings(
            batch_dir=str(world.directory), batch_concurrency=world.draw.choice((1, 8, 128)), batch_max_bytes=1 << 30
        )

        async def ask(path: str, body: bytes) -> Reply:
            return await call(app, path, body)

        try:
            of_jobs = JobContext(
                options, ask, settings.max_body_size, context.account, world.no_log, world.wall, self.disk
            )
            jobs = self.jobs = JobRoutes(of_jobs, settings, InferencePaths(protocols))
            app = make_app(context, added=AddedEndpoints(jobs.endpoints()), protocols=protocols)
            server = self.server = SimulatedServer(context, app, clocks=Clocks(world.loop.time, world.wall))
            await server.start()
            jobs.begin()
        except (SettingsError, sqlite3.Error, Killed):
            world.die()
            return
        self.loading = world.storage.patient = True
        await registry.start()
        self.loading = world.storage.patient = False
        jobs.start()
        self.started = True

    async def end(self) -> None:
        """Drain, as the program does."""
        assert self.server is not None and self.jobs is not None and self.registry is not None
        self.server.refuse()
        await self.jobs.stop()
        await self.registry.drain()
        await self.registry.stop(0.0)
        await self.server.drain(5.0)
        await self.server.stop()


class JobWorld(World):
    """A server that may have many lives."""

    def __init__(self, plan: Plan, loop: ThreadedLoop) -> None:
        super().__init__(plan, loop, None)  # type: ignore[arg-type]  # it has no gRPC
        self.threads = loop
        self.draw = random.Random(f"{plan.seed} jobs")
        self.offset = self.set_back = 0.0
        self.set_forward = False
        self.calm = 0.0  # when all that befalls the server is over
        self.watch = Watch(self)
        self.directory = Path()
        self.former: list[_Life] = []
        self.life: _Life | None = None
        self.ending = False

    def wall(self) -> float:
        """Return what the wall clock shows."""
        return _EPOCH + self.loop.now + self.offset

    def no_log(self, level: int, event: str, **fields: object) -> None:
        """An event of the jobs: what became of each is asked for."""

    def connect(self, peer: Any, window: int | None) -> SimulatedTransport | None:
        """See Site."""
        life = self.life
        if life is None or life.server is None or not life.server.listening.open or not life.process.runs:
            return None
        transport = SimulatedTransport(self.loop, peer, life.server._connect, window=window, process=life.process)
        life.connections.add(transport)
        return transport

    async def run(self) -> None:
        """Run the jobs, and look at what is left on the disk."""
        with tempfile.TemporaryDirectory(dir=_SHARED, prefix="simulated-jobs-") as directory:
            self.directory = Path(directory) / "jobs"
            (self.directory / "files").mkdir(parents=True)
            self.storage = Storage(self.directory / "files", random.Random(f"{self.plan.seed} storage"), self.wall)
            try:
                await self._run()
            finally:
                if self.life is not None:
                    self.life.disk.die()

    async def _run(self) -> None:
        draw = self.draw
        kinds = [kind for kind in _KINDS if draw.random() < 0.4]
        clients = self.clients = [JobClient(self, index) for index in range(draw.choice((1, 1, 3)))]
        self._begin()
        work = [asyncio.ensure_future(client.run()) for client in clients]
        at = 0.0
        for _ in range(draw.choice((0, 2, 6, 20)) if kinds else 0):
            at += draw.expovariate(1.0 / draw.choice((0.05, 1.0, 10.0)))
            self.loop.call_at(at, getattr(self, draw.choice(kinds)))
        self.calm = at
        await asyncio.gather(*work)
        await asyncio.sleep(max(0.0, self.calm - self.loop.now))
        self.storage.operations = 0
        await asyncio.sleep(100.0)
        life, self.ending = self.life, True
        assert life is not None and life.server is not None
        if held := life.server.account.held_bytes:
            self.broken(f"{held} bytes are left in the account")
        if self.watch.open:
            self.broken(f"{len(self.watch.open)} requests are left without an end")
        await self._in(life, life.end())
        life.disk.die()
        self._look()

    def _begin(self) -> None:
        life = self.life = _Life(self)
        life.process.start(life.begin())

    async def _in(self, life: _Life, work: Coroutine[Any, Any, None]) -> None:
        """Do some work in the process of `life`; return when it is done, or never if the process is killed."""
        done = self.loop.create_future()

        async def noted() -> None:
            await work
            self.loop.call_soon(done.set_result, None, context=self.loop.outside.copy())

        life.process.start(noted())
        await done

    def _look(self) -> None:
        """Check what is kept on the disk."""
        store = JobStore(self.directory, JobSettings())
        store.disk = SimulatedDisk(self.storage, lambda: None)
        try:
            now = max((self.wall(), *self.storage.written.values()))  # the clock may have been set back since then
            store.clean(int(now) + STALE + 1, 0)
            files = store.files(purpose=None, after=None, limit=10_000, ascending=True)
            known = {each.id: each.bytes for each in files}
            found = {path.name: path.stat().st_size for path in (self.directory / "files").iterdir()}
            if known != found:
                self.broken(f"the table has the files {known}, and the disk {found}")
            (left,) = store._database.execute("SELECT count(*) FROM requests").fetchone()
            if left or store.active():
                self.broken(f"{left} requests of jobs are left, and the jobs {store.active()}")
        finally:
            store.close()

    # What befalls the server.

    def die(self, *, power: bool = False) -> None:
        """The process ends, and another one starts later."""
        life = self.life
        if life is None or self.ending:
            return
        if life.loading:
            self.loop.call_later(0.3, partial(self.die, power=power), context=self.loop.outside.copy())
            return
        self.life = None
        self.former.append(life)
        life.process.kill()
        life.disk.die()
        for transport in list(life.connections):
            transport.cut_off()
        if power:
            self.storage.lose_power()
        self.loop.call_later(self.draw.choice((0.1, 2.0, 20.0)), self._begin, context=self.loop.outside.copy())

    def kill(self) -> None:  # type: ignore[override]  # of the whole server
        self.die()

    def power(self) -> None:
        self.die(power=True)

    def in_the_middle(self) -> None:
        self.storage.operations = self.draw.randint(1, 60)

    def restart(self) -> None:
        life = self.life
        if life is not None and life.started and not self.ending:
            life.started = False
            self._tasks = asyncio.ensure_future(self._ended(life))

    async def _ended(self, life: _Life) -> None:
        await self._in(life, life.end())
        if self.life is life:
            self.die()

    def _for_a_while(self, name: str) -> None:
        setattr(self.storage, name, True)
        seconds = self.draw.choice((0.05, 1.0, 30.0))
        self.calm = max(self.calm, self.loop.now + seconds)
        self.loop.call_later(seconds, setattr, self.storage, name, False)

    full = partialmethod(_for_a_while, "full")
    fails = partialmethod(_for_a_while, "fails")

    def slow(self) -> None:
        self.threads.slow = True
        self.loop.call_later(self.draw.choice((1.0, 10.0)), setattr, self.threads, "slow", False)

    def clock(self) -> None:
        change = self.draw.choice((-3600.0, -1.5, 1.5, 600.0, 3600.0))
        self.offset += change
        self.set_back += max(0.0, -change)
        self.set_forward |= change > 0

    def suspended(self) -> None:
        """Time passes, and nothing happens meanwhile."""
        self.loop.now += self.draw.choice((5.0, 600.0))
        self.calm = max(self.calm, self.loop.now)


class JobClient(ChannelClient):
    """Uploads files, creates jobs, waits for their ends, and reads what they have written: one request after the other, each on a connection of its own."""

    def __init__(self, world: JobWorld, index: int) -> None:
        super().__init__(world, index)
        self._world, self.draw = world, random.Random(f"{world.plan.seed} jobs {index}")
        self._end: asyncio.Future[tuple[int, bytes] | None]  # the status and the body; None if the connection is lost

    def answered(self, incoming: Incoming, status: int) -> None:
        """The response has come."""
        if not self._end.done():
            self._end.set_result((status, bytes(incoming.body)))

    def lost(self, incoming: Incoming | None) -> None:
        """The connection has gone."""
        if not self._end.done():
            self._end.set_result(None)

    async def run(self) -> None:
        """Run some jobs, one after the other."""
        for number in range(self.draw.choice((1, 2, 5))):
            await asyncio.sleep(self.draw.choice((0.0, 0.5, 5.0)))
            await self._job(f"{self.index} {number}", 1_000_000 * (self.index + 1) + 10_000 * number)

    async def _once(self, data: bytes) -> tuple[int, bytes] | None:
        loop, incoming = self._world.loop, Incoming(self)
        end: asyncio.Future[tuple[int, bytes] | None] = loop.create_future()
        self._end = end
        transport: Any = self._world.connect(incoming, None)
        if transport is None:
            return None
        step = self.draw.choice((len(data), 1 + len(data) // 3, 1 + len(data) // 20))
        for start in range(0, len(data), step):
            transport.send(data[start : start + step])
            if step < len(data):
                await asyncio.sleep(self.draw.choice((0.0, 0.01)))
        began, suspended = loop.now, loop.call_later(_PATIENCE, self.lost, None)
        await asyncio.wait([end])
        suspended.cancel()
        if loop.now >= began + _PATIENCE and self._world.life is not None and self._world.calm < began:
            self.broken(f"no answer to {data[:60]!r} in {_PATIENCE:g} s")
        incoming.open = False
        transport.reset()
        return end.result()

    async def _ask(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> tuple[int, bytes]:
        """Return the response to a request, which is sent again while there is none, or no room."""
        head = f"{method} {path} HTTP/1.1\r\nHost: simulated\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        for _ in range(_TRIES):
            end = await self._once(head.encode() + body)
            if end is not None:
                status, found = end
                self._world.responses[str(status)] += 1
                if status >= 400 and (status not in _AGAIN or not json.loads(found)["error"]["message"]):
                    self.broken(f"{method} {path}: status {status}: {found[:200]!r}")
                if status not in _AGAIN:
                    return status, found
            elif method == "POST" and path == "/v1/batches":
                return 0, b""  # it may have been created
            await asyncio.sleep(self.draw.choice((0.5, 3.0)))
        self.broken(f"{method} {path}: no answer in {_TRIES} tries")
        return 0, b""

    async def _read(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> Any:
        status, found = await self._ask(method, path, body, kind)
        if status != 200:
            self.broken(f"{method} {path}: status {status}: {found[:200]!r}")
        return json.loads(found)

    async def _job(self, name: str, first: int) -> None:
        draw = self.draw
        faults = draw.choice((0.0, 0.0, 0.1))
        lines: dict[str, Ask] = {}
        for number in range(draw.choice((1, 5, 60, 300))):
            do, size = draw.choice(_DOS) if draw.random() < faults else "ok", draw.choice((0, 0, 3000))
            lines[f"r{number}"] = Ask(first + number, b"", False, 1, 0.0, wanted_of(do), size, do=do, sent=0.0)
        text = b"\n".join(
            json.dumps({"custom_id": each, "url": _PATH, "body": {"n": ask.n, "do": ask.do, "size": ask.size}}).encode()
            for each, ask in lines.items()
        )
        self.asked += len(lines)
        form = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        body = form % (b"purpose", b"", b"batch") + form % (b"file", b'; filename="in.jsonl"', text) + b"--b--\r\n"
        file = (await self._read("POST", "/v1/files", body, "multipart/form-data; boundary=b"))["id"]
        await self._same(file, text)
        window = draw.choice(tuple(_WINDOWS))
        created = self._world.loop.now
        job = await self._created(name, file, window)
        cancels = draw.random() < 0.15
        if cancels:
            await asyncio.sleep(draw.choice((0.0, 0.5, 5.0)))
            await self._read("POST", f"/v1/batches/{job}/cancel")
        ended = await self._end_of(job, created, _WINDOWS[window])
        self._hash.update(f"{self._world.loop.now:.6f} {ended['status']} {ended['request_counts']}".encode())
        await self._judge(ended, lines, cancels, created + _WINDOWS[window])
        await self._same(file, text)

    async def _same(self, file: str, text: bytes) -> None:
        _, found = await self._ask("GET", f"/v1/files/{file}/content")
        if found != text:
            self.broken(f"a file of {len(text)} bytes has {len(found)}: {found[:100]!r}")

    async def _created(self, name: str, file: str, window: str) -> str:
        call = {"input_file_id": file, "endpoint": _PATH, "completion_window": window, "metadata": {"name": name}}
        while True:
            status, found = await self._ask("POST", "/v1/batches", json.dumps(call).encode())
            if status == 200:
                return str(json.loads(found)["id"])
            if status:
                self.broken(f"a job was not created: {status} {found[:200]!r}")
            listed = await self._read("GET", "/v1/batches?limit=100")
            for each in listed["data"]:
                if each["metadata"] == {"name": name}:
                    return str(each["id"])

    async def _end_of(self, job: str, created: float, window: float) -> Any:
        world, wait = self._world, 0.1
        while True:
            found = await self._read("GET", f"/v1/batches/{job}")
            if found["status"] not in ("validating", "in_progress", "finalizing", "cancelling"):
                return found
            if world.loop.now > max(created + window + world.set_back, world.calm) + _LATEST:
                self.broken(f"a job has not ended {world.loop.now - created:.0f} s after it was created: {found}")
            await asyncio.sleep(wait)
            wait = min(2.0 * wait, 30.0)

    async def _judge(self, job: Any, lines: dict[str, Ask], cancels: bool, until: float) -> None:
        status = job["status"]
        late = self._world.set_forward or self._world.loop.now > until - 1.0
        if not (status == "completed" or (status == "cancelled" and cancels) or (status == "expired" and late)):
            self.broken(f"a job is {status}: {job}")
        ends: Counter[str] = Counter()
        for column, good in (("output_file_id", True), ("error_file_id", False)):
            if job[column] is None:
                continue
            _, found = await self._ask("GET", f"/v1/files/{job[column]}/content")
            if found[-1:] != b"\n":
                self.broken(f"{column} ends with half a line: {found[-100:]!r}")
            for line in found.splitlines():
                end = json.loads(line)
                ends[end["custom_id"]] += 1
                if fault := self._fault_of(lines[end["custom_id"]], end, good=good, expired=status == "expired"):
                    self.broken(f"{end['custom_id']} in {column}: {fault}")
        if max(ends.values(), default=0) > 1 or (status != "cancelled" and len(ends) < len(lines)):
            self.broken(f"{len(lines)} requests have {sum(ends.values())} ends, of {len(ends)}: {job}")
        counts = job["request_counts"]
        if status != "expired" and counts["completed"] + counts["failed"] != len(ends):
            self.broken(f"it counts {counts}, and {len(ends)} have an end")

    def _fault_of(self, ask: Ask, end: Any, *, good: bool, expired: bool) -> str:
        """Return what is wrong with the end of one request; "" if it is right."""
        response = end["response"]
        if response is None:
            right = expired and not good and end["error"]["code"] == "batch_expired"
            return "" if right else f"it has no response: {end}"
        status = response["status_code"]
        if (status < 400) != good:
            return f"it has status {status}"
        also = frozenset({"ModelCrashed"} if self._world.crashed else ())
        return fault_of(ask, status, {}, json.dumps(response["body"]).encode(), also)


def simulate_jobs(seed: int) -> Result:
    """Run the batch jobs of `seed`."""
    plan = draw_plan(seed)
    loop = ThreadedLoop(random.Random(f"{seed} disk"), coarse=plan.coarse)
    hook = sys.unraisablehook
    with warnings.catch_warnings():  # what a killed process has begun is never awaited, and cannot be closed
        warnings.simplefilter("ignore", RuntimeWarning)
        sys.unraisablehook = lambda _: None
        try:
            result = run_in(loop, JobWorld(plan, loop))
            logging.disable()
            del loop
            gc.collect()
        finally:
            logging.disable(logging.NOTSET)
            sys.unraisablehook = hook
    return result
