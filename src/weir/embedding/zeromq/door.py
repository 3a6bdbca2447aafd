"""The door of bert-as-service: two ports, one that takes requests (PULL) and one that publishes the answers (PUB).

It speaks ZMTP itself (wire/zmtp.py) instead of through libzmq, which cannot bound what a stranger takes: a message without end
grows in its memory for as long as it comes, and so do subscriptions.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping

from weir.embedding.metrics import TextClients, TextCounts
from weir.embedding.status import Status
from weir.embedding.texts import Encodes
from weir.embedding.zeromq.answering import Answering, Means
from weir.embedding.zeromq.drops import Drops
from weir.embedding.zeromq.port import Limits, Peer, Port
from weir.embedding.zeromq.publisher import Publisher
from weir.embedding.zeromq.settings import ZeroMqSettings
from weir.errors import SettingsError
from weir.protocols.account import Account
from weir.protocols.control import Control
from weir.protocols.settings import HttpSettings
from weir.telemetry.logs import get_logger
from weir.wire.zeromq import MAX_FRAMES
from weir.wire.zmtp import Event, Received, Subscribed

MAX_TEXTS = 100_000  # of one request
_SWEEP_INTERVAL = 0.5  # seconds
_LOOK_INTERVAL = 0.02  # seconds between two looks at whether all answers have left, at the end
_MAX_SUBSCRIPTION = 1024  # bytes


def end_process() -> None:
    """Have this process end as a process manager would: by SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


class ZeroMqDoor:
    """Serves `served`, models by name of which the first is the default, over ZeroMQ.

    One request in Weir's dialect may have `max_texts`. `terminate` is called when somebody who may (`control`) asks the server to end. `clients` counts who asks and `counts` what for, `status` answers for the server; all may be shared with other doors, and so may the `account` of what clients hold.
    """

    def __init__(
        self, served: Mapping[str, Encodes], settings: ZeroMqSettings, http: HttpSettings, *, control: Control | None = None,
        clients: TextClients | None = None, status: Status | None = None, terminate: Callable[[], None] = end_process,
        counts: TextCounts | None = None, max_texts: int = MAX_TEXTS, account: Account | None = None,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._host = http.host
        logger = get_logger("weir")
        counts = counts or TextCounts()
        self.drops = Drops(logger, counts.dropped)
        self.clients = clients or TextClients()
        self._account = account = account or Account(http)
        self._publisher = Publisher(settings.zmq_max_unread, settings.zmq_grace, self.drops, account)
        self._answering = Answering(
            Means(
                served, self._publisher, self.clients, counts, status or Status(served, self.clients), control or Control(), terminate,
                self.drops, logger, max_texts, settings.zmq_max_answer_size, settings.zmq_show_tokens, account,
            ),
            self._changed,
        )  # fmt: skip
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
        """Refuse requests from now on; Weir's own clients are told so."""
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
