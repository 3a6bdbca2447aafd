"""Makes queue entries of the requests that a frontend receives, runs them, and makes the response of their outputs.

A protocol reads a request in one of two forms: a body of items (Weir's own protocol: one item or a list of items), or an InferenceRequest of named tensors
(the Open Inference Protocol). This module divides both forms into queue entries, submits the entries, and gathers their outputs.

Each service has an `inference` object that does this for its model. ModelInference is the one for plain models. A product may set another one: the
embedding server turns texts into token sequences before they enter the queue.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy

from weir.batching.request_state import RequestBase, begin, refuse
from weir.errors import InvalidRequest, ModelError, TooLarge, Unsupported, WeirError, brief
from weir.messages import BULK, JSON, LENT, MSGPACK, OBJECT, OCTETS, Dispatch, Kind, Request
from weir.model import Model, Tensor, is_batched
from weir.serving.calls import StreamedCall
from weir.serving.delivery import discard, drop_payload, is_block
from weir.serving.settings import LONGEST_TIMEOUT
from weir.telemetry.tracecontext import child_of
from weir.wire.inference import (
    InferenceRequest,
    InferenceResponse,
    Parameters,
    TensorValue,
    add_batch,
    bind,
    keep_head,
    take_batch,
)
from weir.wire.tensors import Arrays, rows_of, shape_key, text_size, to_arrays, to_plain, to_text
from weir.wire.values import UNWRITABLE, decode, encode, split

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle

T = TypeVar("T")

# The Open Inference Protocol sees a model of items as one BYTES tensor in and one out. Each element is a JSON document.
ITEM_INPUTS = (Tensor("input", "BYTES", (-1,)),)
ITEM_OUTPUTS = (Tensor("output", "BYTES", (-1,)),)

_LOWEST = 1 << 32  # the lowest priority that a request can state: 1 is the highest
_MICROSECOND = 1e-6
CLASS = "class"  # the parameter with the class of work: interactive or bulk
CLASS_HEADER = b"x-weir-class"  # the header with the same

# Parameters of Triton's extensions that Weir does not have. They are refused, because an answer that ignored them would be wrong.
_REFUSED = {"sequence_id": "sequence", "classification": "classification"}


class ItemHead(Protocol):
    """The head of a request for items.

    `batch`: the body is a list of items, each with a result of its own. `plain`: the body is one item of one row, and the worker decodes it.
    `timeout` is in seconds. `key` is the batch key, or None.
    """

    service: "ModelHandle"
    batch: bool
    plain: bool
    content_type: str
    accept: str
    key: Any
    priority: int
    timeout: float


class ItemsResponse(NamedTuple):
    """The results of all items of a request.

    `write` returns the encoded output or the error of each item, in order; `size_bytes` is about how much text it writes. `dispatch` is the batch of the
    first item, or None, and `arrival` the instant at which the first item entered the queue. `beside` has more fields of an item, by its index.
    """

    size_bytes: int
    write: Callable[[], list[bytes | WeirError]]
    dispatch: Dispatch | None = None
    arrival: float = 0.0
    headers: Sequence[tuple[bytes, bytes]] = ()
    beside: Mapping[int, dict[str, Any]] = MappingProxyType({})


class StreamPart(NamedTuple):
    """One response of a stream. `last`: the model marked it as the last one. A stream may also end without such a mark."""

    response: InferenceResponse
    last: bool


class InferenceCall(Protocol):
    """The call that carried a request. The server's implementation is `protocols.exchange.Exchange`.

    `frontend` is the name of the frontend. `timeout` is the caller's in seconds, or None for the service's setting. `trace` is a Trace or an
    Origin. `peer` is the caller's address.
    """

    service: "ModelHandle"
    frontend: str
    headers: Sequence[tuple[bytes, bytes]]
    peer: str | None
    timeout: float | None
    trace: Any

    async def read(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, which reads about `size_bytes` bytes: in a thread if they are many.

        Raises the WeirErrors that `work` raises.
        """

    def charge(self, size_bytes: int) -> None:
        """Charge memory that the request needs in addition to its body. Raises Overloaded if there is no room."""

    def put(self, request: Request) -> None:
        """Put `request` into the queue of `service`. Raises what ModelHandle.submit raises."""


