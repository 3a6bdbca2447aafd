"""The ZeroMQ frontend of bert-as-service: one port that receives requests (PULL) and one that publishes responses (PUB).

The first frame of a response is its topic. The response goes to every peer that has subscribed to the topic or to a beginning of it. libzmq drops a response
if no peer has subscribed yet. Here the response is kept for a limited time, until a peer subscribes to exactly its topic, as the client that sent the
request does. A peer that subscribes to a beginning of the topic, such as all topics, also gets the response, but that does not end its keeping.

This module uses ZMTP directly (frames.py) instead of libzmq, which cannot limit the memory that a peer takes: an endless message, or endless
subscriptions, would grow without bound.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from structlog.stdlib import BoundLogger

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
    draining,
)
from weir.messages import JSON, LONGEST_TIMEOUT
from weir.protocols.access import Control
from weir.protocols.account import CLAIM, Account, charge_values
from weir.protocols.offloading import off_loop
from weir.telemetry.logs import get_logger
from weir.text_models.texts import Text
from weir.text_server.bert_as_service import frames
from weir.text_server.bert_as_service.frames import MAX_FRAMES, Event, Received, Subscribed, ZeroMqRequest, pack
from weir.text_server.bert_as_service.http import Status
from weir.text_server.bert_as_service.port import Drops, Limits, Peer, Port
from weir.text_server.exchange import EmbeddingContext, TextCall, TextExchange
from weir.text_server.server_settings import ZeroMqSettings
from weir.text_server.texts import Encoded, TextOptions
from weir.wire.status import http_code
from weir.wire.values import values_bytes

MAX_TOPICS = 256  # subscriptions of one peer
MAX_ALL_TOPICS = 1 << 16  # subscriptions of all peers, each of which may have one beyond it
OVERHEAD = 4096  # bytes that each message counts in addition to its size, as many small messages take memory too
_SWEPT_AT_ONCE = 128  # topics that are swept in one turn of the event loop
_UNREAD_FACTOR = 4  # all clients together may leave this many times as much unread as one may

Frames = Sequence[bytes | memoryview]


class Publisher:
    """Publishes responses to subscribers, and keeps responses without a subscriber for a while.

    A subscriber may leave `max_unread` bytes unread. Above that, no more responses are computed for its topic (`room`) until it has read; if others
    have subscribed to the same topic and read faster, the responses go to them and are dropped for the slow one. The responses that are kept without a
    subscriber may have `max_unread` bytes in all; more are dropped. They are dropped after `grace` seconds.

    All of these bytes are charged to `account`. While the account is over its limit, each topic has one response at a time.
    """

    def __init__(self, max_unread: int, grace: float, drops: Drops, account: Account) -> None:
        self.account = account
        self._max_unread = max_unread
        self._grace = grace
        self.drops = drops
        self._peers: dict[bytes, dict[Peer, None]] = {}  # subscribers by the exact bytes of their subscription
        self._lengths: Counter[int] = Counter()  # how many of these subscriptions have each length
        self._count = 0  # of the subscriptions of all peers
        self._unread_peers: dict[Peer, None] = {}  # peers that may have unread responses
        self._kept: dict[bytes, list[KeptMessage]] = defaultdict(list)
        self._kept_sizes: Counter[bytes] = Counter()  # bytes by topic
        self._kept_bytes = 0
        self._without_subscriber: dict[bytes, float] = {}  # topics without a subscriber, and since when
        self._reserved: Counter[bytes] = Counter()  # bytes of responses that are being computed, by topic
        # The sizes of responses that wait in `room`, by topic.
        self._waiting: dict[bytes, deque[tuple[int, asyncio.Future[None]]]] = {}

    # Subscriptions.

    def subscribe(self, peer: Peer, event: Subscribed) -> None:
        """Add or remove a subscription of `peer`. Raises TooLarge if the peer, or all peers, would have too many."""
        if not event.wanted:
            self._remove(peer, event.topic)
        elif event.topic not in peer.topics:
            if len(peer.topics) >= MAX_TOPICS or (peer.topics and self._count >= MAX_ALL_TOPICS):
                raise TooLarge(f"subscriptions: more than {MAX_TOPICS}, or {MAX_ALL_TOPICS} of all clients")
            peer.topics.add(event.topic)
            self._count += 1
            if event.topic not in self._peers:
                self._peers[event.topic] = {}
                self._lengths[len(event.topic)] += 1
            self._peers[event.topic][peer] = None
            self._send_kept(event.topic)  # responses of longer topics are sent by the next sweep

    def forget(self, peer: Peer) -> None:
        """Forget `peer`, whose connection has ended."""
        self._unread_peers.pop(peer, None)
        self.account.give(peer.charged)
        peer.charged = 0
        for topic in list(peer.topics):
            self._remove(peer, topic)

    def _remove(self, peer: Peer, topic: bytes) -> None:
        if topic not in peer.topics:
            return
        peer.topics.discard(topic)
        self._count -= 1
        self._peers[topic].pop(peer, None)
        if not self._peers[topic]:
            del self._peers[topic]
            self._lengths[len(topic)] -= 1
            if not self._lengths[len(topic)]:
                del self._lengths[len(topic)]

    def has_subscriber(self, topic: bytes) -> bool:
        """Return whether a peer has subscribed to `topic` or to a beginning of it."""
        return bool(self._subscribers(topic))

    def _subscribers(self, topic: bytes) -> dict[Peer, None]:
        found: dict[Peer, None] = {}
        for length in self._lengths:
            if length <= len(topic):
                found |= self._peers.get(topic[:length], {})
        return found

    # Room for responses.

    async def room(self, topic: bytes, size: int) -> None:
        """Wait until a response of `size` bytes may be computed for `topic`, and reserve room for it. Call `made` afterwards in any case.

        There is room when a subscriber may leave so much unread. A response that is larger than `max_unread` has room if there is no other.
        """
        if topic not in self._waiting and self._has_room(topic, size):
            self._reserve(topic, size)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(topic, deque()).append((size, future))
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # the room was reserved already
                self._reserve(topic, -size)
            self._wake_waiting(topic)
            raise

    def made(self, topic: bytes, size: int) -> None:
        """Release the room of a response that was published or failed."""
        self._reserve(topic, -size)
        self._wake_waiting(topic)

    def _reserve(self, topic: bytes, size: int) -> None:
        self._reserved[topic] += size  # the account is charged by the request itself

    def on_caught_up(self, peer: Peer) -> None:
        """Note that `peer` has read all that it was sent: wake those that wait for room on its topics."""
        for topic in peer.topics:
            if topic in self._waiting:
                self._wake_waiting(topic)

    def _has_room(self, topic: bytes, size: int) -> bool:
        taken = self._reserved[topic] + min((peer.unread for peer in self._subscribers(topic)), default=0)
        return not taken or (taken + size <= self._max_unread and not self.account.over)

    def _wake_waiting(self, topic: bytes) -> None:
        """Reserve room for callers of `room` on this topic, in order, as far as there is any."""
        waiting = self._waiting.get(topic, deque())
        while waiting:
            size, future = waiting[0]
            if not future.done():
                if not self._has_room(topic, size):
                    return
                self._reserve(topic, size)
                future.set_result(None)
            waiting.popleft()
        self._waiting.pop(topic, None)
        if not self._reserved[topic]:
            del self._reserved[topic]

    # Responses.

    def publish(self, frames: Frames) -> None:
        """Send a message to the subscribers of its first frame. Keep it if no peer has subscribed to exactly that topic."""
        topic = bytes(frames[0])
        subscribers = self._subscribers(topic)
        for peer in subscribers:
            self._write(peer, frames)
        # A client subscribes to exactly its topic: if no peer has, the client has not got the response.
        if topic not in self._peers:
            self._keep(topic, KeptMessage(frames, delivered=bool(subscribers)))

    def _write(self, peer: Peer, frames: Frames) -> None:
        unread = peer.unread
        if unread > self._max_unread or self._exceeds_share(unread):
            self.drops("answer", f"{unread} bytes of answers are unread (zmq_max_unread)", peer.address)
            return
        peer.write(pack(frames))
        if peer.unread:
            self._unread_peers[peer] = None
            self._charge(peer)

    def _exceeds_share(self, unread: int) -> bool:
        """Return whether all peers together leave too much unread, and a peer with `unread` bytes at least an equal part of it."""
        most = _UNREAD_FACTOR * self._max_unread
        return unread * len(self._unread_peers) >= most and self.unread > most

    def _charge(self, peer: Peer) -> None:
        """Charge the account for what `peer` leaves unread now."""
        self.account.add(peer.unread - peer.charged)
        peer.charged = peer.unread

    def _keep(self, topic: bytes, kept: "KeptMessage") -> None:
        size = size_of(kept.frames) + OVERHEAD
        if self._kept_bytes + size > self._max_unread or self.account.over:
            if not kept.delivered:
                self.drops("answer", "no client has subscribed, and no more answers can be kept (zmq_max_unread)")
            return
        self._kept[topic].append(kept)
        self._kept_sizes[topic] += size
        self._kept_bytes += size
        self.account.add(size)

    def _send_kept(self, topic: bytes) -> None:
        """Send the responses kept for `topic` to the peers that have subscribed to it; also to other subscribers that have not got them."""
        for kept in self._take(topic):
            for peer in self._peers[topic] if kept.delivered else self._subscribers(topic):
                self._write(peer, kept.frames)

    def _send_undelivered(self, topic: bytes, subscribers: Iterable[Peer]) -> None:
        """Send the responses kept for `topic` once to peers that have subscribed to a beginning of it. They stay kept for their client."""
        for kept in self._kept.get(topic, ()):
            if not kept.delivered:
                kept.delivered = True
                for peer in subscribers:
                    self._write(peer, kept.frames)

    def _take(self, topic: bytes) -> "list[KeptMessage]":
        size = self._kept_sizes.pop(topic, 0)
        self._kept_bytes -= size
        self.account.give(size)
        return self._kept.pop(topic, [])

    def drop_kept(self) -> None:
        """Drop the responses that are kept: nobody can subscribe any more."""
        for topic in list(self._kept):
            self._take(topic)

    @property
    def unread(self) -> int:
        """How many bytes of responses have been written to peers and not yet sent."""
        self._recharge()
        return sum(peer.charged for peer in self._unread_peers)

    def _recharge(self) -> None:
        """Charge the account for what all peers leave unread now."""
        for peer in self._unread_peers:
            self._charge(peer)
        self._unread_peers = {peer: None for peer in self._unread_peers if peer.charged}

    @property
    def waiting(self) -> bool:
        """Whether there are responses that no peer has got, or that are not fully sent."""
        return any(not kept.delivered for each in self._kept.values() for kept in each) or self.unread > 0

    # Time.

    def sweep(self, topics: Iterable[bytes], now: float) -> Iterator[list[bytes]]:
        """Deliver or drop kept responses, and yield lists of topics without a subscriber for the grace, a few topics at a time.

        `topics` are the topics of requests under way, `now` is in seconds of time.monotonic. There may be tens of thousands of topics, so the
        caller is to let other work run between two lists.
        """
        swept = dict.fromkeys(chain(topics, self._kept, self._waiting))
        left = iter(swept)
        while some := list(islice(left, _SWEPT_AT_ONCE)):
            yield self._sweep_some(some, now)
        self._recharge()
        self._without_subscriber = {topic: since for topic, since in self._without_subscriber.items() if topic in swept}

    def _sweep_some(self, topics: Iterable[bytes], now: float) -> list[bytes]:
        abandoned, dropped = [], 0
        for topic in topics:
            self._wake_waiting(topic)
            subscribers = self._subscribers(topic)
            if topic in self._peers:
                self._send_kept(topic)
            elif subscribers:
                self._send_undelivered(topic, subscribers)
            if subscribers and topic not in self._kept:
                self._without_subscriber.pop(topic, None)
            elif now >= self._without_subscriber.setdefault(topic, now) + self._grace:
                if not subscribers:
                    abandoned.append(topic)
                dropped += sum(not kept.delivered for kept in self._take(topic))
        if dropped:
            self.drops("answer", f"no client has subscribed for {self._grace:g} s", times=dropped)
        return abandoned


@dataclass(slots=True)
class KeptMessage:
    """A message that no peer with a subscription to exactly its topic has got. `delivered`: peers with a shorter subscription have got it."""

    frames: Frames
    delivered: bool


def size_of(frames: Frames) -> int:
    """Return the size of `frames` in bytes."""
    return sum(map(len, frames))


FRONTEND = "zeromq"
# Requests that are cancelled, or tried again, in one turn of the event loop, which takes a few milliseconds.
CANCELLED_PER_TURN = 16
CONFIG_DELAY = 0.1  # seconds before the response to SHOW_CONFIG: a stock client asks for it before it has subscribed
_FLOAT_BYTES = 4
_SWEEP_INTERVAL = 0.5  # seconds
_LATE = 2.0  # seconds after the last sweep
_DRAIN_INTERVAL = 0.02  # seconds between two checks whether all responses have been sent
_MAX_SUBSCRIPTION = 1024  # bytes of a message at the PUB port
# Bytes that a request under way counts in addition to its payload: its task and what that refers to. More than so many would also make each pass of the
# garbage collector long: 52,000 of them take half a second.
REQUEST_BYTES = 16 << 10
RETRYING = 256  # requests that a full queue refused and that try again; the others wait until one of them has ended
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0  # seconds before a request that a full queue refused is tried again


class Paced:
    """Does work in turns of the event loop, CANCELLED_PER_TURN pieces in each."""

    def __init__(self) -> None:
        self._left: deque[Callable[[], object]] = deque()
        self._runs = False

    def soon(self, work: Callable[[], object]) -> None:
        """Do `work` in its turn."""
        self._left.append(work)
        if not self._runs:
            self._runs = True
            asyncio.get_running_loop().call_soon(self._do_some)

    async def turn(self) -> None:
        """Wait until it is the caller's turn."""
        come = asyncio.Event()
        self.soon(come.set)
        await come.wait()

    def clear(self) -> None:
        """Forget what is left."""
        self._left.clear()

    def _do_some(self) -> None:
        for _ in range(min(CANCELLED_PER_TURN, len(self._left))):
            self._left.popleft()()
        self._runs = bool(self._left)
        if self._runs:
            asyncio.get_running_loop().call_soon(self._do_some)


