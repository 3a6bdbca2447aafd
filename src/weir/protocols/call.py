"""The life of one request, from its bytes to its response, for channels that give a request no task of its own.

| state   | what happens                                          | what stops it when the caller leaves     |
| ------- | ----------------------------------------------------- | ---------------------------------------- |
| reading | a thread reads a long body                            | the thread's job is dropped              |
| loading | the description of a model on demand is read          | the task that reads it is cancelled      |
| queued  | its entries wait in the queue, or in a batch          | they are cancelled                       |
| working | a task does what takes several steps, as for a stream | the task is cancelled                    |
| writing | a thread writes a long response                       | the thread's job is dropped              |
| over    | the channel has its response or its error, or nothing | -                                        |

`ChannelCall` has these states. A kind of request derives its class from it: InferenceCall is a request with tensors, TextCall (text_server/exchange.py) one for texts.
A channel derives its own class from one of these, which sends a response or an error, and calls `leave` when the caller has left. A request on HTTP's fast
path is a ChannelCall and the queue entry in one, with the constructors of both inlined: only its threads need the states.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from weir.errors import ModelNotReady, WeirError
from weir.protocols.account import CLAIM, Account, Claim
from weir.protocols.entries import QueueEntry
from weir.protocols.exchange import Ended, Exchange, QueuedRequest, Stop, StreamPart, begin_task, inference_of
from weir.protocols.offloading import LONG_BODY, LONG_RESPONSE, work_later, written
from weir.wire.inference import InferenceRequest, InferenceResponse

T = TypeVar("T")


class Writing(NamedTuple):
    """A response that is still to be written. Writing takes as long as writing `size_bytes` of text. `write` changes nothing, so it can run in a thread.
    `length` returns about how many bytes the message has, if they may be more."""

    size_bytes: int
    write: Callable[[], Any]
    length: Callable[[], int] | None = None


class ChannelCall:
    """One request, whose message had `received_bytes`; what it takes in addition is charged to `account` until its end.

    It ends once: by the channel's `send` or `fail`, by `ended` after the last part of a response, or by `leave`. `over` says whether it has ended.
    """

    if not TYPE_CHECKING:
        __slots__ = ()  # only so can a queue entry derive from it, too
    over = False
    _claim: Claim | None = None
    _stop: Stop | None = None  # what is under way

    def __init__(self, account: Account, received_bytes: int) -> None:
        self.account = account
        self.received_bytes = received_bytes

    # What a channel adds.

    def send(self, message: Any) -> int:
        """Send the response, and return its size in bytes. An exception of this is the end of the request instead."""
        raise NotImplementedError  # a channel implements it

    def fail(self, error: Exception) -> None:
        """Send the error that ends the request."""
        raise NotImplementedError  # a channel implements it

    def release(self) -> None:
        """Give back what the request holds: it has ended, and nothing is under way for it any more. Idempotent."""
        if self._claim is not None:
            self._claim.close()

    def charge(self, size_bytes: int) -> None:
        """Charge `size_bytes` until the request ends. Raises what Account.take raises."""
        self._claim = self._claim or self.account.claim()
        self._claim.take(size_bytes)

    # What a kind of request adds.

    def report(self, error: Exception) -> None:
        """Notify the observers of the error that ends the request, which is sent next."""

    def count(self, sent_bytes: int) -> None:
        """Count the response, which had `sent_bytes` bytes."""

    # From one state to the next. Only steps for `attempt` raise errors: the other methods end the request with them.

    def attempt(self, step: Callable[[], None], *, loads: bool = True) -> None:
        """Do `step`; its error ends the request. If it needs a model on demand that has not been read yet, that is read, and the step is done again."""
        try:
            step()
        except Exception as error:
            self._failed(error, step if loads else None)

    def read(self, size_bytes: int, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do the step `then` with what `work` returns, which reads about `size_bytes` bytes: in a thread if they are many."""
        if size_bytes <= LONG_BODY:
            self.attempt(lambda: then(work()))
        else:
            self._stop = work_later(size_bytes, work, self.after(then), account=self.account)

    def run(self, work: Awaitable[T], then: Callable[[T], None]) -> None:
        """Do `work` in a task, and then the step `then` with its result."""
        self._stop = self.own_context().run(begin_task, work, self.after(then))

    def after(self, step: Callable[[T], None]) -> Ended[T]:
        """Return what ends the present state: it does `step` with what the state has led to, unless that is an error, or the caller has left."""
        return partial(self._go_on, step)

    def stopped_by(self, stop: Stop) -> None:
        """Let `stop` stop what was begun, unless that has ended already."""
        if not self.over and self._stop is None:
            self._stop = stop

    def own_context(self) -> Context:
        """Return a context for what is traced, or has a task: the current one may be that of an earlier request of the connection."""
        context = Context()
        self._claim = self._claim or self.account.claim()
        context.run(CLAIM.set, self._claim)
        return context

    def respond(self, message: Any) -> None:
        """Send `message`; if it is a Writing, what that writes, in a thread if it is long. Raises what Account.take raises."""
        if not isinstance(message, Writing):
            self.deliver(message)
        elif message.size_bytes <= LONG_RESPONSE:
            self.deliver(message.write())
        else:
            size, write, length = message
            self.charge(size if length is None else max(size, length()))
            self._stop = work_later(size, write, self.after(self.deliver), account=self.account, writes=True)

    def deliver(self, message: Any) -> None:
        """End with the response."""
        self._close()
        self.release()
        try:
            sent_bytes = self.send(message)
        except Exception as error:
            self._fail(error)
        else:
            self.count(sent_bytes)

    def ended(self, sent_bytes: int) -> None:
        """End: all parts of the response have been sent, which had `sent_bytes` bytes together."""
        self._close()
        self.release()
        self.count(sent_bytes)

    def end(self, error: Exception) -> None:
        """End with `error`, and notify the observers of it. Nothing happens if the request has ended."""
        if not self.over:
            self._close()
            self.release()
            self._fail(error)

    def leave(self) -> None:
        """Stop what is under way, as the caller has left. Idempotent."""
        if not self.over:
            stop = self._close()
            if stop is None or stop() is not False:
                self.release()

    def _go_on(self, step: Callable[[Any], None], found: Any) -> None:
        if self.over:
            self.release()
            return
        self._stop = None
        if isinstance(found, Exception):
            return self.end(found)
        try:
            step(found)
        except Exception as error:
            self._failed(error, partial(step, found))

    def _failed(self, error: Exception, again: Callable[[], None] | None) -> None:
        """End with `error`, unless a model that has not been read yet is what lacks `again`: then read it first."""
        if again is not None and isinstance(error, ModelNotReady) and error.read is not None:
            self._stop = begin_task(error.read(), self.after(lambda _: self.attempt(again, loads=False)))
        else:
            self.end(error)

    def _fail(self, error: Exception) -> None:
        self.report(error)
        self.fail(error)

    def _close(self) -> Stop | None:
        """End. Return what stops what is under way."""
        self.over = True
        stop, self._stop = self._stop, None
        return stop


