"""A front: a process that listens, reads the requests of the fast path, has the dispatcher run them, and writes their responses.

It is forked from a template, a process with one thread that has loaded the code. The fast path is that of a server with one process, except for the place of requests, bodies
and shared memory, which is the dispatcher's.
"""

import asyncio
import contextlib
import gc
import logging
import os
import re
import socket
import ssl
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from weir.errors import CapacityError, ModelNotFound, Overloaded, WeirError
from weir.frontends.frontend import Frontend
from weir.frontends.grpc import CORE_VARIABLES
from weir.frontends.http.access_log import HttpLog
from weir.frontends.http.fast.connection import LARGE, Connection, Kept, LoggedConnection
from weir.frontends.http.fast.inference import HotKserve, HotNative, KserveRequest, Step
from weir.frontends.http.fast.plan import HttpHead, RoutePlan
from weir.frontends.http.fast.shared import REAL_TIME, BlockPlace, Clocks, Place
from weir.frontends.http.server import BACKLOG, Edge, HttpServer, tls_context
from weir.fronts.messages import (
    LONGEST_BODY,
    LONGEST_TEXT,
    AccessLine,
    Alive,
    Drain,
    Drained,
    FromDispatcher,
    FrontListens,
    GiveBack,
    Granted,
    Link,
    MemoryGone,
    ModelTable,
    Noted,
    Outputs,
    PlacedOutput,
    PlaceFree,
    ProductDrained,
    Refuse,
    Refused,
    Reported,
    reader_of_dispatcher,
    sent_error,
)
from weir.fronts.passing import ConnectionSender, Relays
from weir.fronts.places import LentPlace, MemoryReceiver, OutputReader
from weir.fronts.remote import RemoteModels, Requests
from weir.protocols import HttpSettings
from weir.protocols.access import Access
from weir.protocols.account import SharedAccount, SharedFigures
from weir.protocols.kserve import ZLIB, KserveContext
from weir.telemetry.recorder import SilentObserver
from weir.wire.frames import FrameParser, Start
from weir.wire.kserve_json import REGION, Body
from weir.wire.status import set_timeout_status
from weir.workers.process.channel import ChildChannel, ServerSocket
from weir.workers.process.entry import prepare
from weir.workers.process.program import READY, obey
from weir.workers.timer import in_background, new_loop

if TYPE_CHECKING:
    from weir.frontends.frontend import FrontProduct
    from weir.frontends.http.fast.shared import HttpShared
    from weir.fronts.calls import FrontCalls


# The name of a parameter for shared memory in JSON, of which any letter may be escaped.
_NAMES_REGION = re.compile(rb"%b|\\u00[5-7]" % REGION.encode())


class FrontKserveRequest(KserveRequest):
    """A request of the Open Inference Protocol. The worker reads its JSON, or else it is read here and sent as packed arrays.

    `body` and `opening` are what came, and the part of it that a place does not hold any more after the request was sent; after `keep_body`, a place holds
    nothing of it.
    """

    __slots__ = ("body", "opening")

    def __init__(self, connection: "Connection", plan: RoutePlan, payload: Any) -> None:
        super().__init__(connection, plan, payload)
        self.body = payload
        self.opening = b""
        if type(payload) is LentPlace:
            self.opening = bytes(payload.view[plan.lead : plan.lead + (self.head.header_length or 0)])

    def read_body(self, body: Body) -> Step:
        """See KserveRequest. Only workers decode long JSON, in which they find it."""
        if self.head.header_length is not None or type(self.payload) is not LentPlace:
            return super().read_body(body)
        outline = self.head.outline
        found = None if outline is None or bytes(body[:1]) == ZLIB else self.undecoded(body, outline)
        return self.pass_on if found is None else partial(self.enter_outline, None, found)

    def read_tensors(self, plain: Body) -> Step:
        """See KserveRequest. The dispatcher has the regions of shared memory, and responds to what may refer to them."""
        length = len(plain) if self.head.header_length is None else self.head.header_length
        return super().read_tensors(plain) if _NAMES_REGION.search(plain, 0, length) is None else self.pass_on

    def keep_body(self) -> None:
        """Copy the body, whose place is about to be written. Raises what Account.take raises."""
        size = self.plan.length
        self.connection.charge(size)
        self.body, self.opening = self.bytes_of(self.body), b""

    def received(self) -> bytes:
        """See HttpRequest."""
        return self.opening + self.bytes_of(self.body)[len(self.opening) :]


class FrontNative(HotNative):
    """HotNative for models that are known and hot; the dispatcher answers the others."""

    def complete(self, plan: RoutePlan, http_head: HttpHead, path: str) -> bool:
        """See RouteHandler."""
        return _completed(super().complete, plan, http_head, path)