@dataclass(eq=False)
class RequestHandler:
    """Answers requests with the first model of `context`, over `publisher`.

    `control` decides whether a peer may end the server, which `terminate` does, and `status` answers the commands. `changed` is called whenever a request has
    ended. `in_flight` is the size, in bytes, of the requests under way. While `draining`, requests for vectors are refused.
    """

    context: EmbeddingContext
    settings: ZeroMqSettings
    publisher: Publisher
    status: Status
    control: Control
    terminate: Callable[[], None]
    changed: Callable[[], None]
    in_flight: int = 0
    draining: bool = False

    def __post_init__(self) -> None:
        self._drops, self._account = self.publisher.drops, self.publisher.account
        self.encoder = self.context.encoder()  # requests do not name a model, so the first one responds
        self._calls: dict[bytes, dict[ZeroMqCall, None]] = {}  # by topic
        self._cancels, self._retries = Paced(), Paced()
        self._delayed = set[asyncio.TimerHandle]()  # answers to SHOW_CONFIG
        self._is_beyond = False
        self._retrying = asyncio.Semaphore(RETRYING)

    def received(self, message: Received, peer: str) -> None:
        """Handle a message from the address `peer`. A message that is not a request is dropped; any other gets a response."""
        try:
            request = frames.read_request(message.frames)
        except InvalidRequest as error:
            self._drops("message", error, peer)
            return
        try:
            if message.size:
                raise TooLarge(f"a request of {message.size} bytes (zmq_max_message_size)")
            if request.command:
                self._command(request, peer)
            elif self.draining:
                raise draining()
            else:
                self._start(request)
        except WeirError as error:
            self.fail(request, error, peer)

    # Vectors.

    def _start(self, request: ZeroMqRequest) -> None:
        call = ZeroMqCall(self, request)
        call.exchange.received(request.size)
        size = len(request.payload) + REQUEST_BYTES
        self.in_flight += size
        self._account.add(size)
        self._calls.setdefault(request.identity, {})[call] = None
        call.run(self._respond(call, request), call.ended)

    def ended(self, call: "ZeroMqCall") -> None:
        """Forget `call`, which has ended. Idempotent."""
        calls = self._calls.get(call.request.identity, {})
        if call not in calls:
            return
        size = call.received_bytes + REQUEST_BYTES
        self.in_flight -= size
        self._account.give(size)
        del calls[call]
        if not calls:
            del self._calls[call.request.identity]
        self.changed()

    async def _respond(self, call: "ZeroMqCall", request: ZeroMqRequest) -> int:
        """Publish the response. Return its size in bytes."""
        publisher, topic = self.publisher, request.identity
        size = _FLOAT_BYTES * request.size * self.encoder.dimensions
        self._check_response(request.size, size)
        await publisher.room(topic, size + OVERHEAD)
        try:
            encoded = await self._encode(call.exchange, request)
            self._check_response(request.size, encoded.vectors.nbytes)
            if encoded.foreign:
                call.exchange.warn_of_ids(encoded.foreign)
            call.made = len(encoded.counts), sum(encoded.truncated)
            message = frames.write_vectors(request, encoded.vectors, encoded.tokens)
            publisher.publish(message)
            return size_of(message)
        finally:
            publisher.made(topic, size + OVERHEAD)

    async def _encode(self, exchange: TextExchange, request: ZeroMqRequest) -> Encoded:
        """Return the vectors. If the queue is full or the texts have no room in memory, try again until there is room: stock clients neither send a request
        again nor state a deadline. What waits is only the message, which is charged."""
        try:
            return await self._encode_once(exchange, request)
        except CapacityError as error:
            wait = self._wait_after(error)
        if self._retrying.locked():
            wait = 0.0  # the others' retries show whether there is room
        async with self._retrying:
            while True:
                await asyncio.sleep(wait)
                await self._retries.turn()
                try:
                    with self._beyond():
                        return await self._encode_once(exchange, request)
                except CapacityError as error:
                    wait = max(self._wait_after(error), min(2.0 * wait, _LONGEST_WAIT))

    @contextmanager
    def _beyond(self) -> Iterator[None]:
        """Let one request at a time exceed the account: messages that wait may fill it, and would wait for each other for ever."""
        claim = CLAIM.get()
        if claim is None or self._is_beyond:
            yield
            return
        self._is_beyond = claim.beyond = True
        try:
            yield
        finally:
            self._is_beyond = claim.beyond = False

    async def _encode_once(self, exchange: TextExchange, request: ZeroMqRequest) -> Encoded:
        texts = await off_loop(len(request.payload), partial(_read_texts, request))
        options = TextOptions(whole_words=True, want_tokens=self.settings.zmq_show_tokens)
        return await self.encoder.encode(texts, exchange.query(options, exchange.timeout))

    def _wait_after(self, error: CapacityError) -> float:
        """Return after how many seconds a request that was refused may be tried again. Raises `error` if the server ends, or the model has raised it."""
        if isinstance(error, Draining) or self.draining or error.ran:
            try:
                raise error
            finally:
                del error  # a local of its own traceback
        return max(_FIRST_WAIT, error.retry_after or 0.0)

    def _check_response(self, texts: int, size: int) -> None:
        most = self.settings.zmq_max_response_size
        if size > most:
            limit = f"a response may have {most} (zmq_max_response_size)"
            raise TooLarge(f"texts: {texts}; their vectors have {size} bytes, {limit}")

    def fail(self, request: ZeroMqRequest, error: WeirError, peer: str = "") -> None:
        """Publish the error of a request."""
        refusal = frames.refusal_of(error, http_code(error))
        self._drops("request", f"{refusal.type}: {refusal.message}", peer, _client_name(request))
        self.publisher.publish(frames.write_refusal(request, refusal))

    # Commands.

    def _command(self, request: ZeroMqRequest, peer: str) -> None:
        self.context.clients.received_command(_client_name(request), frontend=FRONTEND)
        if request.command == frames.TERMINATION:
            self._end_server(request, peer)
            return
        status, is_config = self.status, request.command == frames.SHOW_CONFIG
        facts = (status.config if is_config else status.server_status)(_client_name(request))
        facts["show_tokens_to_client"] = self.settings.zmq_show_tokens
        message = frames.write_facts(request, facts)
        if not is_config or self.draining:
            self.publisher.publish(message)
            return

        def publish() -> None:
            self._delayed.discard(timer)
            self.publisher.publish(message)

        timer = asyncio.get_running_loop().call_later(CONFIG_DELAY, publish)
        self._delayed.add(timer)

    def _end_server(self, request: ZeroMqRequest, peer: str) -> None:
        """Make the server drain and end, if the peer may do so. Only a subscriber gets a response: bert-serving-terminate does not subscribe."""
        publisher = self.publisher
        try:
            self.control.require(peer, None)
        except (Unauthorized, Forbidden) as error:
            _logger().warning("refused to end", frontend=FRONTEND, peer=peer, reason=error.message)
            if publisher.has_subscriber(request.identity):
                publisher.publish(frames.write_refusal(request, frames.refusal_of(error, http_code(error))))
            return
        _logger().info("ending on request", frontend=FRONTEND, peer=peer)
        if publisher.has_subscriber(request.identity):
            publisher.publish(frames.write_facts(request, {}))
        self.terminate()

    # Ends.

    @property
    def topics(self) -> list[bytes]:
        """The topics that have requests under way."""
        return list(self._calls)

    @property
    def busy(self) -> bool:
        """Whether there are requests under way, or answers to commands."""
        return bool(self._calls or self._delayed)

    def cancel(self, topic: bytes) -> None:
        """Cancel all requests of `topic`, a few in each turn of the event loop."""
        for call in self._calls.get(topic, ()):
            self._cancels.soon(call.leave)

    def stop(self) -> None:
        """Cancel all requests, and answers to commands."""
        self._cancels.clear()
        while self._delayed:
            self._delayed.pop().cancel()
        for call in [call for calls in self._calls.values() for call in calls]:
            call.leave()


