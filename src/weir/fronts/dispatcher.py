"""The dispatcher's side of its fronts: a front as it is connected, and its requests in the queues.

Of texts that fronts have tokenized (TextHandle in remote.py), the model's own encoder gives each its turn among the texts of other callers.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import msgspec
import numpy

from weir.batching.request_state import NEW, RequestBase
from weir.errors import ModelError, Overloaded, WeirError
from weir.frontends.http.access_log import HttpLog
from weir.fronts.messages import (
    FULL_FRAME,
    AccessLine,
    Alive,
    CallerLeft,
    Drained,
    FailedRequest,
    FromFront,
    FrontListens,
    Link,
    ModelDescription,
    ModelTable,
    MustHandOver,
    Noted,
    Outputs,
    PlaceFree,
    ProductDrained,
    Refused,
    Reported,
    RequestForm,
    SentArray,
    SentPlace,
    SentText,
    Submit,
    Transferred,
    Violation,
    WantCopy,
    WantPlace,
    batch_key,
    batched,
    reader_of_front,
    received_error,
    sent_error,
)
from weir.fronts.passing import ConnectionReceiver, Passed
from weir.fronts.places import PlacesOfFront
from weir.messages import Dispatch, Form, Kind, Observer
from weir.model import overrides
from weir.protocols.account import Account
from weir.protocols.exchange import inference_of
from weir.serving.handle import ModelHandle, Models
from weir.text_models.texts import Tokens
from weir.workers.executor import discard, is_block

if TYPE_CHECKING:
    from weir.frontends.frontend import DispatcherProduct, Turns
    from weir.serving.handle import ModelFacts


class LocalHandle(ModelHandle, Protocol):
    """A model of this process."""

    def submit_all(self, requests: Sequence[Any], now: float) -> list[tuple[Any, WeirError]]:
        """See Service."""


class Catalogue:
    """The models of the dispatcher, each under the number by which the fronts know it. Other facts have another number.

    `product` is the server's, which may read requests in the fronts.
    """

    def __init__(self, models: Models, product: "DispatcherProduct | None" = None) -> None:
        self._models = models
        self.product = product
        self._last = 0
        self._numbers: dict[ModelFacts, int] = {}
        self.handles: dict[int, tuple[LocalHandle, ModelFacts]] = {}
        self.most_texts = 0  # that may be in queues: texts stay there when their model has gone
        self.places: list[PlacesOfFront] = []  # to each front; the one that gave a place back last is the last one

    def table(self) -> ModelTable:
        """Return the models that there are now, which `handles` has from then on."""
        before, self._numbers, self.handles = self._numbers, {}, {}
        states, most_texts = [], 0
        for handle in self._models.all:
            facts = handle.facts
            number = before.get(facts)
            if number is None:
                self._last = number = self._last + 1
            self._numbers[facts] = number
            self.handles[number] = cast(LocalHandle, handle), facts
            takes_texts = handle.tracing is None and self.turns_of(handle) is not None
            states.append(_state_of(number, handle, takes_texts=takes_texts))
            most_texts += facts.batching.max_queue_size if takes_texts else 0
        self.most_texts = max(self.most_texts, most_texts)
        return ModelTable(
            states, self._of(self._models.services), self._of(self._models.routes), dict(self._models.aliases)
        )

    def turns_of(self, handle: ModelHandle | None) -> "Turns | None":
        """Return what gives texts of fronts their turns, if the model takes them."""
        return None if self.product is None or handle is None else self.product.turns(handle)

    def _of(self, handles: "Any") -> dict[str, int]:
        return {name: self._numbers[handle.facts] for name, handle in handles.items()}


def _state_of(number: int, handle: ModelHandle, *, takes_texts: bool) -> ModelDescription:
    facts, model = handle.facts, handle.facts.model
    return ModelDescription(
        number, facts.name, facts.version, facts.platform, not why_passed_on(handle), facts.settings.timeout,
        facts.batching.max_batch_size, facts.batching.max_queue_size,
        list(model.inputs), list(model.outputs), list(model.content_types), facts.streaming, model.Output is bytes,
        overrides(model, "encode"), handle.control.workers.arena_bytes, takes_texts, facts.batching.max_batch_cost,
    )  # fmt: skip


def why_passed_on(handle: ModelHandle) -> str:
    """Return why a front passes requests for this model on; "" if it reads them, for which only declarations are needed, not code."""
    facts, inference = handle.facts, inference_of(handle)
    reasons = {
        "it streams": facts.streaming,
        "it has hooks": facts.hooked,
        "it measures its items": facts.needs_measure,
        "it takes the parameters of requests": facts.model.keeps_head,
        "it is traced": handle.tracing is not None,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    queues = inference.queues_tensors if facts.takes_tensors else inference.queues_items
    return ", ".join(found) or ("" if queues(handle) else "its requests are not queued as they come")


class RemoteRequest(RequestBase):
    """A request that a front has read."""

    __slots__ = ("front", "handle", "number")

    def __init__(
        self, front: "ConnectedFront", handle: LocalHandle, form: Form, number: int, arrival: float, payload: bytes
    ) -> None:
        # The constructor of RequestBase inlined: it runs once per request. A test compares the results of the two.
        self.form = form
        self.payload = payload
        self.arrival = arrival
        self.deadline = arrival + form.timeout
        self.trace = None
        self.large = False
        self.settled, self.taken, self.overtaken, self.partial = NEW
        self.front = front
        self.handle = handle
        self.number = number

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Send the output to the front."""
        front, number = self.front, self.number
        if type(output) is not bytes:
            output = front.in_place(number, output, dispatch)
        if front.open.pop(number, None) is None:
            return
        batch = dispatch if self.form.explain or dispatch.woken_at is not None else None
        responses = (batch is front.batch and front.responses) or front.new_responses(batch)
        if responses is None:
            error = Overloaded("the front of this connection does not read the responses")
            dispatch.refuse(self, error)
            front.fail(number, error)
            return
        responses.numbers.append(number)
        responses.outputs.append(output)
        front.response_bytes += len(output) if type(output) is bytes else sum([len(each.data) for each in output])
        if front.response_bytes > FULL_FRAME or not front.open:  # no other response can come in this turn
            front.turn_ends()

    def fail(self, error: WeirError) -> None:
        """Send the error to the front."""
        self.front.fail(self.number, error)

    def abandon(self) -> None:
        """Send an error: the output could not be sent."""
        self.front.fail(self.number, ModelError("the response could not be written"))

    def withdraw(self) -> None:
        """Leave the queue: the caller has left, or the front has ended."""
        self.handle.cancel(self)


