"""What a request from outside becomes in the queue of its model, and what its outputs become in its answer.

Protocols read bytes into one of two forms: a body of items (Weir's own protocol: one item, or a list) or an InferenceRequest of named tensors (the Open
Inference Protocol). Both are divided into queue entries here, run, and gathered again. How that is done belongs to the model: each service has an `inference`.
That of plain models is ModelInference. A product that makes other requests of those that come sets its own, as the embedding server does for texts, which
become sequences of tokens before they wait.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy

from weir.batching.request_state import RequestBase, refuse
from weir.errors import InvalidRequest, ModelError, TooLarge, Unsupported, WeirError, brief
from weir.messages import JSON, LENT, MSGPACK, OBJECT, OCTETS, Dispatch, Kind, Request
from weir.model import Tensor, is_batched, is_tensor_model
from weir.serving.calls import StreamedCall
from weir.serving.delivery import discard, drop_payload, is_block
from weir.serving.settings import LONGEST_TIMEOUT
from weir.wire.inference import (
    InferenceRequest,
    InferenceResponse,
    Parameters,
    TensorValue,
    add_batch,
    bind,
    take_batch,
)
from weir.wire.tensors import Arrays, rows_of, shape_key, text_size, to_arrays, to_plain, to_text
from weir.wire.values import UNWRITABLE, decode, encode, split

if TYPE_CHECKING:
    from weir.serving.service import Service

T = TypeVar("T")

# What the Open Inference Protocol is shown of a model of items: BYTES tensors whose elements are JSON documents.
ITEM_INPUTS = (Tensor("input", "BYTES", (-1,)),)
ITEM_OUTPUTS = (Tensor("output", "BYTES", (-1,)),)

_LOWEST = 1 << 32  # of the priorities that requests can state
_MICROSECOND = 1e-6

# Parameters that ask for what is not offered: an answer that overlooked them would be a wrong one.
_REFUSED = {"sequence_id": "sequence", "classification": "classification"}


class ItemHead(Protocol):
    """What the head of a request for items says. `batch`: its body is a list of items, answered one by one; `plain`: it is one item of one row, which
    the worker decodes. `timeout` is in seconds."""

    service: "Service"
    batch: bool
    plain: bool
    content_type: str
    accept: str
    key: Any
    priority: int
    timeout: float


class ItemsResponse(NamedTuple):
    """The answers to items. `write` returns the bytes of each, or its error, in order; `size_bytes` is about as much text as that writes. `dispatch` is the
    batch of the first one, which arrived at `arrival`; `beside` has what else is known of an item, by its index."""

    size_bytes: int
    write: Callable[[], list[bytes | WeirError]]
    dispatch: Dispatch | None = None
    arrival: float = 0.0
    headers: Sequence[tuple[bytes, bytes]] = ()
    beside: Mapping[int, dict[str, Any]] = MappingProxyType({})


class StreamPart(NamedTuple):
    """One of several answers. `last`: the model marked it as its last one; a stream may also end without such a mark."""

    response: InferenceResponse
    last: bool


class InferenceCall(Protocol):
    """The call that a request came by; protocols/exchange.py has the one of servers. `timeout` is the caller's in seconds (None: the service's setting),
    `trace` a Trace, the caller's `traceparent`, or None; `peer` is the caller's address."""

    door: str
    headers: Sequence[tuple[bytes, bytes]]
    peer: str | None
    timeout: float | None
    trace: Any

    async def read(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Return what `work` reads of about so many bytes; a long body is read in a thread. The observers are notified of a refusal."""

    def charge(self, size_bytes: int) -> None:
        """Charge memory that the request takes beside its body. Raises the error that refuses it; the observers have been notified."""