class FrontKserve(HotKserve):
    """HotKserve for tensors of models that are known and hot; the dispatcher answers the others."""

    request = FrontKserveRequest

    def complete(self, plan: RoutePlan, http_head: HttpHead, path: str) -> bool:
        """See RouteHandler."""
        return _completed(super().complete, plan, http_head, path) and plan.head.service.facts.takes_tensors


def _completed(complete: Callable[..., bool], plan: RoutePlan, http_head: HttpHead, path: str) -> bool:
    """Return whether `complete` completes the plan, for a body that is short, or comes into a place of the model's arena."""
    try:
        found = complete(plan, http_head, path)
    except (ModelNotFound, CapacityError):  # the dispatcher may know more
        return False
    if not found or plan.length <= LONGEST_BODY:
        return found
    return plan.in_arena and plan.lead + plan.length <= int(plan.head.service.arena_bytes)


class FrontConnection(Connection):
    """A connection of a front. Before it receives a large body, it waits for a place in the model's arena."""

    def __init__(self, shared: "HttpShared") -> None:
        super().__init__(shared)
        self._wanted: object = None  # the place for which it waits

    def begin_large(self, plan: RoutePlan) -> bool:
        """See Connection. Ask the dispatcher for a place, unless there is one here."""
        places = plan.head.service.places
        size = plan.lead + plan.length
        if places.has(size):
            return super().begin_large(plan)
        self.phase = LARGE
        self._wanted = wanted = object()
        places.ask(size, partial(self._has_place, plan, wanted))
        return False

    def reserve(self, plan: RoutePlan) -> Place:
        """See Connection. Raises Overloaded if there is no place here."""
        block = plan.head.service.reserve(plan.lead + plan.length)
        if block is None:
            raise Overloaded("body: the front has no place for it now")
        return BlockPlace(block, plan.length, plan.lead)

    def dispatch_received(self, place: Place) -> None:
        """See Connection. A body that was moved, because others needed its place, is the dispatcher's."""
        if isinstance(place, BlockPlace):
            super().dispatch_received(place)
            return
        body = place.payload()
        place.give_up()
        self._forget_place()
        self._hand_over(self._plan.head_bytes, body)

    def _has_place(self, plan: RoutePlan, wanted: object, has_place: bool) -> None:
        if self._wanted is not wanted:  # the client has left
            return
        self._wanted = None
        if not has_place:
            self._hand_over(plan.head_bytes)
            return
        super().begin_large(plan)
        self.regulate_reading()

    def regulate_reading(self) -> None:
        """See Connection. Nothing is read while it waits."""
        if self._wanted is None or self.transport.is_closing():
            super().regulate_reading()
        elif not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def leave(self) -> None:
        """See Connection."""
        self._wanted = None
        super().leave()


class LoggedFrontConnection(LoggedConnection, FrontConnection):
    """A connection of a front that writes the access log."""


class Leaving(Kept):
    """A connection that is handed over to the dispatcher once the client has all that was written to it: within the time that it may take to read."""

    busy = True  # it has a request without a response

    def start(self, replay: bytes, sender: ConnectionSender) -> None:
        """Take the connection over."""
        self._replay, self._sender = replay, sender
        self.transport.pause_reading()
        self.transport.set_protocol(self)
        self.transport.set_write_buffer_limits(0)
        if not self.transport.get_write_buffer_size():
            self.resume_writing()

    def resume_writing(self) -> None:
        """All is written: pass the connection on. Its transport here is closed, which does not close the connection."""
        if not self.transport.is_closing():
            self.shared.connections.discard(self)
            self._sender.send_from(self.transport, self._replay)

    def sweep(self, now: float) -> None:
        """Close the connection if its client has not read for too long."""
        self._patience = self.shared.patience
        super().sweep(now)

    def stop(self) -> None:
        """Close the connection: what was written has not been read."""
        self.transport.abort()


@dataclass(frozen=True)
class Listeners:
    """The listening sockets of a front, one for each address."""

    servers: Sequence[asyncio.Server]

    @property
    def sockets(self) -> list[Any]:
        """See Listening."""
        return [each for server in self.servers for each in server.sockets]

    def close(self) -> None:
        """See Listening."""
        for server in self.servers:
            server.close()


async def listen_at(
    sockets: Sequence[socket.socket], settings: HttpSettings, accepted: Callable[[], asyncio.BaseProtocol]
) -> Listeners:
    """Listen at `sockets`; see Listen."""
    loop, servers = asyncio.get_running_loop(), []
    for each in sockets:
        create = loop.create_unix_server if each.family == socket.AF_UNIX else loop.create_server
        servers.append(await create(accepted, sock=each, backlog=BACKLOG))
    return Listeners(servers)


