"""The life of one request with tensors, from its bytes to its response, for channels that give a request no task of its own.

| state   | what happens                                          | what stops it when the caller leaves     |
| ------- | ----------------------------------------------------- | ---------------------------------------- |
| reading | a thread reads a long body                            | the thread's job is dropped              |
| loading | the description of a model on demand is read          | the task that reads it is cancelled      |
| queued  | its entries wait in the queue, or in a batch          | they are cancelled                       |
| writing | a thread writes a long response                       | the thread's job is dropped              |
| over    | the channel has its response or its error, or nothing | -                                        |

A channel derives its own class from InferenceCall, which sends a response or an error, and calls `leave` when the caller has left. HTTP's fast path alone
has these steps in its own request, which is the queue entry too.
"""

from collections.abc import Callable
from contextlib import aclosing
from contextvars import Context, copy_context
from functools import partial
from typing import Any, NamedTuple, TypeVar

from weir.errors import ModelNotReady, WeirError
from weir.protocols.account import CLAIM, Account, Claim
from weir.protocols.entries import QueueEntry
from weir.protocols.exchange import Ended, Exchange, QueuedRequest, Stop, StreamPart, begin_task, inference_of
from weir.protocols.offloading import LONG_ANSWER, LONG_BODY, work_later
from weir.wire.inference import InferenceRequest, InferenceResponse

T = TypeVar("T")


class Writing(NamedTuple):
    """A response that is still to be written. Writing takes as long as writing `size_bytes` of text. `write` changes nothing, so it can run in a thread."""

    size_bytes: int
    write: Callable[[], Any]