class Inference(Protocol):
    """How requests from outside are answered for a model."""

    @property
    def queues_items(self) -> bool:
        """Whether a body that is one item is one entry of the queue: a channel may make it by `read_item` and submit it by itself."""

    def queues_tensors(self, service: "Service") -> bool:
        """Tell whether an InferenceRequest is one entry of the queue: a channel may make it by `works_of` and submit it by itself."""

    def inputs(self, service: "Service") -> Sequence[Tensor]:
        """Return the tensors that metadata says requests hold. Others may be taken besides."""

    def outputs(self, service: "Service") -> Sequence[Tensor]:
        """Return the tensors that metadata says answers hold."""

    async def infer(self, service: "Service", request: InferenceRequest, call: InferenceCall) -> InferenceResponse:
        """Answer a request of tensors. Cancelling the task that awaits this withdraws it.

        A parameter `timeout` of the request can only shorten that of the call. Raises the WeirError that ends the request, and Unsupported if the model streams.
        """

    async def infer_items(self, head: ItemHead, body: bytes, call: InferenceCall) -> ItemsResponse:
        """Answer a body of items, decompressed. Cancelling the task that awaits this withdraws them. Raises the WeirError that is the end of them all."""


class QueueEntry(NamedTuple):
    """The arguments of a RequestBase that depend on the body."""

    payload: Any
    kind: Kind
    content_type: str
    accept: str
    rows: int
    cost: float
    key: Any
    large: bool


# The work of an item that was refused before it could be any.
NOTHING = QueueEntry(None, Kind.ITEM, OBJECT, OBJECT, 1, 1.0, None, False)


def read_work(ask: ItemHead, body: bytes) -> list[QueueEntry | WeirError]:
    """Make work of the `body` of a request, decompressed: one element, unless it is a list whose items differ in size or
    are tensors; of these, one that cannot be work is an error in its place.

    Raises InvalidRequest for an empty or malformed body, and TooLarge for a list that can never fit into the queue, before its items
    are looked into. What only the worker decodes, only the worker refuses.
    """
    if not body and not may_be_empty(ask):
        raise empty_body(ask)
    if not ask.batch:
        return [read_item(ask, body)]
    most = ask.service.batching.max_queue_size
    items = split(body, ask.content_type, most)
    if items is None:
        raise TooLarge(f"body of more than {most} items: must have at most {most} (max_queue_size)")
    if not reads_items(ask):
        return [_work(ask, items, Kind.ITEMS, len(items), float(len(items)), ask.key)] if items else []
    works = [_item_or_error(ask, item) for item in items]
    rows = sum(work.rows for work in works if isinstance(work, QueueEntry))
    if rows > most:
        raise TooLarge(f"body of {rows} rows: must have at most {most} (max_queue_size)")
    return works


# An item of a list that is looked into takes as long as so many bytes.
_ITEM_BYTES = 8


def bytes_to_read(ask: ItemHead, body: bytes) -> int:
    """Return about how many bytes `read_work` has to read of `body`; those of lists whose items are looked into count more."""
    if ask.plain:
        return 0
    return len(body) * (_ITEM_BYTES if ask.batch and reads_items(ask) else 1)


def reads_items(ask: ItemHead) -> bool:
    """Tell whether the items of a list are looked into one by one, each then a request of its own."""
    return ask.service.needs_measure or is_tensor_model(ask.service.model)


def may_be_empty(ask: ItemHead) -> bool:
    """Tell whether a body of no bytes can be an item: of bytes, or of a content type of the model's own."""
    return not ask.batch and ask.content_type not in (JSON, MSGPACK)


def empty_body(ask: ItemHead) -> InvalidRequest:
    """Return the error for a body of no bytes."""
    return InvalidRequest(f"body: is empty, must be {ask.content_type}")


def read_item(ask: ItemHead, body: bytes) -> QueueEntry:
    """Make work of one item: a body that is neither empty nor compressed, or an element of a list. Raises RequestErrors."""
    service = ask.service
    if is_tensor_model(service.model):
        return tensor_work(service, to_arrays(decode(body, ask.content_type), service.model.inputs), ask.key)
    if not service.needs_measure or ask.content_type not in (JSON, MSGPACK, OCTETS):
        return _work(ask, body, Kind.ITEM, 1, 1.0, ask.key)
    measured = service.measure(body if ask.content_type == OCTETS else decode(body, ask.content_type))
    return _work(ask, body, Kind.ITEM, measured.rows, measured.cost, _joined(measured.key, ask.key))