class ZeroMqCall(TextCall[Any, Any]):
    """One request for vectors, see TextCall."""

    def __init__(self, handler: RequestHandler, request: ZeroMqRequest) -> None:
        name, client = handler.encoder.name, _client_name(request)
        exchange = TextExchange(handler.context, FRONTEND, name, client=client, timeout=LONGEST_TIMEOUT)
        super().__init__(exchange, handler.publisher.account, len(request.payload))
        self._handler = handler
        self.request = request

    def report(self, error: Exception) -> None:
        """Log an exception that is not Weir's: a bug in the server."""
        if not isinstance(error, WeirError):
            facts = {"frontend": FRONTEND, "client": self.exchange.client}
            logging.getLogger("weir").error("request failed", exc_info=error, extra=facts)

    def fail(self, error: Exception) -> None:
        """Publish the error: the client needs a response in any case."""
        known = error if isinstance(error, WeirError) else ModelError(f"{type(error).__name__} in the server")
        self.exchange.refused(http_code(known))
        self._handler.fail(self.request, known)

    def release(self) -> None:
        """Have the handler forget the request."""
        super().release()
        self._handler.ended(self)


def _read_texts(request: ZeroMqRequest) -> list[Text]:
    charge_values(len(request.payload), partial(values_bytes, request.payload, JSON))
    return frames.read_texts(request)