class InferenceCall:
    """One request, whose message had `received_bytes`; what it takes in addition is charged to `account` until its end.

    It ends once: by the channel's `send` or `fail`, by the last part of a stream, or by `leave`. `over` says whether it has ended; `exchange` is None until
    its model is known.
    """

    __slots__ = ("_claim", "_stop", "account", "exchange", "over", "received_bytes")

    def __init__(self, account: Account, received_bytes: int) -> None:
        self.account = account
        self.received_bytes = received_bytes
        self.exchange: Exchange | None = None
        self.over = False
        self._claim: Claim | None = None
        self._stop: Stop | None = None  # what is under way

    # What a channel adds.

    def send(self, message: Any) -> None:
        """Send the response. An exception of this is the end of the request instead."""
        raise NotImplementedError

    async def send_part(self, part: StreamPart) -> int:
        """Send one response of a stream. Return its size in bytes when the next one may be sent."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """Send the error that ends the request."""
        raise NotImplementedError

    def release(self) -> None:
        """Give back what the request holds: it has ended, and nothing is under way for it any more. Idempotent."""
        if self._claim is not None:
            self._claim.close()

    def charge(self, size_bytes: int) -> None:
        """Charge `size_bytes` until the request ends. Raises what Account.take raises."""
        self._claim = self._claim or self.account.claim()
        self._claim.take(size_bytes)

    # From one state to the next. `submit`, `infer` and `stream` are steps for `attempt`: only they raise errors.

    def attempt(self, step: Callable[[], None], *, loads: bool = True) -> None:
        """Do `step`; its error ends the request. If it needs a model on demand that has not been read yet, that is read, and the step is done again."""
        try:
            step()
        except ModelNotReady as error:
            if error.read is None or not loads:
                self.end(error)
            else:
                self._stop = begin_task(error.read(), partial(self._go_on, lambda _: self.attempt(step, loads=False)))
        except Exception as error:
            self.end(error)

    def read(self, size_bytes: int, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do the step `then` with what `work` returns, which reads about `size_bytes` bytes: in a thread if they are many."""
        if size_bytes <= LONG_BODY:
            self.attempt(lambda: then(work()))
        else:
            self._stop = work_later(size_bytes, work, partial(self._go_on, then), account=self.account)

    def submit(self, exchange: Exchange, entry: QueueEntry, write: Callable[[QueuedRequest], Any]) -> None:
        """Put the only `entry` of the request into the queue. `write` makes the message of its end, or the Writing of one."""
        self.exchange = exchange
        respond = partial(self._respond, write)
        request = exchange.submit(entry, lambda ended: self._go_on(respond, ended.error or ended))
        self._await(partial(exchange.cancel, request))

    def infer(self, exchange: Exchange, request: InferenceRequest, write: Callable[[InferenceResponse], Any]) -> None:
        """Have the model compute `request`. `write` makes the message of the response, or the Writing of one."""
        self.exchange = exchange
        ended = partial(self._go_on, partial(self._respond, write))
        service = exchange.service
        if service.tracing is None and service.inference is None:
            self._enter(exchange, request, ended)
        else:
            self._own_context().run(self._enter, exchange, request, ended)

    def stream(self, exchange: Exchange, request: InferenceRequest, *, ends: bool = True) -> None:
        """Have the model compute `request`, and send its responses as they come; with `ends` an empty one follows unless the model has marked the last."""
        self.exchange = exchange
        work, ended = self._send_parts(exchange, request, ends), partial(self._go_on, self._end_stream)
        self._stop = self._own_context().run(begin_task, work, ended)

    def leave(self) -> None:
        """Stop what is under way, as the caller has left. Idempotent."""
        if not self.over:
            stop = self._close()
            if stop is None or stop() is not False:
                self.release()

    def end(self, error: Exception) -> None:
        """End with `error`, and notify the observers of it. Nothing happens if the request has ended."""
        if not self.over:
            self._close()
            self.release()
            self._fail(error)

    def _go_on(self, step: Callable[[Any], None], found: Any) -> None:
        """A state has ended with `found`: do the next step with it, unless it is an error, or the caller has left."""
        if self.over:
            self.release()
            return
        self._stop = None
        if isinstance(found, Exception):
            self.end(found)
        else:
            self.attempt(partial(step, found))

    def _enter(self, exchange: Exchange, request: InferenceRequest, ended: Ended[InferenceResponse]) -> None:
        exchange.begin_trace()
        with exchange:
            self._await(inference_of(exchange.service).begin(exchange, request, ended))

    def _await(self, stop: Stop) -> None:
        """Be ready to `stop` what was begun, unless it has ended already."""
        if not self.over and self._stop is None:
            self._stop = stop

    def _own_context(self) -> Context:
        """Return a context for what is traced, or has a task: the current one is that of the connection."""
        context = copy_context()
        self._claim = self._claim or self.account.claim()
        context.run(CLAIM.set, self._claim)
        return context

    async def _send_parts(self, exchange: Exchange, request: InferenceRequest, ends: bool) -> int:
        sent = 0
        async with aclosing(exchange.stream(request)) as parts:
            async for part in parts:
                sent += await self.send_part(part)
                ends = ends and not part.last
                del part  # frees its tensors while the next one is awaited
        if ends:
            facts = exchange.service.facts
            end = InferenceResponse(facts.name, [], version=facts.version, id=request.id)
            sent += await self.send_part(StreamPart(end, True))
        return sent

    def _respond(self, write: Callable[[Any], Any], found: Any) -> None:
        message = write(found)
        if not isinstance(message, Writing):
            self._send(message)
        elif message.size_bytes <= LONG_ANSWER:
            self._send(message.write())
        else:
            self.charge(message.size_bytes)
            ended = partial(self._go_on, self._send)
            self._stop = work_later(*message, ended, account=self.account, writes=True)

    def _send(self, message: Any) -> None:
        self._close()
        self.release()
        try:
            self.send(message)
        except Exception as error:
            self._fail(error)
        else:
            self._count(len(message))

    def _end_stream(self, sent_bytes: int) -> None:
        self._close()
        self.release()
        self._count(sent_bytes)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, WeirError) and self.exchange is not None:
            self.exchange.refused(error)
        self.fail(error)

    def _count(self, sent_bytes: int) -> None:
        if self.exchange is not None:
            self.exchange.transferred(self.received_bytes, sent_bytes)

    def _close(self) -> Stop | None:
        """End. Return what stops what is under way."""
        self.over = True
        stop, self._stop = self._stop, None
        return stop