class Inference(Protocol):
    """How a service answers the requests that frontends receive."""

    @property
    def queues_items(self) -> bool:
        """Whether a body of one item becomes one queue entry. If so, a channel may make the entry with `item_entry` and submit it itself."""

    def queues_tensors(self, service: "ModelHandle") -> bool:
        """Return whether an InferenceRequest becomes one queue entry. If so, a channel may make it with `entries_of` and submit it itself."""

    def inputs(self, service: "ModelHandle") -> Sequence[Tensor]:
        """Return the input tensors that the model's metadata lists. A request may have others too."""

    def outputs(self, service: "ModelHandle") -> Sequence[Tensor]:
        """Return the output tensors that the model's metadata lists."""

    async def infer(self, service: "ModelHandle", request: InferenceRequest, call: InferenceCall) -> InferenceResponse:
        """Return the response to a request of tensors. Cancelling the task that awaits this cancels the request.

        The request's parameter `timeout` can only shorten the timeout of the call. Raises the WeirError that ends the request, and Unsupported if the
        model streams its responses.
        """

    async def infer_items(self, head: ItemHead, body: bytes, call: InferenceCall) -> ItemsResponse:
        """Return the results of a body of items, which is decompressed. Cancelling the task that awaits this cancels the items.

        Raises the WeirError that ends the whole request. The error of one item of a list is its result.
        """


class QueueEntry(NamedTuple):
    """The arguments of a RequestBase that depend on the body. `large`: it has more rows than `small_request_size`."""

    payload: Any
    kind: Kind
    content_type: str
    accept: str
    rows: int
    cost: float
    key: Any
    large: bool


# Stands for an item that was refused when it was read.
REFUSED_ENTRY = QueueEntry(None, Kind.ITEM, OBJECT, OBJECT, 1, 1.0, None, False)


def item_entries(head: ItemHead, body: bytes) -> list[QueueEntry | WeirError]:
    """Return the queue entries of a `body`, which is decompressed.

    There is one entry for one item, and one for a whole list that the worker decodes. A list whose items are measured, or are tensors, has an entry for
    each item, or the error that refuses the item.

    Raises InvalidRequest for an empty or malformed body, and TooLarge for a list that can never fit into the queue, before its items are read.
    """
    if not body and not may_be_empty(head):
        raise empty_body(head)
    if not head.batch:
        return [item_entry(head, body)]
    most = head.service.facts.batching.max_queue_size
    items = split(body, head.content_type, most)
    if items is None:
        raise TooLarge(f"body of more than {most} items: must have at most {most} (max_queue_size)")
    if not divides_list(head):
        return [_make_entry(head, items, Kind.ITEMS, len(items), float(len(items)), head.key)] if items else []
    entries = [_item_or_error(head, item) for item in items]
    rows = sum(entry.rows for entry in entries if isinstance(entry, QueueEntry))
    if rows > most:
        raise TooLarge(f"body of {rows} rows: must have at most {most} (max_queue_size)")
    return entries


# Reading a list item by item takes this many times as long per byte.
_ITEM_BYTES = 8


def bytes_to_read(head: ItemHead, body: bytes) -> int:
    """Return about how many bytes `item_entries` has to read of `body`. The bytes of a list that is read item by item count more."""
    if head.plain:
        return 0
    return len(body) * (_ITEM_BYTES if head.batch and divides_list(head) else 1)


def divides_list(head: ItemHead) -> bool:
    """Return whether a list is read item by item, so that each item has a queue entry of its own."""
    return head.service.facts.needs_measure or head.service.facts.takes_tensors


def may_be_empty(head: ItemHead) -> bool:
    """Return whether an empty body can be an item: of octets, or of a content type that the model declares."""
    return not head.batch and head.content_type not in (JSON, MSGPACK)


def empty_body(head: ItemHead) -> InvalidRequest:
    """Return the error for an empty body."""
    return InvalidRequest(f"body: is empty, must be {head.content_type}")


def item_entry(head: ItemHead, body: bytes) -> QueueEntry:
    """Return the queue entry of one item: a body that is not compressed, or an element of a list. Raises RequestErrors."""
    service = head.service
    if service.facts.takes_tensors:
        return tensor_entry(service, to_arrays(decode(body, head.content_type), service.facts.model.inputs), head.key)
    if not service.facts.needs_measure or head.content_type not in (JSON, MSGPACK, OCTETS):
        return _make_entry(head, body, Kind.ITEM, 1, 1.0, head.key)
    measured = service.facts.measure(body if head.content_type == OCTETS else decode(body, head.content_type))
    return _make_entry(head, body, Kind.ITEM, measured.rows, measured.cost, _joined(measured.key, head.key))