def _client_name(request: ZeroMqRequest) -> str:
    return request.identity.decode("utf-8", "backslashreplace")


def _logger() -> BoundLogger:
    return get_logger("weir")


class ZeroMqFrontend:
    """Answers requests over ZeroMQ with the first model of `context`.

    Args:
        context: the models, and what all frontends for texts share.
        settings: ports and limits.
        control: decides whether a peer may end the server.
        status: answers the commands SHOW_CONFIG and SHOW_STATUS.
        terminate: called to end the server.
        account: charged for the memory that clients take; other frontends may share it. It also has the limit of connections.
        clock: returns seconds.
    """

    def __init__(
        self,
        context: EmbeddingContext,
        settings: ZeroMqSettings,
        *,
        control: Control,
        status: Status,
        terminate: Callable[[], None],
        account: Account,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._swept, self._still = clock(), 0.0  # the last sweep, and for how many seconds this process has stood still
        http = context.http
        self._host = http.host
        self.drops = Drops(_logger(), context.counts.dropped, clock)
        self.clients = context.clients
        self._account = account
        self._publisher = Publisher(settings.zmq_max_unread, settings.zmq_grace, self.drops, account)
        self._handler = RequestHandler(context, settings, self._publisher, status, control, terminate, self._changed)
        largest, most, held = settings.zmq_max_message_size, http.max_connections, settings.zmq_max_in_flight
        sizes = min(largest, account.max_bytes), MAX_FRAMES, most, held
        limits = Limits(*sizes, http.header_timeout, http.body_timeout)
        self._in = Port("PULL", limits, self.drops, account, self._received, clock=self._awake)
        out = limits._replace(max_message=_MAX_SUBSCRIPTION, max_frames=1)
        of_peers = self._publisher.forget, self._publisher.on_caught_up
        self._out = Port("PUB", out, self.drops, account, self._subscribed, *of_peers, clock=self._awake)
        self._sweeping: asyncio.Handle | None = None
        self._ended = asyncio.Event()

    @property
    def address(self) -> str:
        """The URL of the port for requests."""
        return f"tcp://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    @property
    def port(self) -> int:
        """The port for requests; 0 if it is not open."""
        return self._in.number

    @property
    def port_out(self) -> int:
        """The port that publishes responses; 0 if it is not open."""
        return self._out.number

    async def start(self) -> None:
        """Listen at both ports. Raises SettingsError if one is taken or unusable; then neither is open."""
        out = self._settings.zmq_port_out
        await self._in.start(self._host, self._settings.zmq_port or 0, "zmq_port")
        try:
            await self._out.start(self._host, self._next_port() if out is None else out, "zmq_port_out")
        except SettingsError:
            await self._in.stop()
            raise
        self._sweep()

    def _next_port(self) -> int:
        """Return the port after that for requests, which is the default of clients; 0, any free port, if there is none or the first was free."""
        return self.port + 1 if self._settings.zmq_port and self.port < 65535 else 0

    def _received(self, peer: Peer, event: Event) -> None:
        if isinstance(event, Received):
            self._handler.received(event, peer.address)
            if not self._in.paused and self._is_full:
                self._in.pause()

    @property
    def _is_full(self) -> bool:
        """Whether no more requests may be read: those under way reach their limit, or the account is over its limit."""
        in_flight = self._handler.in_flight
        return in_flight > self._settings.zmq_max_in_flight or (in_flight > 0 and self._account.over)

    def _subscribed(self, peer: Peer, event: Event) -> None:
        if isinstance(event, Subscribed):
            self._publisher.subscribe(peer, event)

    def _changed(self) -> None:
        self._ended.set()
        if self._in.paused and not self._is_full:
            self._in.resume()

    def _awake(self) -> float:
        """Return the time by which peers are too slow: that in which this process was stopped, paused with its machine or starved does not count."""
        return self._clock() - self._still

    def _sweep(self) -> None:
        passed, self._swept = self._clock() - self._swept, self._clock()
        if passed > _LATE:
            self._still += passed - _SWEEP_INTERVAL
        now = self._awake()
        for port in (self._in, self._out):
            port.sweep(now)
        self._changed()
        self._sweep_topics(self._publisher.sweep(self._handler.topics, now))

    def _sweep_topics(self, turns: Iterator[list[bytes]]) -> None:
        """Sweep some topics, and the others in further turns of the event loop."""
        abandoned = next(turns, None)
        loop = asyncio.get_running_loop()
        if abandoned is None:
            self._sweeping = loop.call_later(_SWEEP_INTERVAL, self._sweep)
            return
        for topic in abandoned:
            self._handler.cancel(topic)
        self._sweeping = loop.call_soon(self._sweep_topics, turns)

    def refuse(self) -> None:
        """Refuse requests for vectors from now on."""
        self._handler.draining = True

    async def drain(self, drain_timeout: float | None = None) -> bool:
        """Accept no more requests, and wait until all responses have been sent.

        Return False if that is not so after `drain_timeout` seconds (None: wait without limit).
        """
        self.refuse()
        self._in.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_timeout):
                while self._handler.busy or self._publisher.waiting:
                    await self._something_ended()
                return True
        return False

    async def _something_ended(self) -> None:
        self._ended.clear()
        with contextlib.suppress(TimeoutError):  # there is no event when the last byte of a response has been sent
            async with asyncio.timeout(_DRAIN_INTERVAL):
                await self._ended.wait()

    async def stop(self) -> None:
        """Cancel all requests and close both ports. Idempotent."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        self.refuse()
        self._handler.stop()
        while self._handler.busy:
            await self._something_ended()
        await asyncio.gather(self._in.stop(), self._out.stop())
        self._publisher.drop_kept()