def _taken_out(block: Any) -> bytes:
    """Return the bytes in `block`, which is released."""
    try:
        return bytes(block.view)
    finally:
        discard(block)


class FrontsShared(NamedTuple):
    """The state that all fronts of a server share in the dispatcher. `arena_full` gets the number of a model whose arena is full."""

    catalogue: Catalogue
    account: Account
    observers: Sequence[Observer]
    log: HttpLog | None
    clock: Callable[[], float]
    arena_full: Callable[[int], None]


class ConnectedFront:
    """One front, from its start to its end: what it has in the queues, and what it is sent.

    `passed` gets the connections that it hands over. `ended` is called when it has ended or must end, with a reason.
    """

    def __init__(
        self,
        link: socket.socket,
        connections: socket.socket,
        shared: FrontsShared,
        passed: Passed,
        ended: Callable[[str], None],
    ) -> None:
        self._shared = shared
        self._catalogue, account = shared.catalogue, shared.account
        self._loop = loop = asyncio.get_running_loop()
        self.listening: asyncio.Future[None] = loop.create_future()
        self.drained: asyncio.Future[bool] = loop.create_future()
        self.product_drained: asyncio.Future[None] = loop.create_future()
        self._link: Link[FromFront] = Link(link, loop, reader_of_front(), self._received, ended)
        self._receiver = ConnectionReceiver(connections, loop, passed, account.max_bytes)
        self._places = PlacesOfFront(connections, self._link.put)
        self._catalogue.places.append(self._places)
        self.put = self._link.put  # sends a message in this turn
        self.open: dict[int, RemoteRequest] = {}
        self._next = 0  # the lowest number that a request may have
        self._forms: dict[int, tuple[int, Form]] = {}  # with the number of the model
        # Each connection has one request at a time, and there may be as many calls of gRPC. The texts that wait come on top.
        self._most = 2 * account.max_connections
        self.silent = 0  # seconds since its last message, as `sweep` counts them
        self._now = 0.0  # when the present messages came
        self._claim = account.claim()  # what the front has not read
        self._ended = ended
        self.responses: Outputs | None = None  # of this turn of the loop, and of `batch` if that is not None
        self.batch: Dispatch | None = None
        self.response_bytes = 0
        self._link.open()
        self._readers = {
            Submit: self._submit, Reported: self._reported, RequestForm: self._know, WantPlace: self._want, PlaceFree: self._take_back, WantCopy: self._copy, CallerLeft: self._withdraw, Transferred: self._count, Refused: self._refused,
            AccessLine: self._write_line, Noted: _note, FrontListens: partial(_once, self.listening), Alive: _alive, ProductDrained: partial(_once, self.product_drained), Drained: partial(_once, self.drained),
        }  # fmt: skip

    def close(self) -> None:
        """The front has ended, or is about to: withdraw its requests. The connections that it has passed on live. Idempotent."""
        self._receiver.receive_rest()
        self._receiver.close()
        self._link.close()
        self._claim.close()
        for future in (self.listening, self.product_drained, self.drained):
            if not future.done():
                future.cancel()
        requests, self.open = self.open, {}
        for request in requests.values():
            request.withdraw()
        self._places.close()
        if self._places in self._catalogue.places:
            self._catalogue.places.remove(self._places)

    # What comes from the front.

    def _received(self, messages: list[FromFront]) -> None:
        readers: Any = self._readers
        self._now = self._shared.clock()
        self.silent = 0
        try:
            for message in messages:
                readers[type(message)](message)
        except (Violation, msgspec.MsgspecError) as violation:
            self._ended(f"it sent {violation}")

    def _know(self, message: RequestForm) -> None:
        form = message.form
        known = form.replaced(kind=Kind.ITEM, cost=float(form.rows), key=batch_key(form.key))
        self._forms[message.number] = message.model, known

    def _submit(self, message: Submit) -> None:
        """Put requests in their queue. The front hands over those for a model that is not what it believes."""
        (model, form), numbers, kinds = self._checked(message)
        handle, facts = self._catalogue.handles.get(model, _NONE)
        turns = self._catalogue.turns_of(handle) if SentText in kinds else None
        has_changed = handle is None or handle.facts is not facts or form.rows > facts.batching.max_batch_size
        if has_changed or (SentText in kinds and turns is None):
            for number in numbers:
                self._link.put(MustHandOver(number))
        elif turns is not None:
            self._enter_texts(handle, turns, form, numbers, message)
        else:
            payloads = self._places.payloads(model, message.payloads) if SentPlace in kinds else message.payloads
            self._enter(handle, form, numbers, message.arrivals, payloads)

    def _checked(self, message: Submit) -> tuple[tuple[int, Form], range, set[type]]:
        """Return the form of requests that a front may send, with the number of their model, the numbers of the requests, and the types of their payloads."""
        count, arrivals, kinds = len(message.payloads), message.arrivals, set(map(type, message.payloads))
        known, numbers = self._forms.get(message.form), range(message.first, message.first + count)
        most = self._most + self._catalogue.most_texts
        if known is None or numbers.start < self._next or len(self.open) + count > most:
            raise Violation("requests of an unknown form, with former numbers, or more than it can have connections")
        if not 0 < count == len(arrivals) or arrivals != sorted(arrivals) or arrivals[-1] > self._now:
            raise Violation("no requests, requests out of order, or one from the future")
        if SentText in kinds and len(kinds) > 1:
            raise Violation("texts and other requests in one message")
        self._next = numbers.stop
        return known, numbers, kinds

    def _enter(
        self, handle: LocalHandle, form: Form, numbers: range, arrivals: Sequence[float], payloads: Sequence[Any]
    ) -> None:
        requests = list(map(RemoteRequest, repeat(self), repeat(handle), repeat(form), numbers, arrivals, payloads))
        self.open.update(zip(numbers, requests, strict=True))
        for request, error in handle.submit_all(requests, self._now):
            handle.notify(form.frontend, error)
            self.fail(request.number, error)
            discard(request.payload)

    def _enter_texts(self, handle: LocalHandle, turns: "Turns", form: Form, numbers: range, message: Submit) -> None:
        for number, arrival, sent in zip(numbers, message.arrivals, message.payloads, strict=True):
            text = RemoteText(self, handle, form, number, arrival, cast(SentText, sent), turns)
            self.open[number] = text
            try:
                handle.submit(text, self._now)
            except WeirError as error:
                handle.notify(form.frontend, error)
                text.fail(error)

    def _reported(self, message: Reported) -> None:
        product = self._catalogue.product
        if product is None:
            raise Violation("counts of a product that there is not")
        try:
            product.reported(message.data)
        except ValueError as error:
            raise Violation(f"counts that are none: {error}") from None

    def _want(self, message: WantPlace) -> None:
        handle, _ = self._catalogue.handles.get(message.model, _NONE)
        if not self._places.want(message, handle):
            self._shared.arena_full(message.model)

    def _take_back(self, message: PlaceFree) -> None:
        self._places.free(message)
        if message.memory < 0:  # of an output
            return
        # The other fronts come first. Who still waits needs what bodies hold that began to arrive meanwhile.
        fronts = self._catalogue.places
        fronts.remove(self._places)
        fronts.append(self._places)
        waits = [each.retry(message.memory) for each in fronts]
        if any(waits):
            self._shared.arena_full(message.memory)

    def _copy(self, message: WantCopy) -> None:
        self._link.put(self._places.copied(message))

    def _withdraw(self, message: CallerLeft) -> None:
        request = self.open.pop(message.number, None)
        if request is not None:
            request.withdraw()

    def _count(self, message: Transferred) -> None:
        handle, _ = self._catalogue.handles.get(message.model, _NONE)
        if handle is not None:
            handle.transferred(message.frontend, message.received, message.sent)

    def _refused(self, message: Refused) -> None:
        error = received_error(message.error)
        handle, _ = (None, None) if message.model is None else self._catalogue.handles.get(message.model, _NONE)
        if handle is not None:
            handle.notify(message.frontend, error)
            return
        for observer in self._shared.observers:
            observer.refused("", message.frontend, error)

    def _write_line(self, message: AccessLine) -> None:
        log = self._shared.log
        if log is not None:
            began = log.clock() - (message.ended - message.began)
            client = (message.client,) if message.client else None
            log.answered(
                client, message.method, message.target, message.status, message.size_bytes, began, message.protocol
            )

    # What goes to the front.

    def new_responses(self, batch: Dispatch | None) -> Outputs | None:
        """Return where the outputs of `batch` go that come in this turn, or with None those that say nothing of theirs; None if the front must not get more
        before it has read."""
        if self.responses is None:
            self._loop.call_soon(self.turn_ends)
        else:
            self._link.put(self.responses)
        self.responses, self.batch, self.response_bytes = None, batch, 0
        if not self.is_full:
            self.responses = Outputs([], [], None if batch is None else batched(batch))
        return self.responses

    @property
    def is_full(self) -> bool:
        """Whether the front must not get more before it has read."""
        return bool(self._claim.held_bytes) and self.charge_unread() > self._shared.account.max_connection_bytes

    def in_place(self, number: int, output: Any, dispatch: Dispatch) -> bytes | list[SentArray]:
        """Have the front read the Block `output` in its place, which ends the request; or return its bytes, if they must travel. Arrays always do."""
        if isinstance(output, list):
            return output
        if number in self.open and not self.is_full and self._places.place(number, output, batched(dispatch)):
            del self.open[number]
            return b""
        return _taken_out(output)

    def fail(self, number: int, error: WeirError) -> None:
        """Send the error of a request."""
        self.open.pop(number, None)
        self._link.put(FailedRequest(number, sent_error(error)))

    def turn_ends(self) -> None:
        """Send the outputs of this turn."""
        responses, self.responses, self.batch, self.response_bytes = self.responses, None, None, 0
        if responses is not None:
            self._link.send(responses)
            self.charge_unread()

    def sweep(self) -> None:
        """Note that a second has passed."""
        self.silent += 1
        self.charge_unread()
        self._places.sweep()

    def charge_unread(self) -> int:
        """Charge what the front has not read to the account of the whole server, and return how many bytes it is. It may be the part of one connection."""
        unread = self._link.unsent_bytes
        if unread != self._claim.held_bytes:
            self._claim.add(unread - self._claim.held_bytes)
        return unread