def _item_or_error(head: ItemHead, body: bytes) -> QueueEntry | WeirError:
    try:
        return item_entry(head, body)
    except WeirError as error:
        return error


def tensor_entry(service: "ModelHandle", arrays: Arrays, key: Any = None) -> QueueEntry:
    """Return the queue entry of `arrays`, which have the names, dtypes and shapes that the model declares.

    Raises TooLarge for more rows than the queue can ever hold, and what the model's `measure` raises.
    """
    alone = not is_batched(service.facts.model)
    shapes = (
        None if service.facts.streaming else shape_key(arrays, service.facts.model.inputs)
    )  # streams share no batches
    rows, key = 1 if alone else rows_of(arrays), _joined(shapes, key)
    cost = float(rows)
    if service.facts.needs_measure:
        measured = service.facts.measure(arrays)
        cost, key = measured.cost, _joined(measured.key, key)
    return make_entry(service, arrays, Kind.ITEM if alone else Kind.TENSORS, rows, cost, key, accept=LENT)


def _joined(measured: Any, given: Any) -> Any:
    """Return the batch key made of two keys. Calls in process make the same one, so that they share batches."""
    return measured if given is None else (measured, given)


def _make_entry(head: ItemHead, payload: Any, kind: Kind, rows: int, cost: float, key: Any) -> QueueEntry:
    return make_entry(head.service, payload, kind, rows, cost, key, content_type=head.content_type, accept=head.accept)


def make_entry(
    service: "ModelHandle", payload: Any, kind: Kind, rows: int, cost: float, key: Any, *, content_type: str = OBJECT,
    accept: str = OBJECT,
) -> QueueEntry:  # fmt: skip
    """Return a queue entry of `rows` rows. Raises TooLarge for more rows than the queue can ever hold."""
    batching = service.facts.batching
    if rows > batching.max_queue_size:
        raise TooLarge(f"body of {rows} rows: must have at most {batching.max_queue_size} (max_queue_size)")
    large = 0 < batching.small_request_size < rows
    return QueueEntry(payload, kind, content_type, accept, rows, cost, key, large)


class Schedule(NamedTuple):
    """The priority of a request in the queue (higher goes first), and its timeout in seconds, or None."""

    priority: int
    timeout: float | None


def schedule_of(parameters: Parameters, model: type[Model] = Model) -> Schedule:
    """Return the schedule that the parameters `priority` and `timeout` of a request state (Triton's extension "schedule policy"), and `class`, which is ours.

    In that extension 1 is the highest priority and 0 means no priority; requests with a priority go before those without. The timeout is in
    microseconds, and 0 means no timeout. Raises InvalidRequest naming the parameter, its value and the rule, and Unsupported for the parameter of an
    extension that Weir does not have. A `model` that gets the parameters itself may have those of a sequence.
    """
    if not parameters:
        return DEFAULT_SCHEDULE
    if not model.keeps_head:
        _refuse_others(parameters)
    stated = integer_of("priority", parameters.get("priority", 0), 0, _LOWEST)
    limit = integer_of("timeout", parameters.get("timeout", 0), 0, int(LONGEST_TIMEOUT / _MICROSECOND))
    offset = class_offset(parameters[CLASS], "parameter 'class'") if CLASS in parameters else 0
    return Schedule((_LOWEST - stated if stated else 0) + offset, limit * _MICROSECOND or None)


def class_offset(text: Any, where: str) -> int:
    """Return what the class of work `text` adds to the priority of a request: 0 for interactive, BULK for bulk. Raises InvalidRequest naming `where`."""
    if text not in ("interactive", "bulk"):
        raise InvalidRequest(f"{where} {text!r:.80}: must be interactive or bulk")
    return BULK if text == "bulk" else 0


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