async def no_application(scope: Any, receive: Any, send: Any) -> None:
    """Raise: a front has no ASGI application, and hands over what needs one."""
    raise NotImplementedError  # uvicorn wants one; nothing calls it


class RefusalObserver(SilentObserver):
    """Reports refusals of requests that name no model."""

    def __init__(self, link: Link[Any]) -> None:
        self._link = link

    def refused(self, model: str, frontend: str, error: WeirError) -> None:
        """See Observer."""
        self._link.send(Refused(None, frontend, sent_error(error, LONGEST_TEXT)))


class RemoteLog(HttpLog):
    """The access log of a front: its lines are the dispatcher's."""

    def __init__(self, link: Link[Any], clock: Callable[[], float]) -> None:
        self.clock = clock
        self._link = link

    def answered(
        self, client: Any, method: str, target: bytes, status: int, size_bytes: int, began: float, protocol: str
    ) -> None:
        """See HttpLog."""
        peer = str(client[0]) if isinstance(client, tuple) and client else ""
        path = target.partition(b"?")[0][:LONGEST_TEXT]
        self._link.put(AccessLine(peer, method, path, status, size_bytes, began, self.clock(), protocol))


class RemoteHandler(logging.Handler):
    """Sends what is logged here to the log of the dispatcher."""

    def __init__(self, link: Link[Any]) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        with contextlib.suppress(Exception):  # a wrong record must not end a request
            text = self.format(record)[:LONGEST_TEXT].encode("utf-8", "backslashreplace").decode()
            self._link.put(Noted(record.name[:LONGEST_TEXT], record.levelno, text[:LONGEST_TEXT]))


@dataclass(frozen=True)
class FrontConfig:
    """Tells fronts about their server. It must be picklable. `access` has the keys that were in their files when the server started."""

    http: HttpSettings
    access: Access
    access_log: bool
    log_level: int
    fronts: int
    grpc: "FrontCalls | None" = None
    product: "FrontProduct | None" = None


@dataclass(frozen=True)
class FrontEnds:
    """The descriptors that a front inherits from the dispatcher. `figures` is that of the memory of `SharedFigures`, and `index` the row.

    `tls` is the template's, so that a client may resume its TLS session at any front.
    """

    link: socket.socket
    connections: socket.socket
    figures: int
    listening: Sequence[socket.socket]
    index: int
    tls: ssl.SSLContext | None = None


