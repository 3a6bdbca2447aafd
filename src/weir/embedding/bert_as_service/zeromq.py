"""ZeroMQ as bert-as-service speaks it: two ports, one that takes requests (PULL) and one that publishes the answers (PUB).

An answer goes to every peer that has subscribed to the beginning of its first frame, its topic. libzmq throws away what nobody listens to yet, or for a
moment; here it is kept for as long as a client may take to come, or to come back: until a peer has subscribed to the whole topic, as the client that asked
does. One that listens to all topics takes no answer away from others.

It speaks ZMTP itself (embedding/bert_as_service/zmtp.py) instead of through libzmq, which cannot bound what a stranger takes: a message without end
grows in its memory for as long as it comes, and so do subscriptions.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from weir.embedding.bert_as_service import frames
from weir.embedding.bert_as_service.frames import MAX_FRAMES, Ask
from weir.embedding.bert_as_service.port import Drops, Limits, Peer, Port
from weir.embedding.bert_as_service.settings import ZeroMqSettings
from weir.embedding.bert_as_service.status import Status
from weir.embedding.bert_as_service.zmtp import Event, Received, Subscribed, pack
from weir.embedding.encoder import LONGEST_TIMEOUT
from weir.embedding.exchange import EmbeddingContext, TextExchange, TextOptions
from weir.embedding.texts import Encoded, Text
from weir.errors import (
    CapacityError,
    Draining,
    Forbidden,
    InvalidRequest,
    ModelError,
    SettingsError,
    TooLarge,
    Unauthorized,
    WeirError,
)
from weir.protocols.access import Control
from weir.protocols.account import CLAIM, Account
from weir.protocols.offloading import off_loop
from weir.protocols.status import http_code
from weir.telemetry.logs import get_logger

MAX_TOPICS = 256  # that one peer listens to
OVERHEAD = 4096  # bytes that a message counts beside its own: there may be many small ones
_SWEPT_AT_ONCE = 128  # topics that are looked at in one turn of the event loop
_TOGETHER = 4  # times what one client may leave unread: what all may

Frames = Sequence[bytes | memoryview]


class Publisher:
    """Publishes. Who listens may leave `max_unread` bytes unread: no more is made for it (`room`) until it has read, and of several who listen to
    the same, those that read more slowly are left out. What nobody listens to may be as large; more is dropped.

    What nobody listens to is given up after `grace` seconds. All of it is charged to `account`; while that is over its limit, each client has one
    answer at a time.
    """

    def __init__(self, max_unread: int, grace: float, drops: Drops, account: Account) -> None:
        self._account = account
        self._max_unread = max_unread
        self._grace = grace
        self._drops = drops
        self._peers: dict[bytes, set[Peer]] = {}
        self._lengths: Counter[int] = Counter()  # of the topics
        self._clogged: set[Peer] = set()
        self._kept: dict[bytes, list[KeptMessage]] = defaultdict(list)
        self._kept_sizes: Counter[bytes] = Counter()  # by topic
        self._kept_bytes = 0
        self._missed: dict[bytes, float] = {}  # topics that nobody listens to, and since when
        self._making: Counter[bytes] = Counter()  # bytes of answers that are being made, by topic
        self._waiting: dict[bytes, deque[tuple[int, asyncio.Future[None]]]] = {}  # for room, by topic

    # Who listens.

    def subscribe(self, peer: Peer, event: Subscribed) -> None:
        """Add or remove a subscription of `peer`. Raises TooLarge for a peer with too many."""
        if not event.wanted:
            self._remove(peer, event.topic)
        elif event.topic not in peer.topics:
            if len(peer.topics) >= MAX_TOPICS:
                raise TooLarge(f"subscriptions: more than {MAX_TOPICS}")
            peer.topics.add(event.topic)
            if event.topic not in self._peers:
                self._peers[event.topic] = set()
                self._lengths[len(event.topic)] += 1
            self._peers[event.topic].add(peer)
            self._send_kept(event.topic)  # what it hears of beside its own topic comes with the next sweep

    def forget(self, peer: Peer) -> None:
        """Forget `peer`, whose connection has ended."""
        self._clogged.discard(peer)
        self._account.give(peer.charged)
        peer.charged = 0
        for topic in list(peer.topics):
            self._remove(peer, topic)

    def _remove(self, peer: Peer, topic: bytes) -> None:
        if topic not in peer.topics:
            return
        peer.topics.discard(topic)
        self._peers[topic].discard(peer)
        if not self._peers[topic]:
            del self._peers[topic]
            self._lengths[len(topic)] -= 1
            if not self._lengths[len(topic)]:
                del self._lengths[len(topic)]

    def is_heard(self, topic: bytes) -> bool:
        """Tell whether somebody listens to `topic`."""
        return bool(self._listeners(topic))

    def _listeners(self, topic: bytes) -> set[Peer]:
        found: set[Peer] = set()
        for length in self._lengths:
            if length <= len(topic):
                found |= self._peers.get(topic[:length], set())
        return found

    # Room for answers.

    async def room(self, topic: bytes, size: int) -> None:
        """Return when an answer of `size` bytes may be made for `topic`: as soon as one of those who listen has read so much that it may
        be left unread. One that is larger is made when there is no other. To be followed by `made`."""
        if topic not in self._waiting and self._has_room(topic, size):
            self._make(topic, size)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(topic, deque()).append((size, future))
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # it had its room already
                self._make(topic, -size)
            self._admit(topic)
            raise

    def made(self, topic: bytes, size: int) -> None:
        """Give back the room of an answer that was published, or will not be."""
        self._make(topic, -size)
        self._admit(topic)

    def _make(self, topic: bytes, size: int) -> None:
        self._making[topic] += size  # charged by who makes it

    def has_read(self, peer: Peer) -> None:
        """Note that `peer` has read all that it was sent."""
        for topic in peer.topics:
            if topic in self._waiting:
                self._admit(topic)

    def _has_room(self, topic: bytes, size: int) -> bool:
        taken = self._making[topic] + min((peer.unread for peer in self._listeners(topic)), default=0)
        return not taken or (taken + size <= self._max_unread and not self._account.over)

    def _admit(self, topic: bytes) -> None:
        """Wake those that wait for room, in order, for as many as there is room."""
        waiting = self._waiting.get(topic, deque())
        while waiting:
            size, future = waiting[0]
            if not future.done():
                if not self._has_room(topic, size):
                    return
                self._make(topic, size)
                future.set_result(None)
            waiting.popleft()
        self._waiting.pop(topic, None)
        if not self._making[topic]:
            del self._making[topic]

    # Answers.

    def publish(self, frames: Frames) -> None:
        """Send a message to all who listen to its first frame; keep it if nobody does."""
        topic = bytes(frames[0])
        listeners = self._listeners(topic)
        for peer in listeners:
            self._write(peer, frames)
        if topic not in self._peers:  # who asked is not among them: a client subscribes to its own topic
            self._keep(topic, KeptMessage(frames, heard=bool(listeners)))

    def _write(self, peer: Peer, frames: Frames) -> None:
        unread = peer.unread
        if unread > self._max_unread or self._has_its_share(unread):
            self._drops("answer", f"{unread} bytes of answers are unread (zmq_max_unread)", peer.address)
            return
        peer.write(pack(frames))
        if peer.unread:
            self._clogged.add(peer)
            self._charge(peer)

    def _has_its_share(self, unread: int) -> bool:
        """Whether all peers together may leave no more unread, and a peer with so many bytes has at least an equal part of that."""
        most = _TOGETHER * self._max_unread
        return unread * len(self._clogged) >= most and self.unread > most

    def _charge(self, peer: Peer) -> None:
        """Charge what `peer` has not read now."""
        self._account.add(peer.unread - peer.charged)
        peer.charged = peer.unread

    def _keep(self, topic: bytes, kept: "KeptMessage") -> None:
        size = size_of(kept.frames) + OVERHEAD
        if self._kept_bytes + size > self._max_unread or self._account.over:
            if not kept.heard:
                self._drops("answer", "nobody listens, and too many are kept for such (zmq_max_unread)")
            return
        self._kept[topic].append(kept)
        self._kept_sizes[topic] += size
        self._kept_bytes += size
        self._account.add(size)

    def _send_kept(self, topic: bytes) -> None:
        """Send what is kept for `topic`, to which somebody has subscribed, also to others who have not heard it."""
        for kept in self._take(topic):
            for peer in self._peers[topic] if kept.heard else self._listeners(topic):
                self._write(peer, kept.frames)

    def _send_unheard(self, topic: bytes, listeners: set[Peer]) -> None:
        """Send what is kept for `topic` to those who listen to its beginning, once; it stays for who asked."""
        for kept in self._kept.get(topic, ()):
            if not kept.heard:
                kept.heard = True
                for peer in listeners:
                    self._write(peer, kept.frames)

    def _take(self, topic: bytes) -> "list[KeptMessage]":
        size = self._kept_sizes.pop(topic, 0)
        self._kept_bytes -= size
        self._account.give(size)
        return self._kept.pop(topic, [])

    @property
    def unread(self) -> int:
        """Bytes of answers that were sent and have not left."""
        self._recharge()
        return sum(peer.charged for peer in self._clogged)

    def _recharge(self) -> None:
        """Charge what has not left now."""
        for peer in self._clogged:
            self._charge(peer)
        self._clogged = {peer for peer in self._clogged if peer.charged}

    @property
    def waiting(self) -> bool:
        """Whether there are answers that have not left."""
        return any(not kept.heard for each in self._kept.values() for kept in each) or self.unread > 0

    # Time.

    def sweep(self, topics: Iterable[bytes], now: float) -> Iterator[list[bytes]]:
        """Yield those of `topics` that nobody has listened to for the grace; what was kept for such is dropped.

        There may be tens of thousands of topics: they are looked at a few at a time, between which others can have their turn.
        """
        asked = {*topics, *self._kept, *self._waiting}
        left = iter(asked)
        while some := list(islice(left, _SWEPT_AT_ONCE)):
            yield self._sweep_some(some, now)
        self._recharge()
        self._missed = {topic: since for topic, since in self._missed.items() if topic in asked}

    def _sweep_some(self, topics: Iterable[bytes], now: float) -> list[bytes]:
        given_up, dropped = [], 0
        for topic in topics:
            self._admit(topic)
            listeners = self._listeners(topic)
            if topic in self._peers:
                self._send_kept(topic)
            elif listeners:
                self._send_unheard(topic, listeners)
            if listeners and topic not in self._kept:
                self._missed.pop(topic, None)
            elif now >= self._missed.setdefault(topic, now) + self._grace:
                if not listeners:
                    given_up.append(topic)
                dropped += sum(not kept.heard for kept in self._take(topic))
        if dropped:
            self._drops("answer", f"nobody has listened for {self._grace:g} s", times=dropped)
        return given_up


@dataclass(slots=True)
class KeptMessage:
    """A message that nobody who subscribed to just its topic has got; `heard`: others, who listen to the beginning of the topic, have."""

    frames: Frames
    heard: bool


def size_of(frames: Frames) -> int:
    """Return how many bytes there are in `frames`."""
    return sum(map(len, frames))


FRONTEND = "zeromq"
AT_ONCE = 16  # requests that are cancelled in one turn of the event loop, which takes a few milliseconds
CONFIG_DELAY = 0.1  # seconds in which a stock client that has just connected comes to listen
_NUMBER = 4  # bytes
_SWEEP_INTERVAL = 0.5  # seconds
_LOOK_INTERVAL = 0.02  # seconds between two looks at whether all answers have left, at the end
_MAX_SUBSCRIPTION = 1024  # bytes
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0  # seconds until a stock client's request is offered to a full queue again


class ZeroMqContext(NamedTuple):
    """What answering needs. `terminate` has the server drain and end. What requests hold is charged to `account`."""

    shared: EmbeddingContext
    settings: ZeroMqSettings
    publisher: Publisher
    status: Status
    control: Control
    terminate: Callable[[], None]
    drops: Drops
    account: Account


class Answering:
    """Answers requests. `in_flight` are the bytes of those under way; `changed` is called when it has become less."""

    def __init__(self, context: ZeroMqContext, changed: Callable[[], None]) -> None:
        self._context = context
        self._changed = changed
        self._encoder = context.shared.encoder()  # requests name no model: the first is asked
        self._tasks: dict[bytes, set[asyncio.Task[None]]] = {}
        self._to_cancel: deque[asyncio.Task[None]] = deque()
        self._leaving: set[bytes] = set()  # topics of which everything is among those already
        self.in_flight = 0
        self.draining = False

    def received(self, message: Received, peer: str) -> None:
        """Take what came from the address `peer`."""
        try:
            ask = frames.read_ask(message.frames)
        except InvalidRequest as error:
            self._context.drops("message", error, peer)
            return
        try:
            if message.size:
                raise TooLarge(f"a request of {message.size} bytes (zmq_max_message_size)")
            if ask.command:
                self._command(ask, peer)
            elif self.draining:
                raise Draining("the server is about to stop")
            else:
                self._start(ask)
        except WeirError as error:
            self._fail(ask, error, peer)

    # Vectors.

    def _start(self, ask: Ask) -> None:
        exchange = TextExchange(
            self._context.shared, FRONTEND, self._encoder, client=_name(ask), timeout=LONGEST_TIMEOUT
        )
        exchange.asked(ask.size)
        size = len(ask.payload) + OVERHEAD
        task = asyncio.get_running_loop().create_task(self._answer(ask, exchange))
        self.in_flight += size
        self._context.account.add(size)
        topic = ask.identity  # what is to be known at the end does not keep the texts
        self._tasks.setdefault(topic, set()).add(task)
        task.add_done_callback(lambda task: self._ended(topic, size, task))

    def _ended(self, topic: bytes, size: int, task: asyncio.Task[None]) -> None:
        self.in_flight -= size
        self._context.account.give(size)
        tasks = self._tasks[topic]
        tasks.discard(task)
        if not tasks:
            del self._tasks[topic]
        self._changed()

    async def _answer(self, ask: Ask, exchange: TextExchange) -> None:
        with self._context.account.claim() as claim:
            CLAIM.set(claim)  # of this task: its vectors are charged
            await self._answer_charged(ask, exchange)

    async def _answer_charged(self, ask: Ask, exchange: TextExchange) -> None:
        publisher = self._context.publisher
        received, topic, room = len(ask.payload), ask.identity, 0
        try:
            size = _NUMBER * ask.size * self._encoder.dimensions
            self._check_answer(ask.size, size)
            await publisher.room(topic, size + OVERHEAD)
            room = size + OVERHEAD
            texts = await off_loop(received, partial(frames.read_texts, ask))
            ask = ask._replace(payload=b"")  # the texts are all that is kept of it
            encoded = await self._encode(exchange, texts)
            self._check_answer(ask.size, encoded.vectors.nbytes)
            if encoded.foreign:
                exchange.warn_of_ids(encoded.foreign)
            answer = frames.write_vectors(ask, encoded.vectors, encoded.tokens)
            exchange.delivered(encoded, received, sum(map(len, answer)))
            publisher.publish(answer)
        except WeirError as error:
            self._refuse(ask, exchange, error)
        except Exception as error:  # of ours, or of whoever encodes: nobody else would answer
            _logger().exception("request failed", door=FRONTEND, client=_name(ask))
            self._refuse(ask, exchange, ModelError(f"{type(error).__name__} in the server"))
        finally:
            if room:
                publisher.made(topic, room)

    async def _encode(self, exchange: TextExchange, texts: Sequence[Text]) -> Encoded:
        """Return the vectors. A request can neither be told to come again later nor state a deadline: what a full queue refuses is offered to it again."""
        options = TextOptions(whole_words=True, want_tokens=self._context.settings.zmq_show_tokens)
        wait = _FIRST_WAIT
        while True:
            try:
                return await exchange.encode(texts, options, exchange.timeout)
            except CapacityError as error:
                if isinstance(error, Draining) or self.draining:
                    raise
                again = error.retry_after or 0.0
            await asyncio.sleep(max(wait, again))
            wait = min(2.0 * wait, _LONGEST_WAIT)

    def _check_answer(self, texts: int, size: int) -> None:
        most = self._context.settings.zmq_max_answer_size
        if size > most:
            raise TooLarge(
                f"texts: {texts}; their vectors have {size} bytes, an answer may have {most} (zmq_max_answer_size)"
            )

    def _refuse(self, ask: Ask, exchange: TextExchange, error: WeirError) -> None:
        exchange.refused(http_code(error))
        self._fail(ask, error)

    def _fail(self, ask: Ask, error: WeirError, peer: str = "") -> None:
        failed = frames.failed(error, http_code(error))
        self._context.drops("request", f"{failed.type}: {failed.message}", peer, _name(ask))
        self._context.publisher.publish(frames.write_refusal(ask, failed))

    # Commands.

    def _command(self, ask: Ask, peer: str) -> None:
        self._context.shared.clients.asked_about(_name(ask), door=FRONTEND)
        if ask.command == frames.TERMINATION:
            self._terminate(ask, peer)
            return
        status = self._context.status
        tell = status.config if ask.command == frames.SHOW_CONFIG else status.server_status
        answer = frames.write_facts(
            ask, {**tell(_name(ask)), "show_tokens_to_client": self._context.settings.zmq_show_tokens}
        )
        if ask.command == frames.SHOW_CONFIG:
            asyncio.get_running_loop().call_later(CONFIG_DELAY, self._context.publisher.publish, answer)
        else:
            self._context.publisher.publish(answer)

    def _terminate(self, ask: Ask, peer: str) -> None:
        """Have the server end, for who may. Only who listens already is answered: bert-serving-terminate does not, and nothing is kept for it."""
        publisher = self._context.publisher
        try:
            self._context.control.require(peer, None)
        except (Unauthorized, Forbidden) as error:
            _logger().warning("refused to end", door=FRONTEND, peer=peer, reason=error.message)
            if publisher.is_heard(ask.identity):
                publisher.publish(frames.write_refusal(ask, frames.failed(error, http_code(error))))
            return
        _logger().info("asked to end", door=FRONTEND, peer=peer)
        if publisher.is_heard(ask.identity):
            publisher.publish(frames.write_facts(ask, {}))
        self._context.terminate()

    # Their ends.

    @property
    def topics(self) -> list[bytes]:
        """Those who have requests under way."""
        return list(self._tasks)

    @property
    def busy(self) -> bool:
        """Whether there are requests under way."""
        return bool(self._tasks)

    def cancel(self, topic: bytes) -> None:
        """Take everything that was asked for `topic` out of the queue, a few requests at a time: others are served in between."""
        if topic not in self._leaving:
            self._leaving.add(topic)
            for task in self._tasks.get(topic, ()):
                self._cancel_soon(task)

    def _cancel_soon(self, task: asyncio.Task[None]) -> None:
        if not self._to_cancel:
            asyncio.get_running_loop().call_soon(self._cancel_some)
        self._to_cancel.append(task)

    def _cancel_some(self) -> None:
        for _ in range(min(AT_ONCE, len(self._to_cancel))):
            self._to_cancel.popleft().cancel()
        if self._to_cancel:
            asyncio.get_running_loop().call_soon(self._cancel_some)
        else:
            self._leaving.clear()

    async def stop(self) -> None:
        """Cancel everything."""
        self._to_cancel.clear()
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _name(ask: Ask) -> str:
    return ask.identity.decode("utf-8", "backslashreplace")


def _logger() -> BoundLogger:
    return get_logger("weir")


def end_process() -> None:
    """Have this process end as a process manager would: by SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