def entries_of(service: "ModelHandle", request: InferenceRequest) -> list[QueueEntry]:
    """Return the queue entries of `request`: one, or one for each item if the model measures its items.

    Raises RequestErrors naming tensor, value and rule.
    """
    check_outputs(service, request)
    if service.facts.takes_tensors:
        add_batch(request, service.facts.model.inputs)
        entry = tensor_entry(service, bind(request.inputs, service.facts.model.inputs))
        if service.facts.model.keeps_head:
            entry = entry._replace(payload=keep_head(entry.payload, request, entry.rows))
        return [entry]
    array = bind(request.inputs, ITEM_INPUTS)["input"]
    most = service.facts.batching.max_queue_size
    if len(array) > most:  # before each item is read
        raise TooLarge(f"body of {len(array)} rows: must have at most {most} (max_queue_size)")
    items = _documents(service, array.tolist())
    if not service.facts.needs_measure:
        count = len(items)
        return [make_entry(service, items, Kind.ITEMS, count, float(count), None, content_type=JSON, accept=JSON)]
    return [_measured(service, item, index) for index, item in enumerate(items)]


def _documents(service: "ModelHandle", elements: list[bytes]) -> list[bytes]:
    """Return the elements of the input tensor as JSON documents. They are JSON already unless the model takes plain texts."""
    texts = service.facts.model.plain_texts
    empty = next((index for index, element in enumerate(elements) if not element), None)
    if empty is not None:
        raise InvalidRequest(f"tensor 'input'[{empty}]: is empty, must be {'a text' if texts else 'a JSON document'}")
    return [_quoted(element, index) for index, element in enumerate(elements)] if texts else elements


def _quoted(text: bytes, index: int) -> bytes:
    try:
        return encode(text.decode(), JSON)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"tensor 'input'[{index}]: must be a text in UTF-8 ({error.reason})") from None


def _measured(service: "ModelHandle", item: bytes, index: int) -> QueueEntry:
    try:
        measured = service.facts.measure(decode(item, JSON))
    except WeirError as error:
        raise error.at("tensor 'input'", index) from error
    rows, cost, key = measured.rows, measured.cost, measured.key
    return make_entry(service, item, Kind.ITEM, rows, cost, key, content_type=JSON, accept=JSON)


def check_outputs(service: "ModelHandle", request: InferenceRequest) -> None:
    """Raise InvalidRequest or Unsupported unless every requested output is one of the model's and is requested once."""
    declared = {tensor.name for tensor in service.inference.outputs(service)}
    seen = set()
    for output in request.outputs or ():
        if output.name not in declared:
            names = ", ".join(map(repr, declared))
            raise InvalidRequest(f"output {output.name!r}: not one of {names}, which model {service.facts.name!r} has")
        if output.name in seen:
            raise InvalidRequest(f"output {output.name!r}: is requested twice")
        seen.add(output.name)
        _refuse_others(output.parameters)


def response_of(
    service: "ModelHandle",
    request: InferenceRequest,
    kinds: Sequence[Kind],
    outputs: Sequence[Any],
    waited: float = 0.0,
) -> InferenceResponse:
    """Return the response to `request`, whose queue entries were of `kinds` and ended with `outputs`.

    If it has `waited` so many seconds for a worker to start, its parameter `start_time` says so. It has the requested outputs, in the order in which the model declares them. Raises the error of the first item that failed, with the item's index.
    """
    if service.facts.takes_tensors:
        values = _requested_arrays(service, request, outputs[0])
    else:
        values = [_items(_flat(kinds, outputs))]
    response = InferenceResponse(service.facts.name, values, version=service.facts.version, id=request.id)
    if waited:
        response.parameters["start_time"] = round(waited, 6)
    if request.without_batch:
        take_batch(response)
    return response


def _requested_arrays(service: "ModelHandle", request: InferenceRequest, arrays: Any) -> list[TensorValue]:
    if isinstance(arrays, WeirError):
        raise arrays
    missing = [tensor.name for tensor in service.facts.model.outputs if tensor.name not in arrays]
    if missing:  # only a hook can have removed it
        raise ModelError(f"output {missing[0]!r}: is missing in the model's answer")
    return select_outputs(service.facts.model.outputs, request, arrays)


def select_outputs(declared: Sequence[Tensor], request: InferenceRequest, arrays: Any) -> list[TensorValue]:
    """Return those of the `declared` outputs that `request` asks for. `arrays` maps their names to their values."""
    requested = None if request.outputs is None else {output.name for output in request.outputs}
    return [
        TensorValue(tensor.name, tensor.datatype, arrays[tensor.name])
        for tensor in declared
        if requested is None or tensor.name in requested
    ]


