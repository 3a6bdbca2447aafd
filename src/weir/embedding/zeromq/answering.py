"""What comes of each request that is read: vectors, facts or an error, in the dialect it was asked in."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from structlog.stdlib import BoundLogger

from weir.embedding.encoder import LONGEST_TIMEOUT
from weir.embedding.metrics import TextClients, TextCounts
from weir.embedding.status import Status
from weir.embedding.texts import Encoded, Encodes, Text
from weir.embedding.zeromq.drops import Drops
from weir.embedding.zeromq.publisher import OVERHEAD, Publisher
from weir.errors import (
    CapacityError,
    Draining,
    Forbidden,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    TooLarge,
    Unauthorized,
    WeirError,
)
from weir.protocols.account import CLAIM, Account
from weir.protocols.control import Control
from weir.protocols.offloading import off_loop
from weir.protocols.status import http_code
from weir.wire import zeromq
from weir.wire.zeromq import Ask, Said, Wishes
from weir.wire.zmtp import Received

DOOR = "zeromq"
AT_ONCE = 16  # requests that are cancelled in one turn of the event loop, which takes a few milliseconds
CONFIG_DELAY = 0.1  # seconds in which a stock client that has just connected comes to listen
_NUMBER = 4  # bytes
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0  # seconds until a stock client's request is offered to a full line again


class Means(NamedTuple):
    """What answering needs. `terminate` has the server drain and end; `max_texts` are what one request in Weir's dialect may have, `max_answer`
    the bytes of the vectors of any. What requests hold is charged to `account`."""

    served: Mapping[str, Encodes]
    publisher: Publisher
    clients: TextClients
    counts: TextCounts
    status: Status
    control: Control
    terminate: Callable[[], None]
    drops: Drops
    logger: BoundLogger
    max_texts: int
    max_answer: int
    show_tokens: bool
    account: Account


class Answering:
    """Answers requests. `in_flight` are the bytes of those under way; `changed` is called when it has become less."""

    def __init__(self, means: Means, changed: Callable[[], None]) -> None:
        self._means = means
        self._changed = changed
        self._tasks: dict[bytes, set[asyncio.Task[None]]] = {}
        self._own: dict[tuple[bytes, bytes], asyncio.Task[None]] = {}
        self._to_cancel: deque[asyncio.Task[None]] = deque()
        self._leaving: set[bytes] = set()  # topics of which everything is among those already
        self.in_flight = 0
        self.draining = False

    def received(self, message: Received, peer: str) -> None:
        """Take what came from the address `peer`."""
        try:
            ask = zeromq.read_ask(message.frames)
        except InvalidRequest as error:
            self._means.drops("message", error, peer)
            return
        try:
            if message.size:
                raise TooLarge(f"a request of {message.size} bytes (zmq_max_message_size)")
            wishes = Wishes() if ask.wishes is None else zeromq.read_wishes(ask.wishes)
            if ask.command:
                self._command(ask, wishes, peer)
            elif self.draining:
                raise Draining("the server is about to stop")
            elif ask.wishes is None or (ask.topic, ask.id) not in self._own:  # sent again: its answer is on the way
                self._start(ask, wishes)
        except WeirError as error:
            self._fail(ask, error, peer)

    # Vectors.

    def _start(self, ask: Ask, wishes: Wishes) -> None:
        self._means.clients.asked(_name(ask), ask.size, door=DOOR)
        size = len(ask.payload) + OVERHEAD
        task = asyncio.get_running_loop().create_task(self._answer(ask, wishes))
        self.in_flight += size
        self._means.account.add(size)
        ended = ask._replace(payload=b"")  # what is to be known at the end does not keep the texts
        self._tasks.setdefault(ask.topic, set()).add(task)
        if ask.wishes is not None:
            self._own[ask.topic, ask.id] = task
        task.add_done_callback(lambda task: self._ended(ended, size, task))

    def _ended(self, ask: Ask, size: int, task: asyncio.Task[None]) -> None:
        self.in_flight -= size
        self._means.account.give(size)
        self._own.pop((ask.topic, ask.id), None)
        tasks = self._tasks[ask.topic]
        tasks.discard(task)
        if not tasks:
            del self._tasks[ask.topic]
        self._changed()

    async def _answer(self, ask: Ask, wishes: Wishes) -> None:
        with self._means.account.claim() as claim:
            CLAIM.set(claim)  # of this task: its vectors are charged
            await self._answer_counted(ask, wishes)

    async def _answer_counted(self, ask: Ask, wishes: Wishes) -> None:
        received, publisher, room = len(ask.payload), self._means.publisher, 0
        try:
            size = self._checked(ask, wishes)
            await publisher.room(ask.topic, size)
            room = size
            texts = await off_loop(received, partial(zeromq.read_texts, ask))
            ask = ask._replace(payload=b"")  # the texts are all that is kept of it
            encoded = await self._encode(ask, wishes, texts)
            self._check_answer(ask.size, encoded.vectors.nbytes)
            cut = [place for place, truncated in enumerate(encoded.truncated) if truncated]
            model = _model(self._means.served, wishes)
            self._means.clients.warn_of_ids(_name(ask), encoded.foreign, model)
            answer = zeromq.write_vectors(ask, encoded.vectors, cut, encoded.tokens, encoded.foreign)
            self._means.counts.answered(model, DOOR, ask.size, len(cut))
            self._means.counts.transferred(model, DOOR, received, sum(map(len, answer)))
            publisher.publish(answer)
        except WeirError as error:
            self._refuse(ask, wishes, error)
        except Exception as error:  # of ours, or of whoever encodes: nobody else would answer
            self._means.logger.exception("request failed", door=DOOR, client=_name(ask))
            self._refuse(ask, wishes, ModelError(f"{type(error).__name__} in the server"))
        finally:
            if room:
                publisher.made(ask.topic, room)

    def _checked(self, ask: Ask, wishes: Wishes) -> int:
        """Return how many bytes the answer to a request will have, about. Raises TooLarge, and ModelNotFound."""
        means = self._means
        # bert-as-service takes any number of texts, and its programs send a quarter of a million at once.
        if ask.wishes is not None and ask.size > means.max_texts:
            raise TooLarge(f"texts: {ask.size}; one request may have {means.max_texts}")
        name = _model(means.served, wishes)
        if not name:
            raise ModelNotFound(
                f"model {wishes.model!r}: there is none of that name; there are {', '.join(means.served)}"
            )
        size = _NUMBER * ask.size * means.served[name].dimensions
        self._check_answer(ask.size, size)
        return size + OVERHEAD

    async def _encode(self, ask: Ask, wishes: Wishes, texts: Sequence[Text]) -> Encoded:
        means, model = self._means, self._means.served[_model(self._means.served, wishes)]
        stock = ask.wishes is None
        wait = _FIRST_WAIT
        while True:
            try:
                # Nor has the stock dialect a timeout: with one of ours what takes longer would be begun anew, and never end.
                return await model.encode(
                    texts, door=DOOR, client=_name(ask), priority=wishes.priority or 0,
                    timeout=LONGEST_TIMEOUT if stock else wishes.timeout,
                    dimensions=wishes.dimensions, truncate=wishes.truncate,
                    want_tokens=means.show_tokens if stock else wishes.tokens,
                    prompt=wishes.prompt, whole_words=stock,
                )  # fmt: skip
            except CapacityError as error:
                # There is no word for "later" in the stock dialect: the client would have to ask again by itself.
                if not stock or isinstance(error, Draining) or self.draining:
                    raise
                again = error.retry_after or 0.0
            await asyncio.sleep(max(wait, again))
            wait = min(2.0 * wait, _LONGEST_WAIT)

    def _check_answer(self, texts: int, size: int) -> None:
        if size > self._means.max_answer:
            raise TooLarge(
                f"texts: {texts}; their vectors have {size} bytes, an answer may have {self._means.max_answer} (zmq_max_answer_size)"
            )

    def _refuse(self, ask: Ask, wishes: Wishes, error: WeirError) -> None:
        self._means.counts.refused(_model(self._means.served, wishes), DOOR, http_code(error))
        self._fail(ask, error)

    def _fail(self, ask: Ask, error: WeirError, peer: str = "") -> None:
        failed = zeromq.failed(error, http_code(error))
        if ask.wishes is None:
            self._means.drops("request", f"{failed.type}: {failed.message}", peer, _name(ask))
            self._means.publisher.publish(zeromq.write_refusal(ask, failed))
        else:
            self._means.publisher.publish(zeromq.write_said(ask, Said(error=failed)))

    # Commands.

    def _command(self, ask: Ask, wishes: Wishes, peer: str) -> None:
        if ask.command == zeromq.CANCEL:
            for number in wishes.ids:
                if task := self._own.get((ask.topic, b"%d" % number)):
                    self._cancel_soon(task)
        elif ask.command == zeromq.PENDING:
            kept = self._means.publisher.kept(ask.topic)
            unknown = [
                number for number in wishes.ids
                if (ask.topic, b"%d" % number) not in self._own and b"%d" % number not in kept
            ]  # fmt: skip
            self._means.publisher.publish(zeromq.write_said(ask, Said(unknown=unknown)))
        else:
            self._means.clients.asked_about(_name(ask), door=DOOR)
            if ask.command == zeromq.TERMINATION:
                self._terminate(ask, wishes, peer)
            else:
                self._tell(ask)

    def _tell(self, ask: Ask) -> None:
        status = self._means.status
        ask_for = status.config if ask.command == zeromq.SHOW_CONFIG else status.server_status
        facts = {**ask_for(_name(ask)), "show_tokens_to_client": self._means.show_tokens}
        answer = zeromq.write_facts(ask, facts)
        if ask.wishes is None and ask.command == zeromq.SHOW_CONFIG:
            asyncio.get_running_loop().call_later(CONFIG_DELAY, self._means.publisher.publish, answer)
        else:
            self._means.publisher.publish(answer)

    def _terminate(self, ask: Ask, wishes: Wishes, peer: str) -> None:
        try:
            self._means.control.require(peer, wishes.token)
        except (Unauthorized, Forbidden) as error:
            self._means.logger.warning("refused to end", door=DOOR, peer=peer, reason=error.message)
            if ask.wishes is not None:
                self._fail(ask, error)
            return
        self._means.logger.info("asked to end", door=DOOR, peer=peer)
        if ask.wishes is not None:
            self._means.publisher.publish(zeromq.write_facts(ask, {}))
        self._means.terminate()

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


def _model(served: Mapping[str, Encodes], wishes: Wishes) -> str:
    """Return the name of the model that is asked, "" if there is none of that name."""
    name = wishes.model or next(iter(served))
    return name if name in served else ""


def _name(ask: Ask) -> str:
    return ask.identity.decode("utf-8", "backslashreplace")