class InferenceCall(ChannelCall):
    """One request with tensors. `exchange` is None until its model is known. `submit`, `infer` and `stream` are steps for `attempt`."""

    exchange: Exchange | None = None

    async def send_part(self, message: Any) -> int:
        """Send one response of a stream. Return its size in bytes when the next one may be sent. A channel adds this."""
        raise NotImplementedError  # a channel implements it

    def submit(self, exchange: Exchange, entry: QueueEntry, write: Callable[[QueuedRequest], Any]) -> None:
        """Put the only `entry` of the request into the queue. `write` makes the message of its end, or the Writing of one."""
        self.exchange = exchange
        request = exchange.submit(entry, partial(self._ended, exchange, partial(self._respond, exchange, write)))
        self.stopped_by(partial(exchange.cancel, request))

    def infer(self, exchange: Exchange, request: InferenceRequest, write: Callable[[InferenceResponse], Any]) -> None:
        """Have the model compute `request`. `write` makes the message of the response, or the Writing of one."""
        self.exchange = exchange
        service, ended = exchange.service, self.after(partial(self._respond, exchange, write))
        if service.tracing is None and service.inference is None:
            self._enter(exchange, request, ended)
        else:
            self.own_context().run(self._enter, exchange, request, ended)

    def stream(
        self,
        exchange: Exchange,
        request: InferenceRequest,
        write: Callable[[StreamPart], Writing],
        *,
        ends: bool = True,
    ) -> None:
        """Have the model compute `request`, and send what `write` makes of its responses as they come. With `ends` an empty one follows, unless the model has
        marked the last."""
        self.exchange = exchange
        self.run(self._send_parts(exchange, request, write, ends), self.ended)

    def report(self, error: Exception) -> None:
        """See ChannelCall."""
        if isinstance(error, WeirError) and self.exchange is not None:
            self.exchange.refused(error)

    def count(self, sent_bytes: int) -> None:
        """See ChannelCall."""
        if self.exchange is not None:
            self.exchange.transferred(self.received_bytes, sent_bytes)

    def _ended(self, exchange: Exchange, respond: Callable[[QueuedRequest], None], request: QueuedRequest) -> None:
        exchange.ending = request
        self._go_on(respond, request.error or request)
        exchange.ending = None

    def _respond(self, exchange: Exchange, write: Callable[[T], Any], found: T) -> None:
        exchange.responded = True
        self.respond(write(found))

    def _enter(self, exchange: Exchange, request: InferenceRequest, ended: Ended[InferenceResponse]) -> None:
        exchange.begin_trace()
        with exchange:
            self.stopped_by(inference_of(exchange.service).begin(exchange, request, ended))

    async def _send_parts(
        self, exchange: Exchange, request: InferenceRequest, write: Callable[[StreamPart], Writing], ends: bool
    ) -> int:
        sent = 0
        async with aclosing(exchange.stream(request)) as parts:
            async for part in parts:
                ends = ends and not part.last
                writing = write(part)
                message = await written(writing.size_bytes, writing.write)
                del part  # frees its tensors while the client reads the message
                sent += await self.send_part(message)
        if ends:
            facts = exchange.service.facts
            end = InferenceResponse(facts.name, [], version=facts.version, id=request.id)
            writing = write(StreamPart(end, True))
            sent += await self.send_part(await written(writing.size_bytes, writing.write))
        return sent