def _item_or_error(ask: ItemHead, body: bytes) -> QueueEntry | WeirError:
    try:
        return read_item(ask, body)
    except WeirError as error:
        return error


def tensor_work(service: "Service", arrays: Arrays, key: Any = None) -> QueueEntry:
    """Make work of `arrays`, which are as the model declares them. Raises TooLarge for more rows than the queue can ever take,
    and what the model's `measure` raises."""
    alone = not is_batched(service.model)
    shapes = None if service.streaming else shape_key(arrays, service.model.inputs)  # streams are not joined
    rows, key = 1 if alone else rows_of(arrays), _joined(shapes, key)
    cost = float(rows)
    if service.needs_measure:
        measured = service.measure(arrays)
        cost, key = measured.cost, _joined(measured.key, key)
    return as_work(service, arrays, Kind.ITEM if alone else Kind.TENSORS, rows, cost, key, accept=LENT)


def _joined(measured: Any, given: Any) -> Any:
    """Return one key for two, the same as calls in process have, so that they share batches."""
    return measured if given is None else (measured, given)


def _work(ask: ItemHead, payload: Any, kind: Kind, rows: int, cost: float, key: Any) -> QueueEntry:
    return as_work(ask.service, payload, kind, rows, cost, key, content_type=ask.content_type, accept=ask.accept)


def as_work(
    service: "Service", payload: Any, kind: Kind, rows: int, cost: float, key: Any, *, content_type: str = OBJECT,
    accept: str = OBJECT,
) -> QueueEntry:  # fmt: skip
    """Return work of so many rows. Raises TooLarge for more than the queue can ever take."""
    batching = service.batching
    if rows > batching.max_queue_size:
        raise TooLarge(f"body of {rows} rows: must have at most {batching.max_queue_size} (max_queue_size)")
    large = 0 < batching.small_request_size < rows
    return QueueEntry(payload, kind, content_type, accept, rows, cost, key, large)


class Schedule(NamedTuple):
    """The priority of a request, as in the queue (higher goes first), and its timeout in seconds or None."""

    priority: int
    timeout: float | None


def schedule_of(parameters: Parameters) -> Schedule:
    """Read `priority` and `timeout` from the parameters of a request.

    In the protocol 1 is the highest priority and 0 means none; requests with a priority go before those without. A
    timeout is in microseconds; 0 says nothing. Raises InvalidRequest naming the parameter, its value and the rule, and
    Unsupported for a parameter that asks for an extension that there is not.
    """
    if not parameters:
        return DEFAULT_SCHEDULE
    _refuse_others(parameters)
    stated = integer_of("priority", parameters.get("priority", 0), 0, _LOWEST)
    limit = integer_of("timeout", parameters.get("timeout", 0), 0, int(LONGEST_TIMEOUT / _MICROSECOND))
    return Schedule(_LOWEST - stated if stated else 0, limit * _MICROSECOND or None)


def _refuse_others(parameters: Parameters) -> None:
    for name, extension in _REFUSED.items():
        if parameters.get(name):
            raise Unsupported(
                f"parameter {name!r}={brief(parameters[name], 40)}: this server has no extension {extension!r}"
            )