_NONE: Any = (None, None)


def _once(future: "asyncio.Future[Any]", message: FrontListens | ProductDrained | Drained) -> None:
    """End `future`, unless it has ended."""
    if not future.done():
        future.set_result(getattr(message, "in_time", None))


def _alive(message: Alive) -> None:
    """Do nothing: that something came is what counts."""


def _note(message: Noted) -> None:
    logging.getLogger(message.logger).log(message.level, "%s", message.text)


class RemoteText(RemoteRequest):
    """A text that a front has tokenized."""

    __slots__ = ("brief", "tag", "turn", "turns")

    def __init__(
        self, front: ConnectedFront, handle: LocalHandle, form: Form, number: int, arrival: float, sent: SentText, turns: "Turns"
    ) -> None:  # fmt: skip
        # Tokens that are only ids are bytes for the worker.
        payload: Any = Tokens(sent.ids, sent.second, sent.outputs) if sent.second or sent.outputs else sent.ids
        cost = float(sent.cost)
        super().__init__(front, handle, form.replaced(cost=cost, explain=True), number, arrival, payload)
        self.brief = sent.brief
        self.turns = turns
        self.turn = turns.enter(sent.ahead, cost)
        self.tag = self.turn[0]

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Send the output to the front, with what it says of its batch."""
        output = sent_output(output)
        if self.number in self.front.open:
            self.turns.leave(self.turn)
        super().finish(output, dispatch)

    def fail(self, error: WeirError) -> None:
        """Send the error to the front."""
        if self.front.open.pop(self.number, None) is not None:
            self.turns.leave(self.turn)
            self.front.fail(self.number, error)

    def abandon(self) -> None:
        """Send an error: the output could not be sent."""
        self.fail(ModelError("the vectors could not be put together"))

    def withdraw(self) -> None:
        """Leave the queue: the caller has left, or the front has ended."""
        self.turns.leave(self.turn)
        super().withdraw()


def sent_output(output: Any) -> bytes | list[SentArray]:
    """Return the output for a text as it is sent: JSON as it is, and all else as arrays."""
    if type(output) is bytes:
        return output
    if is_block(output):
        return _taken_out(output)
    parts = output if isinstance(output, (list, tuple)) else [output]
    arrays = [numpy.asarray(each, numpy.float32) for each in parts]
    return [SentArray(each.shape, each.tobytes()) for each in arrays]