class Front:
    """One front, from its start to its end. It passes connections on with `sender`. `left` is called when the dispatcher has ended, and with it the models."""

    def __init__(
        self, config: FrontConfig, ends: FrontEnds, account: SharedAccount, sender: ConnectionSender, *, left: Callable[[str], None],
        clocks: Clocks,
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._finishing: asyncio.Task[None] | None = None
        self._link: Link[FromDispatcher] = Link(ends.link, loop, reader_of_dispatcher(), self._received, left)
        memory = MemoryReceiver(ends.connections)
        self._outputs = OutputReader(memory, self._link.put, loop)
        self._requests = Requests(self._link, self._outputs)
        self._models = RemoteModels(self._requests, config.fronts, memory, clocks.now)
        self._product = product = config.product
        self._account = account
        self._sender = sender
        self._relays = Relays(sender, account)
        context = KserveContext(self._models, config.http, access=config.access, account=account)
        routes = () if product is None else product.routes(self._models, config.http, config.fronts, self._send_counts)
        log = RemoteLog(self._link, clocks.now) if config.access_log else None
        edge = Edge(
            partial(listen_at, ends.listening),
            lambda settings: ends.tls,
            (FrontConnection, LoggedFrontConnection),
            (FrontNative, FrontKserve),
            self,
        )
        observers = [RefusalObserver(self._link)]
        self._server = HttpServer(
            context, no_application, observers, edge=edge, route_handlers=routes, log=log, clocks=clocks
        )
        self._frontends: list[Frontend] = [self._server]
        if config.grpc is not None:
            from weir.fronts.calls import front_server  # grpcio is optional

            self._frontends.append(front_server(config.grpc, context, config.http))
        self._models.changed.append(self._server.routes_changed)
        self._readers = {
            Outputs: self._requests.answered,
            PlacedOutput: self._requests.placed,
            ModelTable: self._models.replace,
            Granted: self._granted,
            GiveBack: self._give_back,
            MemoryGone: self._outputs.forget,
            Refuse: self._refuse,
            Drain: self._begin_drain,
        }

    def log_handler(self) -> logging.Handler:
        """Return what sends log lines to the dispatcher."""
        return RemoteHandler(self._link)

    async def start(self) -> None:
        """Listen as soon as the dispatcher has sent its models."""
        self._link.open()
        await self._models.known.wait()
        for each in self._frontends:
            await each.start()

    async def run(self) -> None:
        """Serve until the dispatcher has drained this front."""
        self._link.put(FrontListens())
        await self._over.wait()
        for each in self._frontends:
            await each.stop()
        self._report()
        self._link.flush()

    def _send_counts(self, data: bytes) -> None:
        self._link.put(Reported(data))

    def _report(self) -> None:
        """Send the dispatcher what was counted."""
        self._models.report()
        if self._product is not None:
            self._product.report()

    def _received(self, messages: list[FromDispatcher]) -> None:
        readers: Any = self._readers
        for message in messages:
            readers.get(type(message), self._requests.ended)(message)

    def _begin_drain(self, message: Drain) -> None:
        in_background(self._drain(message.seconds), "the drain of a front", self._tasks)

    def _granted(self, message: Granted) -> None:
        handle = self._models.numbered(message.model)
        if handle is not None:
            handle.places.granted(message)
        elif message.offset >= 0:
            self._link.put(PlaceFree(message.model, message.offset))

    def _give_back(self, message: GiveBack) -> None:
        handle = self._models.numbered(message.model)
        if handle is not None:
            handle.places.give_back(partial(self._server.move_bodies, handle))

    def _refuse(self, message: Refuse | None = None) -> None:
        for each in self._frontends:
            each.refuse()
        if self._product is not None and self._finishing is None:
            self._finishing = in_background(self._finish(self._product), "the drain of a front", self._tasks)

    async def _finish(self, product: "FrontProduct") -> None:
        await product.drain()
        self._link.put(ProductDrained())

    # What goes on with connections that the fast path leaves: see ConnectionTaker.

    def load(self) -> None:
        """Nothing to load."""

    def go_on(self, shared: "HttpShared", transport: asyncio.Transport, replay: bytes) -> None:
        """Hand a connection over to the dispatcher. What is counted here goes ahead: the connection may ask for it."""
        shared.tell_observers()
        self._report()
        self._link.flush()
        if transport.get_extra_info("sslcontext") is not None:
            self._relays.begin(transport, replay)
        else:
            Leaving(shared, transport).start(replay, self._sender)

    def on_second(self, date: bytes) -> None:
        """Report that this front lives, and what was counted."""
        self._models.sweep()
        self._account.publish()
        self._link.put(Alive())

    async def _drain(self, seconds: float | None) -> None:
        self._refuse()
        in_time = all(await asyncio.gather(*[each.drain(seconds) for each in self._frontends]))
        self._report()
        self._link.send(Drained(in_time))
        await self._relays.ended()  # the dispatcher ends them
        self._over.set()


def run_front(config: FrontConfig, ends: FrontEnds) -> None:
    """Be a front until the end."""

    async def serve() -> None:
        account = SharedAccount(config.http, SharedFigures(ends.figures, config.fronts + 1), ends.index)
        sender = ConnectionSender(ends.connections, asyncio.get_running_loop(), account)
        front = Front(config, ends, account, sender, left=lambda reason: os._exit(0), clocks=REAL_TIME)
        logging.basicConfig(level=config.log_level, handlers=[front.log_handler()], force=True)
        set_timeout_status(config.http.timeout_status)
        await front.start()
        gc.collect()
        gc.freeze()
        await front.run()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve())


def run_template(descriptor: int) -> int:
    """Load what fronts need, once, and fork each of them, until the server leaves; return the exit code. `descriptor` is this process's end of a socket."""
    os.environ.update(CORE_VARIABLES | os.environ)  # before the configuration is read, which may import gRPC
    server = ServerSocket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    start = ChildChannel(server, FrameParser(), None).receive()
    if not isinstance(start, Start):
        return 0  # the server has left
    config: FrontConfig = start.options["config"]
    if config.grpc is not None:
        from weir.fronts import calls  # noqa: F401  # shared by all fronts
    tls = tls_context(config.http)
    if config.product is not None:
        config.product.load()
    gc.collect()
    gc.freeze()  # the collector would write to what fronts share
    server.sendall(READY)
    try:
        return obey(server, partial(_be_front, config, tls))
    except ConnectionError:  # the server has left without reading the last response
        return 0


def _be_front(
    config: FrontConfig,
    tls: "ssl.SSLContext | None",
    options: dict[str, Any],
    descriptors: Sequence[int],
    template: int,
) -> NoReturn:
    """Run as a front until the end. Libraries are not shut down then, as nothing of theirs was begun here."""
    code = 1
    try:
        os.setpgid(0, 0)
        prepare(template, ())
        for each in descriptors:
            os.set_inheritable(each, False)
        link, connections, figures, *listening = descriptors
        sockets = [socket.socket(fileno=each) for each in (link, connections, *listening)]
        run_front(config, FrontEnds(sockets[0], sockets[1], figures, sockets[2:], options["index"], tls))
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