def integer_of(name: str, value: Any, least: int, most: int) -> int:
    """Return the value of the parameter `name`. Raises InvalidRequest unless it is an integer from `least` to `most`."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:  # some clients write every parameter as text
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidRequest(f"parameter {name!r}={brief(value, 40)}: must be an integer from {least} to {most}")
    return value


DEFAULT_SCHEDULE = Schedule(0, None)


def works_of(service: "Service", request: InferenceRequest) -> list[QueueEntry]:
    """Make work of `request`: one element, unless it holds items that differ in size.

    Raises RequestErrors naming tensor, value and rule.
    """
    check_outputs(service, request)
    if is_tensor_model(service.model):
        add_batch(request, service.model.inputs)
        return [tensor_work(service, bind(request.inputs, service.model.inputs))]
    array = bind(request.inputs, ITEM_INPUTS)["input"]
    most = service.batching.max_queue_size
    if len(array) > most:  # before they are looked at one by one
        raise TooLarge(f"body of {len(array)} rows: must have at most {most} (max_queue_size)")
    items = _documents(service, array.tolist())
    if not service.needs_measure:
        count = len(items)
        return [as_work(service, items, Kind.ITEMS, count, float(count), None, content_type=JSON, accept=JSON)]
    return [_measured(service, item, index) for index, item in enumerate(items)]


def _documents(service: "Service", elements: list[bytes]) -> list[bytes]:
    """Return items as JSON documents, which elements are except those of a model of texts."""
    texts = service.model.plain_texts
    empty = next((index for index, element in enumerate(elements) if not element), None)
    if empty is not None:
        raise InvalidRequest(f"tensor 'input'[{empty}]: is empty, must be {'a text' if texts else 'a JSON document'}")
    return [_quoted(element, index) for index, element in enumerate(elements)] if texts else elements


def _quoted(text: bytes, index: int) -> bytes:
    try:
        return encode(text.decode(), JSON)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"tensor 'input'[{index}]: must be a text in UTF-8 ({error.reason})") from None


def _measured(service: "Service", item: bytes, index: int) -> QueueEntry:
    try:
        measured = service.measure(decode(item, JSON))
    except WeirError as error:
        raise _placed(error, index) from error
    return as_work(service, item, Kind.ITEM, measured.rows, measured.cost, measured.key, content_type=JSON, accept=JSON)


def check_outputs(service: "Service", request: InferenceRequest) -> None:
    """Raise InvalidRequest or Unsupported unless the outputs that `request` asks for are the model's, each once."""
    declared = {tensor.name for tensor in service.inference.outputs(service)}
    seen = set()
    for output in request.outputs or ():
        if output.name not in declared:
            names = ", ".join(map(repr, declared))
            raise InvalidRequest(f"output {output.name!r}: not one of {names}, which model {service.name!r} has")
        if output.name in seen:
            raise InvalidRequest(f"output {output.name!r}: is requested twice")
        seen.add(output.name)
        _refuse_others(output.parameters)


def response_of(
    service: "Service", request: InferenceRequest, kinds: Sequence[Kind], outputs: Sequence[Any]
) -> InferenceResponse:
    """Return the answer to `request`, whose works were of `kinds` and ended with `outputs`.

    The outputs come in the declared order, only those requested. Raises the error of an item that failed, which names
    the item.
    """
    if is_tensor_model(service.model):
        values = _requested_arrays(service, request, outputs[0])
    else:
        values = [_items(_flat(kinds, outputs))]
    response = InferenceResponse(service.name, values, version=service.version, id=request.id)
    if request.without_batch:
        take_batch(response)
    return response


def _requested_arrays(service: "Service", request: InferenceRequest, arrays: Any) -> list[TensorValue]:
    if isinstance(arrays, WeirError):
        raise arrays
    missing = [tensor.name for tensor in service.model.outputs if tensor.name not in arrays]
    if missing:  # only a hook can have taken it away
        raise service.tell_failed(ModelError(f"output {missing[0]!r}: is missing in the model's answer"))
    return asked_of(service.model.outputs, request, arrays)


def asked_of(declared: Sequence[Tensor], request: InferenceRequest, arrays: Any) -> list[TensorValue]:
    """Return those of the `declared` outputs that `request` asks for; `arrays` has them by name."""
    asked = None if request.outputs is None else {output.name for output in request.outputs}
    return [
        TensorValue(tensor.name, tensor.datatype, arrays[tensor.name])
        for tensor in declared
        if asked is None or tensor.name in asked
    ]