def _flat(kinds: Sequence[Kind], outputs: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for kind, output in zip(kinds, outputs, strict=True):
        flat.extend(output if kind is Kind.ITEMS and isinstance(output, list) else [output])
    return flat


def _items(outputs: list[Any]) -> TensorValue:
    """Return the outputs of items as one tensor. Raises the first error among them, with its index. Blocks are released in any case."""
    array = numpy.empty(len(outputs), object)
    failed: WeirError | None = None
    for index, output in enumerate(outputs):
        if isinstance(output, WeirError):
            failed = failed or output.at("tensor 'input'", index)
        elif is_block(output):
            array[index] = bytes(output.view)
            output.release()
        else:
            array[index] = output
    if failed is not None:
        raise failed
    return TensorValue(ITEM_OUTPUTS[0].name, ITEM_OUTPUTS[0].datatype, array)


# Writing the outputs of items.


def output_body(head: ItemHead, output: Any) -> bytes:
    """Return one output encoded. It is bytes, a Block (which is released), or the arrays of a tensor model.

    Raises ModelError for arrays that cannot be written in the accepted content type.
    """
    body = body_or_error(head, output)
    if isinstance(body, ModelError):
        raise body
    return body


def body_or_error(head: ItemHead, output: Any) -> bytes | ModelError:
    """Return one output encoded, or the ModelError that `output_body` would raise."""
    if isinstance(output, bytes):
        return output
    if isinstance(output, dict):
        return tensors_body(head, output)
    try:
        return bytes(output.view)
    finally:
        output.release()


def tensors_body(head: ItemHead, tensors: dict[str, Any]) -> bytes | ModelError:
    """Return arrays encoded in the accepted content type, or the ModelError that says why they cannot be."""
    try:
        as_values = to_text if head.accept == JSON else to_plain
        return encode(as_values(tensors, head.service.facts.model.outputs), head.accept)
    except UNWRITABLE as error:
        failure = ModelError(f"the answer cannot be written as {head.accept}: {error}")
        failure.__cause__ = error
        return failure


# Requests whose ends are awaited.


class QueuedRequest(RequestBase):
    """The request of `call` for one entry, in the queue of its model. `ended` is called with it once, when it has its end.

    That is its `output` and the last batch that it was in, its `dispatch`; or its `error`. A `schedule` without a timeout has that of the settings.
    `dispatch` and `waited` are there only while `ended` is called: a batch refers to its requests, and would be in a reference cycle with them.
    """

    __slots__ = ("_ended", "dispatch", "error", "output")

    def __init__(
        self, entry: QueueEntry, call: "InferenceCall", schedule: "Schedule", ended: Callable[["QueuedRequest"], None], trace: Any = None
    ) -> None:  # fmt: skip
        # RequestBase's constructor with its keyword arguments takes twice the time. A test compares the results of the two.
        service = call.service
        self.payload, self.kind, self.content_type, self.accept, self.rows, self.cost, self.key, self.large = entry
        self.priority, timeout = schedule
        self.timeout = timeout = service.facts.settings.timeout if timeout is None else timeout
        self.arrival = now = service.now()
        self.deadline = now + timeout
        self.frontend = call.frontend
        self.trace = trace
        begin(self)
        self._ended = ended
        self.output: Any = None
        self.error: WeirError | None = None
        self.dispatch: Dispatch | None = None

    @property
    def waited(self) -> float:
        """How many seconds it waited for a worker to start; 0 if none had to."""
        dispatch = self.dispatch
        return 0.0 if dispatch is None or dispatch.woken_at is None else dispatch.started_for(self.arrival)

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """End with the output."""
        self.output, self.dispatch = output, dispatch
        ended = self._ended
        del self._ended  # whoever is called may refer to this request
        ended(self)
        self.dispatch = None

    def fail(self, error: WeirError) -> None:
        """End with the error."""
        self.error = error
        ended = self._ended
        del self._ended
        ended(self)


class Gathering:
    """The requests that one call is divided into. The first error ends all of them; with `alone` each request ends by itself.

    `dispatch` is the batch of the first request, and `waited` how long the requests waited for a worker to start.
    """

    def __init__(self, call: InferenceCall, schedule: "Schedule", *, alone: bool) -> None:
        self._call = call
        self._schedule = schedule
        self._alone = alone
        self._left = 0
        self._taken = False  # whether the service has accepted one of them
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests: list[QueuedRequest] = []
        self.dispatch: Dispatch | None = None
        self.waited = 0.0

    async def run(self, entries: list[QueueEntry | WeirError]) -> list[QueuedRequest]:
        """Put `entries` into the queue. Return their requests, in order, when all have ended.

        `entries` is empty afterwards, so that each payload can be freed when its own request ends. Raises the first error, and cancels the other requests.
        With `alone`, an error is the end of its own request; the error that refuses a request is raised only while no other request has been accepted.
        Cancelling the task that awaits this cancels all requests.
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

    def _ended(self, request: QueuedRequest) -> None:
        """Count the end of one request. Release its payload now, because other requests of the same call may take long."""
        if request.error is None:
            drop_payload(request)
            self.waited = max(self.waited, request.waited)
        if self.requests and request is self.requests[0]:
            self.dispatch = request.dispatch
        self._left -= 1
        failed = not self._alone and request.error is not None
        if (failed or not self._left) and not self._over.done():
            self._over.set_result(None)

    def _submit(self, entry: QueueEntry | WeirError) -> None:
        # The first request has the span that the response names. The spans of the others are its siblings.
        trace = self._call.trace
        own = trace if not self.requests else child_of(trace)
        queued = REFUSED_ENTRY if isinstance(entry, WeirError) else entry
        request = QueuedRequest(queued, self._call, self._schedule, self._ended, own)
        if isinstance(entry, WeirError):
            refuse(request, entry)
        else:
            try:
                self._call.put(request)
            except WeirError as error:
                if not self._alone or not self._taken:
                    raise
                refuse(request, error)
            else:
                self._taken = True
        self.requests.append(request)

    def _raise_first(self) -> None:
        for request in self.requests:
            if request.error is not None:
                raise request.error

    def _withdraw(self) -> None:
        """Cancel the requests under way. Release the shared memory of outputs that nobody will read."""
        for request in self.requests:
            if not request.settled:
                self._call.service.cancel(request)
            for output in request.output if isinstance(request.output, list) else [request.output]:
                discard(output)


# Streams.


def stream_of(call: InferenceCall, entry: QueueEntry, schedule: "Schedule") -> StreamedCall:
    """Return the streamed call of one entry, for `read_parts`. The tensors of a request are one item, which is not divided."""
    service, settings = call.service, call.service.facts.settings
    timeout = settings.timeout if schedule.timeout is None else schedule.timeout
    return StreamedCall(
        entry.payload, service.now(), timeout, settings.stream_buffer, service.cancel, service.now, kind=Kind.ITEM,
        content_type=entry.content_type, accept=entry.accept, rows=entry.rows, cost=entry.cost, key=entry.key,
        priority=schedule.priority, large=entry.large, frontend=call.frontend, trace=call.trace,
    )  # fmt: skip


async def read_parts(call: InferenceCall, request: StreamedCall) -> AsyncGenerator[tuple[Any, bool], None]:
    """Submit `request`. Yield each output, and whether the model marked it as the last one.

    Closing the generator cancels the request. Raises what ModelHandle.submit raises, and the error that ends the request.
    """
    call.put(request)
    try:
        while True:
            try:
                part = await request.read()
            except StopAsyncIteration:
                return
            yield part
            del part  # frees it while the next one is awaited
    finally:
        request.close()


async def stream(
    service: "ModelHandle", request: InferenceRequest, call: InferenceCall
) -> AsyncGenerator[StreamPart, None]:  # fmt: skip
    """Yield the responses to `request`: exactly one if the model does not stream.

    Closing the generator, or cancelling the task, also cancels the request in its worker. Otherwise as Inference.infer.
    """
    if not service.facts.streaming:
        yield StreamPart(await service.inference.infer(service, request, call), True)
        return
    entries, schedule = read_entries(service, request, call.timeout)
    first = entries[0]
    if len(entries) > 1 or (first.kind is Kind.ITEMS and first.rows > 1):
        rows = sum(entry.rows for entry in entries)
        raise InvalidRequest(f"tensor 'input': has {rows} items, a stream takes one")
    item = first.payload[0] if first.kind is Kind.ITEMS else first.payload
    streamed = stream_of(call, first._replace(payload=item), schedule)
    async with aclosing(read_parts(call, streamed)) as parts:
        async for output, last in parts:
            yield StreamPart(response_of(service, request, [first.kind], [output]), last)


# Plain models.


def entries_for_one_answer(
    service: "ModelHandle", request: InferenceRequest, timeout: float | None
) -> tuple[list[QueueEntry], Schedule]:  # fmt: skip
    """Return the queue entries of a request for one response, and its schedule.

    Raises Unsupported if the model streams, and RequestErrors.
    """
    if service.facts.streaming:
        raise Unsupported(
            f"model {service.facts.label!r} streams its answers: send the request where streams are offered"
        )
    return read_entries(service, request, timeout)


def read_entries(
    service: "ModelHandle", request: InferenceRequest, timeout: float | None
) -> tuple[list[QueueEntry], Schedule]:  # fmt: skip
    """Return the queue entries of a request, and its schedule, which has a timeout. Raises RequestErrors."""
    schedule = schedule_of(request.parameters, service.facts.model)
    limits = [limit for limit in (timeout, schedule.timeout) if limit is not None]
    limit = min(limits) if limits else service.facts.settings.timeout
    return entries_of(service, request), Schedule(schedule.priority, limit)


class ModelInference:
    """Inference by a plain model: items and tensors enter its queue as they were read."""

    queues_items = True

    def queues_tensors(self, service: "ModelHandle") -> bool:
        """Return whether an InferenceRequest becomes one queue entry: always, unless the model measures its items."""
        return service.facts.takes_tensors or not service.facts.needs_measure

    def inputs(self, service: "ModelHandle") -> Sequence[Tensor]:
        """Return the model's inputs."""
        return service.facts.model.inputs if service.facts.takes_tensors else ITEM_INPUTS

    def outputs(self, service: "ModelHandle") -> Sequence[Tensor]:
        """Return the model's outputs."""
        return service.facts.model.outputs if service.facts.takes_tensors else ITEM_OUTPUTS

    async def infer(self, service: "ModelHandle", request: InferenceRequest, call: InferenceCall) -> InferenceResponse:
        """See Inference."""
        entries, schedule = entries_for_one_answer(service, request, call.timeout)
        kinds = [entry.kind for entry in entries]
        gathering = Gathering(call, schedule, alone=False)
        ended = await gathering.run([*entries])
        return response_of(service, request, kinds, [each.output for each in ended], gathering.waited)

    async def infer_items(self, head: ItemHead, body: bytes, call: InferenceCall) -> ItemsResponse:
        """See Inference."""
        entries = await call.read(bytes_to_read(head, body), lambda: item_entries(head, body))
        call.charge(sum([arrays_size(entry.payload) for entry in entries if isinstance(entry, QueueEntry)]))
        gathering = Gathering(call, Schedule(head.priority, head.timeout), alone=True)
        return items_response(head, await gathering.run(entries), gathering.dispatch)


class EndedRequest(Request, Protocol):
    """A request that has ended: with its `output`, or with its `error`."""

    output: Any
    error: WeirError | None


def items_response(
    head: ItemHead, requests: Sequence[EndedRequest], dispatch: Dispatch | None = None
) -> ItemsResponse:  # fmt: skip
    """Return the results of `requests`, all of which have ended; `dispatch` is the batch of the first one.

    Raises the error of a single item, or of a list that failed as a whole.
    """
    ends: list[Any] = []
    for request in requests:
        as_list = head.batch and request.kind is Kind.ITEMS
        if request.error is not None and (as_list or not head.batch):
            raise request.error
        ends.extend(request.output if as_list else [request.error or request.output])
    size = sum([text_size(array) for end in ends if isinstance(end, dict) for array in end.values()])
    arrival = requests[0].arrival if requests else 0.0
    return ItemsResponse(size, lambda: [_item_body(head, end) for end in ends], dispatch, arrival)


def _item_body(head: ItemHead, end: Any) -> bytes | WeirError:
    return end if isinstance(end, WeirError) else body_or_error(head, end)


def arrays_size(payload: Any) -> int:
    """Return how many bytes the arrays of a payload have; 0 if it is no dict of arrays, for it is then part of the body."""
    if not isinstance(payload, dict):
        return 0
    return sum([int(getattr(value, "nbytes", 0)) for value in payload.values()])


MODEL_INFERENCE = ModelInference()