class ZeroMqFrontend:
    """Answers requests over ZeroMQ for the models of `context`, of which the first is asked.

    `terminate` is called when somebody who may (`control`) asks the server to end. `status` answers for the server. What clients hold is charged to
    `account`, which other frontends may share.
    """

    def __init__(
        self, context: EmbeddingContext, settings: ZeroMqSettings, *, control: Control | None = None, status: Status | None = None,
        terminate: Callable[[], None] = end_process, account: Account | None = None,
    ) -> None:  # fmt: skip
        self._settings = settings
        http = context.http
        self._host = http.host
        self.drops = Drops(_logger(), context.counts.dropped)
        self.clients = context.clients
        self._account = account = account or Account(http)
        self._publisher = Publisher(settings.zmq_max_unread, settings.zmq_grace, self.drops, account)
        shared = ZeroMqContext(
            context, settings, self._publisher, status or Status(context.encoders, context.clients), control or Control(),
            terminate, self.drops, account,
        )  # fmt: skip
        self._answering = Answering(shared, self._changed)
        limits = Limits(
            min(settings.zmq_max_message_size, account.max_bytes), MAX_FRAMES, http.max_connections, settings.zmq_max_in_flight,
            http.header_timeout, http.body_timeout,
        )  # fmt: skip
        self._in = Port("PULL", limits, self.drops, account, self._heard)
        out = limits._replace(max_message=_MAX_SUBSCRIPTION, max_frames=1)
        self._out = Port(
            "PUB", out, self.drops, account, self._subscribed, self._publisher.forget, self._publisher.has_read
        )
        self._sweeping: asyncio.Handle | None = None
        self._ended = asyncio.Event()

    @property
    def address(self) -> str:
        """Where requests are taken, as a URL."""
        return f"tcp://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    @property
    def port(self) -> int:
        """The port that takes requests."""
        return self._in.number

    @property
    def port_out(self) -> int:
        """The port that publishes answers."""
        return self._out.number

    async def start(self) -> None:
        """Listen at both ports. Raises SettingsError if one is taken or unusable; nothing is left open then."""
        asked, out = self._settings.zmq_port or 0, self._settings.zmq_port_out
        await self._in.start(self._host, asked, "zmq_port")
        try:
            await self._out.start(self._host, self._next_port() if out is None else out, "zmq_port_out")
        except SettingsError:
            await self._in.stop()
            raise
        self._sweep()

    def _next_port(self) -> int:
        """The one after that of requests, where clients look if they are told nothing else."""
        return self.port + 1 if self._settings.zmq_port and self.port < 65535 else 0

    def _heard(self, peer: Peer, event: Event) -> None:
        if isinstance(event, Received):
            self._answering.received(event, peer.address)
            if not self._in.paused and self._has_enough:
                self._in.pause()

    @property
    def _has_enough(self) -> bool:
        """Whether as much is under way as may be, or as there is room for beside what other clients hold."""
        in_flight = self._answering.in_flight
        return in_flight > self._settings.zmq_max_in_flight or (in_flight > 0 and self._account.over)

    def _subscribed(self, peer: Peer, event: Event) -> None:
        if isinstance(event, Subscribed):
            self._publisher.subscribe(peer, event)

    def _changed(self) -> None:
        self._ended.set()
        if self._in.paused and not self._has_enough:
            self._in.resume()

    def _sweep(self) -> None:
        now = time.monotonic()
        for port in (self._in, self._out):
            port.sweep(now)
        self._changed()
        self._sweep_topics(self._publisher.sweep(self._answering.topics, now))

    def _sweep_topics(self, turns: Iterator[list[bytes]]) -> None:
        """Look at some topics, and at the others in further turns of the loop."""
        given_up = next(turns, None)
        loop = asyncio.get_running_loop()
        if given_up is None:
            self._sweeping = loop.call_later(_SWEEP_INTERVAL, self._sweep)
            return
        for topic in given_up:
            self._answering.cancel(topic)
        self._sweeping = loop.call_soon(self._sweep_topics, turns)

    def refuse(self) -> None:
        """Refuse requests from now on."""
        self._answering.draining = True

    async def drain(self, drain_timeout: float | None = None) -> bool:
        """Accept no connection for requests, and return when all answers have left; False if that took longer than
        `drain_timeout` seconds."""
        self.refuse()
        self._in.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_timeout):
                while self._answering.busy or self._publisher.waiting:
                    await self._something_ended()
                return True
        return False

    async def _something_ended(self) -> None:
        self._ended.clear()
        with contextlib.suppress(TimeoutError):  # nobody tells when the last byte of an answer has left
            async with asyncio.timeout(_LOOK_INTERVAL):
                await self._ended.wait()

    async def stop(self) -> None:
        """Close everything. Idempotent."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        await self._answering.stop()
        await asyncio.gather(self._in.stop(), self._out.stop())
