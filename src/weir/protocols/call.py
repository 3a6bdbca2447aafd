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
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple, TypeVar

from weir.errors import ModelNotReady, WeirError
from weir.protocols.account import CLAIM, Account, Claim
from weir.protocols.entries import QueueEntry
from weir.protocols.exchange import Exchange, QueuedRequest, StreamPart, begin_task, inference_of
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
        self._stop: Callable[[], object] | None = (
            None  # what is under way; returns False if its end will still be reported
        )

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
        self._own_claim().take(size_bytes)

    # From one state to the next. Only `submit`, `infer` and `stream`, which are steps for `attempt`, raise errors.

    def attempt(self, step: Callable[[], None], *, loads: bool = True) -> None:
        """Do `step`; its error ends the request. If it needs a model on demand that has not been read yet, that is read, and the step is done again."""
        try:
            step()
        except ModelNotReady as error:
            if error.read is None or not loads:
                self.end(error)
            else:
                self._stop = begin_task(error.read(), partial(self._has_loaded, step))
        except Exception as error:
            self.end(error)

    def read(self, size_bytes: int, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do the step `then` with what `work` returns, which reads about `size_bytes` bytes: in a thread if they are many."""
        if size_bytes <= LONG_BODY:
            self.attempt(lambda: then(work()))
        else:
            self._stop = work_later(size_bytes, work, partial(self._has_read, then), account=self.account)

    def submit(self, exchange: Exchange, entry: QueueEntry, write: Callable[[QueuedRequest], Any]) -> None:
        """Put the only `entry` of the request into the queue. `write` makes the message of its end, or the Writing of one."""
        self.exchange = exchange
        request = exchange.submit(entry, partial(self._has_ended, write))
        self._await(partial(exchange.cancel, request))

    def infer(self, exchange: Exchange, request: InferenceRequest, write: Callable[[InferenceResponse], Any]) -> None:
        """Have the model compute `request`. `write` makes the message of the response, or the Writing of one."""
        self.exchange = exchange
        service = exchange.service
        if service.tracing is None and service.inference is None:
            return self._enter(exchange, request, write)
        # What is traced, or takes a task, has a context of its own: the current one is that of the connection.
        context = copy_context()
        context.run(CLAIM.set, self._own_claim())
        context.run(self._enter, exchange, request, write)

    def stream(self, exchange: Exchange, request: InferenceRequest, *, ends: bool = True) -> None:
        """Have the model compute `request`, and send its responses as they come; with `ends` an empty one follows unless the model has marked the last."""
        self.exchange = exchange
        context = copy_context()
        context.run(CLAIM.set, self._own_claim())
        self._stop = context.run(begin_task, self._send_parts(exchange, request, ends), self._has_streamed)

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

    # The end of a state.

    def _has_loaded(self, step: Callable[[], None], found: object) -> None:
        if self._goes_on(found):
            self.attempt(step, loads=False)

    def _has_read(self, then: Callable[[Any], None], found: Any) -> None:
        if self._goes_on(found):
            self.attempt(partial(then, found))

    def _has_ended(self, write: Callable[[QueuedRequest], Any], request: QueuedRequest) -> None:
        if self._goes_on(request.error):
            self._respond(write, request)

    def _has_inferred(self, write: Callable[[InferenceResponse], Any], found: InferenceResponse | Exception) -> None:
        if self._goes_on(found):
            self._respond(write, found)

    def _has_written(self, found: Any) -> None:
        if self._goes_on(found):
            self._send(found)

    def _has_streamed(self, found: Any) -> None:
        if self._goes_on(found):
            self._close()
            self.release()
            self._count(found)

    def _goes_on(self, found: object) -> bool:
        """Return whether the next state follows: the caller is still there, and `found` is no error."""
        if self.over:
            self.release()
            return False
        self._stop = None
        if isinstance(found, Exception):
            self.end(found)
            return False
        return True

    # What happens in a state.

    def _enter(self, exchange: Exchange, request: InferenceRequest, write: Callable[[InferenceResponse], Any]) -> None:
        exchange.begin_trace()
        with exchange:
            begin = inference_of(exchange.service).begin
            self._await(begin(exchange, request, partial(self._has_inferred, write)))

    def _await(self, stop: Callable[[], object]) -> None:
        """Be ready to `stop` what was begun, unless it has ended already."""
        if not self.over and self._stop is None:
            self._stop = stop

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
        try:
            message = write(found)
            if isinstance(message, Writing):
                if message.size_bytes > LONG_ANSWER:
                    self.charge(message.size_bytes)
                    self._stop = work_later(*message, self._has_written, account=self.account, writes=True)
                    return
                message = message.write()
        except Exception as error:
            self.end(error)
        else:
            self._send(message)

    def _send(self, message: Any) -> None:
        self._close()
        self.release()
        try:
            self.send(message)
        except Exception as error:
            self._fail(error)
        else:
            self._count(len(message))

    def _fail(self, error: Exception) -> None:
        if isinstance(error, WeirError) and self.exchange is not None:
            self.exchange.refused(error)
        self.fail(error)

    def _count(self, sent_bytes: int) -> None:
        if self.exchange is not None:
            self.exchange.transferred(self.received_bytes, sent_bytes)

    def _close(self) -> Callable[[], object] | None:
        """End. Return what stops what is under way."""
        self.over = True
        stop, self._stop = self._stop, None
        return stop

    def _own_claim(self) -> Claim:
        self._claim = self._claim or self.account.claim()
        return self._claim