def _flat(kinds: Sequence[Kind], outputs: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for kind, output in zip(kinds, outputs, strict=True):
        flat.extend(output if kind is Kind.ITEMS and isinstance(output, list) else [output])
    return flat


def _items(outputs: list[Any]) -> TensorValue:
    """Return the answers to items as one tensor. Raises the first error among them, with its place; Blocks are released."""
    array = numpy.empty(len(outputs), object)
    failed: WeirError | None = None
    for index, output in enumerate(outputs):
        if isinstance(output, WeirError):
            failed = failed or _placed(output, index)
        elif is_block(output):
            array[index] = bytes(output.view)
            output.release()
        else:
            array[index] = output
    if failed is not None:
        raise failed
    return TensorValue(ITEM_OUTPUTS[0].name, ITEM_OUTPUTS[0].datatype, array)


def _placed(error: WeirError, index: int) -> WeirError:
    placed = copy(error)
    placed.message = f"tensor 'input'[{index}]: {error.message}"
    placed.args = (placed.message,)
    placed.__cause__ = error.__cause__
    return placed


# What is written of items.


def output_body(head: ItemHead, output: Any) -> bytes:
    """Return the bytes of one output: it is bytes, a Block (which is released), or the tensors of a tensor model.

    Raises ModelError for tensors that cannot be written as the answer shall be; the observers have been notified.
    """
    body = body_or_error(head, output)
    if isinstance(body, ModelError):
        raise head.service.tell_failed(body)
    return body


def body_or_error(head: ItemHead, output: Any) -> bytes | ModelError:
    """Return the bytes of one output, or why its tensors cannot be written; no observer has been notified. See `output_body`."""
    if isinstance(output, bytes):
        return output
    if isinstance(output, dict):
        return tensors_body(head, output)
    try:
        return bytes(output.view)
    finally:
        output.release()


def tensors_body(head: ItemHead, tensors: dict[str, Any]) -> bytes | ModelError:
    """Return the bytes of tensors, or why they cannot be written as the answer shall be; no observer has been notified."""
    try:
        as_values = to_text if head.accept == JSON else to_plain
        return encode(as_values(tensors, head.service.model.outputs), head.accept)
    except UNWRITABLE as error:
        failure = ModelError(f"the answer cannot be written as {head.accept}: {error}")
        failure.__cause__ = error
        return failure


# Requests whose ends are awaited.


class AwaitedRequest(RequestBase):
    """A request whose `end`, its output or its WeirError, is reported to `gathering`; `dispatch` is the last batch that it was in, if any."""

    __slots__ = ("_gathering", "dispatch", "end")

    def __init__(
        self, entry: QueueEntry, gathering: "Gathering", arrival: float, timeout: float, priority: int, door: str, trace: Any
    ) -> None:  # fmt: skip
        super().__init__(
            entry.payload, arrival, timeout, kind=entry.kind, content_type=entry.content_type, accept=entry.accept,
            rows=entry.rows, cost=entry.cost, key=entry.key, priority=priority, large=entry.large, door=door, trace=trace,
        )  # fmt: skip
        self._gathering = gathering
        self.end: Any = None
        self.dispatch: Dispatch | None = None

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Keep the output, and release the payload: other requests of the same call may take long."""
        drop_payload(self)
        self.end = output
        self.dispatch = dispatch
        self._gathering.ended(self)

    def fail(self, error: WeirError) -> None:
        """Keep the error."""
        self.end = error
        self._gathering.ended(self)


class Gathering:
    """The requests that one call is divided into. The first error ends all of them; with `alone` each has an end of its own."""

    def __init__(self, service: "Service", call: InferenceCall, timeout: float, priority: int, *, alone: bool) -> None:
        self._service = service
        self._call = call
        self._timeout = timeout
        self._priority = priority
        self._alone = alone
        self._left = 0
        self._taken = False  # the service has taken one of them
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests: list[AwaitedRequest] = []

    async def run(self, entries: list[QueueEntry | WeirError]) -> list[AwaitedRequest]:
        """Put `entries` into the queue and return their requests, in order, when all have ended.

        `entries` is empty afterwards: each request has its payload, and lets go of it at its own end. Raises the first error, and withdraws the others.
        With `alone` an error is the end of its own request, and only the refusal of the first one, before any was taken, is raised. Cancelling the
        task that awaits this withdraws all of them.
        """
        self._left = len(entries)
        try:
            for entry in entries:
                self._submit(entry)
            entries.clear()
            if self.requests:
                await self._over
            if not self._alone:
                self._raise_first()
        except BaseException:
            self._withdraw()
            raise
        return self.requests

    def ended(self, request: AwaitedRequest) -> None:
        """Count the end of one."""
        self._left -= 1
        failed = not self._alone and isinstance(request.end, WeirError)
        if (failed or not self._left) and not self._over.done():
            self._over.set_result(None)

    def _submit(self, entry: QueueEntry | WeirError) -> None:
        # The first has the span that the caller is told of; the others are its siblings.
        trace = self._call.trace
        own = trace if not self.requests else getattr(trace, "traceparent", trace)
        queued = NOTHING if isinstance(entry, WeirError) else entry
        now = self._service.now()
        request = AwaitedRequest(queued, self, now, self._timeout, self._priority, self._call.door, own)
        if isinstance(entry, WeirError):
            refuse(request, entry)
        else:
            try:
                self._service.submit(request, now)
            except WeirError as error:
                if not self._alone or not self._taken:
                    raise
                refuse(request, error)
            else:
                self._taken = True
        self.requests.append(request)

    def _raise_first(self) -> None:
        for request in self.requests:
            if isinstance(request.end, WeirError):
                raise request.end

    def _withdraw(self) -> None:
        """Cancel the requests under way, and release the shared memory of answers that will not be read."""
        for request in self.requests:
            if not request.settled:
                self._service.cancel(request)
            for output in request.end if isinstance(request.end, list) else [request.end]:
                discard(output)


# Streams.


def stream_of(
    service: "Service", entry: QueueEntry, timeout: float, priority: int, call: InferenceCall
) -> StreamedCall:  # fmt: skip
    """Return the request for the answers to one entry, for `read_parts`. Tensors are one item, which is not divided."""
    return StreamedCall(
        entry.payload, service.now(), timeout, service.settings.stream_buffer, service.cancel, service.now, kind=Kind.ITEM,
        content_type=entry.content_type, accept=entry.accept, rows=entry.rows, cost=entry.cost, key=entry.key,
        priority=priority, large=entry.large, door=call.door, trace=call.trace,
    )  # fmt: skip


async def read_parts(service: "Service", request: StreamedCall) -> AsyncGenerator[tuple[Any, bool], None]:
    """Submit `request`, and yield each answer and whether the model marked it as its last one. Closing the generator withdraws the request. Raises what Service.submit raises."""
    service.submit(request, request.arrival)
    try:
        while True:
            try:
                part = await request.read()
            except StopAsyncIteration:
                return
            yield part
            del part  # it does not wait for the next one
    finally:
        request.close()


async def stream(
    service: "Service", request: InferenceRequest, call: InferenceCall
) -> AsyncGenerator[StreamPart, None]:  # fmt: skip
    """Yield the answers to `request`; of a model that does not stream, its one.

    Leaving (`aclose`, or cancelling the task) ends the request at the model too. For the rest see Inference.infer.
    """
    if not service.streaming:
        yield StreamPart(await service.inference.infer(service, request, call), True)
        return
    entries, timeout, priority = read_entries(service, request, call.door, call.timeout)
    first = entries[0]
    if len(entries) > 1 or (first.kind is Kind.ITEMS and first.rows > 1):
        rows = sum(entry.rows for entry in entries)
        raise service.tell_refused(call.door, InvalidRequest(f"tensor 'input': has {rows} items, a stream is for one"))
    item = first.payload[0] if first.kind is Kind.ITEMS else first.payload
    streamed = stream_of(service, first._replace(payload=item), timeout, priority, call)
    async with aclosing(read_parts(service, streamed)) as parts:
        async for output, last in parts:
            yield StreamPart(response_of(service, request, [first.kind], [output]), last)


# Plain models.


def entries_for_one_answer(
    service: "Service", request: InferenceRequest, door: str, timeout: float | None
) -> tuple[list[QueueEntry], float, int]:  # fmt: skip
    """Return the queue entries of a request for one answer, its timeout in seconds and its priority. Raises as Inference.infer does; the observers
    have been notified."""
    if service.streaming:
        error = Unsupported(f"model {service.label!r} streams its answers: ask it where streams are offered")
        raise service.tell_refused(door, error)
    return read_entries(service, request, door, timeout)


def read_entries(
    service: "Service", request: InferenceRequest, door: str, timeout: float | None
) -> tuple[list[QueueEntry], float, int]:  # fmt: skip
    """Return the queue entries of a request, its timeout in seconds and its priority. Raises RequestErrors, of which the observers have been notified."""
    try:
        schedule = schedule_of(request.parameters)
        entries = works_of(service, request)
    except WeirError as error:
        raise service.tell_refused(door, error) from None
    limits = [limit for limit in (timeout, schedule.timeout) if limit is not None]
    return entries, min(limits) if limits else service.settings.timeout, schedule.priority


class ModelInference:
    """Inference by the model alone: items and tensors go into its queue as they are."""

    queues_items = True

    def queues_tensors(self, service: "Service") -> bool:
        """Tell whether an InferenceRequest is one entry of the queue: all are but those of items that differ in size."""
        return is_tensor_model(service.model) or not service.needs_measure

    def inputs(self, service: "Service") -> Sequence[Tensor]:
        """Return the model's inputs."""
        return service.model.inputs if is_tensor_model(service.model) else ITEM_INPUTS

    def outputs(self, service: "Service") -> Sequence[Tensor]:
        """Return the model's outputs."""
        return service.model.outputs if is_tensor_model(service.model) else ITEM_OUTPUTS

    async def infer(self, service: "Service", request: InferenceRequest, call: InferenceCall) -> InferenceResponse:
        """See Inference."""
        entries, timeout, priority = entries_for_one_answer(service, request, call.door, call.timeout)
        kinds = [entry.kind for entry in entries]
        ended = await Gathering(service, call, timeout, priority, alone=False).run([*entries])
        return response_of(service, request, kinds, [each.end for each in ended])

    async def infer_items(self, head: ItemHead, body: bytes, call: InferenceCall) -> ItemsResponse:
        """See Inference."""
        entries = await call.read(bytes_to_read(head, body), lambda: read_work(head, body))
        call.charge(sum([arrays_size(entry.payload) for entry in entries if isinstance(entry, QueueEntry)]))
        requests = await Gathering(head.service, call, head.timeout, head.priority, alone=True).run(entries)
        return items_response(head, requests)


class EndedRequest(Request, Protocol):
    """A request that has ended: its output or a WeirError, and the batch it was in, if any."""

    end: Any
    dispatch: Dispatch | None


def items_response(head: ItemHead, requests: Sequence[EndedRequest]) -> ItemsResponse:
    """Return the answers of `requests`, all of which have ended, to a body of items. Raises the error of the only item, or of a list that failed as a whole."""
    ends: list[Any] = []
    for request in requests:
        as_list = head.batch and request.kind is Kind.ITEMS
        if isinstance(request.end, WeirError) and (as_list or not head.batch):
            raise request.end
        ends.extend(request.end if as_list else [request.end])
    size = sum([text_size(array) for end in ends if isinstance(end, dict) for array in end.values()])
    dispatch, arrival = (requests[0].dispatch, requests[0].arrival) if requests else (None, 0.0)
    return ItemsResponse(size, lambda: [_item_body(head, end) for end in ends], dispatch, arrival)


def _item_body(head: ItemHead, end: Any) -> bytes | WeirError:
    return end if isinstance(end, WeirError) else body_or_error(head, end)


def arrays_size(payload: Any) -> int:
    """Return how many bytes the arrays of a payload have, if it is a dict of arrays; else 0: it is what its body was."""
    if not isinstance(payload, dict):
        return 0
    return sum([int(getattr(value, "nbytes", 0)) for value in payload.values()])


MODEL_INFERENCE = ModelInference()
