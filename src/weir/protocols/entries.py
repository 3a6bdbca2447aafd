"""Makes requests the queue's entries, and the model's outputs the values of a response.

A protocol reads a request in one of two forms: a body of items (Weir's own protocol: one item or a list of items), or an InferenceRequest of named tensors
(the Open Inference Protocol). This module divides both forms into queue entries, and makes responses of the outputs, without I/O.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy

from weir.errors import InvalidRequest, ModelError, TooLarge, Unsupported, WeirError, brief
from weir.messages import BULK, JSON, LENT, LONGEST_TIMEOUT, MSGPACK, OBJECT, OCTETS, Form, Kind
from weir.model import Measure, Model, Tensor, is_batched
from weir.protocols.account import charge_values
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
from weir.wire.tensors import Arrays, rows_of, shape_key, to_arrays, to_plain, to_text
from weir.wire.values import UNWRITABLE, decode, encode, split, values_bytes
from weir.workers.executor import is_block

if TYPE_CHECKING:
    from weir.serving.handle import ModelFacts, ModelHandle

# The Open Inference Protocol sees a model of items as one BYTES tensor in and one out. Each element is a JSON document.
ITEM_INPUTS = (Tensor("input", "BYTES", (-1,)),)
ITEM_OUTPUTS = (Tensor("output", "BYTES", (-1,)),)

_LOWEST = 1 << 32  # the lowest priority that a request can state: 1 is the highest
_MICROSECOND = 1e-6
CLASS = "class"  # the parameter with the class of work: interactive or bulk

# Parameters of Triton's extensions that Weir does not have. They are refused, because a response that ignored them would be wrong.
_REFUSED = {"sequence_id": "sequence", "classification": "classification"}
_OF_SERVER = ("binary_data_output", CLASS, "priority", "timeout")  # parameters that no model gets


def inputs_of(facts: "ModelFacts") -> Sequence[Tensor]:
    """Return the tensors that a request for the model has; none if it takes any."""
    return () if facts.model.takes_requests else facts.model.inputs if facts.takes_tensors else ITEM_INPUTS


def outputs_of(facts: "ModelFacts") -> Sequence[Tensor]:
    """Return the tensors that a response of the model has; none if they are not declared."""
    return () if facts.model.takes_requests else facts.model.outputs if facts.takes_tensors else ITEM_OUTPUTS


class ItemHead(Protocol):
    """The head of a request for items.

    `batch`: the body is a list of items, each with a result of its own. `form` is that of a request for one item of one row.
    """

    @property
    def service(self) -> "ModelHandle": ...
    @property
    def batch(self) -> bool: ...
    @property
    def form(self) -> Form: ...


class QueueEntry(NamedTuple):
    """The form and the payload of a request that is not in the queue yet."""

    form: Form
    payload: Any


def item_entries(head: ItemHead, body: bytes) -> list[QueueEntry | WeirError]:
    """Return the queue entries of a `body`, which is decompressed.

    There is one entry for one item, and one for a whole list that the worker decodes. A list whose items are measured, or are tensors, has an entry for
    each item, or the error that refuses the item.

    Raises InvalidRequest for an empty or malformed body; TooLarge for a list that can never fit into the queue, before its items are read; and Unsupported
    for a model that takes no items.
    """
    if head.service.facts.model.takes_requests:
        name = head.service.facts.name
        raise Unsupported(f"model {name!r}: declares no inputs, so it takes requests at /v2/models/{name}/infer only")
    if not body and not may_be_empty(head):
        raise empty_body(head)
    if not head.batch:
        return [item_entry(head, body)]
    if divides_list(head):
        charge_values(len(body), partial(values_bytes, body, head.form.content_type))
    most = head.service.facts.batching.max_queue_size
    items = split(body, head.form.content_type, most)
    if items is None:
        raise TooLarge(f"body of more than {most} items: must have at most {most} (max_queue_size)")
    if not divides_list(head):
        return [_items_entry(head.service, head.form, items)] if items else []
    entries = [_item_or_error(head, item) for item in items]
    rows = sum(entry.form.rows for entry in entries if isinstance(entry, QueueEntry))
    if rows > most:
        raise TooLarge(f"body of {rows} rows: must have at most {most} (max_queue_size)")
    return entries


# Reading a list item by item takes this many times as long per byte.
_ITEM_BYTES = 8


def bytes_to_read(head: ItemHead, body: bytes) -> int:
    """Return about how many bytes `item_entries` has to read of `body`: none of an item that the worker decodes; those of a list that is read item by item
    count more."""
    if not divides_list(head):
        return len(body) if head.batch else 0
    return len(body) * (_ITEM_BYTES if head.batch else 1)


def divides_list(head: ItemHead) -> bool:
    """Return whether a list is read item by item, so that each item has a queue entry of its own."""
    return head.service.facts.needs_measure or head.service.facts.takes_tensors


def may_be_empty(head: ItemHead) -> bool:
    """Return whether an empty body can be an item: of octets, or of a content type that the model declares."""
    return not head.batch and head.form.content_type not in (JSON, MSGPACK)


def empty_body(head: ItemHead) -> InvalidRequest:
    """Return the error for an empty body."""
    return InvalidRequest(f"body: is empty, must be {head.form.content_type}")


def item_entry(head: ItemHead, body: bytes) -> QueueEntry:
    """Return the queue entry of one item: a body that is not compressed, or an element of a list. Raises RequestErrors."""
    facts, form = head.service.facts, head.form
    if divides_list(head) and not head.batch:
        charge_values(len(body), partial(values_bytes, body, form.content_type))
    if facts.takes_tensors:
        return tensor_entry(head.service, form, to_arrays(decode(body, form.content_type), facts.model.inputs))
    if not facts.needs_measure or form.content_type not in (JSON, MSGPACK, OCTETS):
        return QueueEntry(form, body)
    measured = facts.measure(body if form.content_type == OCTETS else decode(body, form.content_type))
    return _measured_entry(head.service, form, measured, body)


def _item_or_error(head: ItemHead, body: bytes) -> QueueEntry | WeirError:
    try:
        return item_entry(head, body)
    except WeirError as error:
        return error


def tensor_entry(service: "ModelHandle", form: Form, arrays: Arrays) -> QueueEntry:
    """Return the queue entry of `arrays`, which have the names, dtypes and shapes that the model declares.

    Raises TooLarge for more rows than the queue can ever hold, and what the model's `measure` raises.
    """
    alone = not is_batched(service.facts.model)
    # Streams share no batches.
    shapes = None if service.facts.streaming else shape_key(arrays, service.facts.model.inputs)
    rows, key = 1 if alone else rows_of(arrays), _joined(shapes, form.key)
    cost = float(rows)
    if service.facts.needs_measure:
        measured = service.facts.measure(arrays)
        cost, key = measured.cost, _joined(measured.key, key)
    kind = Kind.ITEM if alone else Kind.TENSORS
    made = form.replaced(kind=kind, rows=rows, cost=cost, key=key, content_type=OBJECT, accept=LENT)
    return QueueEntry(_checked(service, made), arrays)


def _joined(measured: Any, given: Any) -> Any:
    """Return the batch key made of two keys. Calls in process make the same one, so that they share batches."""
    return measured if given is None else (measured, given)


def _items_entry(service: "ModelHandle", form: Form, items: list[Any]) -> QueueEntry:
    made = form.replaced(kind=Kind.ITEMS, rows=len(items), cost=float(len(items)))
    return QueueEntry(_checked(service, made), items)


def _measured_entry(service: "ModelHandle", form: Form, measured: Measure, payload: Any) -> QueueEntry:
    made = form.replaced(rows=measured.rows, cost=measured.cost, key=_joined(measured.key, form.key))
    return QueueEntry(_checked(service, made), payload)


def _checked(service: "ModelHandle", form: Form) -> Form:
    """Return `form`. Raises TooLarge for more rows than the queue can ever hold."""
    most = service.facts.batching.max_queue_size
    if form.rows > most:
        raise TooLarge(f"body of {form.rows} rows: must have at most {most} (max_queue_size)")
    return form


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


def entries_of(service: "ModelHandle", request: InferenceRequest, form: Form) -> list[QueueEntry]:
    """Return the queue entries of `request`: one, or one for each item if the model measures its items. `form` has what they have in common.

    Raises RequestErrors naming tensor, value and rule.
    """
    if service.facts.model.takes_requests:
        return [_whole_entry(request, form)]
    check_outputs(outputs_of(service.facts), request, service.facts.name)
    if service.facts.takes_tensors:
        add_batch(request, service.facts.model.inputs)
        entry = tensor_entry(service, form, bind(request.inputs, service.facts.model.inputs))
        if service.facts.model.keeps_head:
            entry = entry._replace(payload=keep_head(entry.payload, request, entry.form.rows))
        return [entry]
    given = [(each.name, each.datatype) for each in request.inputs]
    if given != [("input", "BYTES")]:
        raise InvalidRequest(
            f"tensors {brief(given)}: model {service.facts.name!r} takes items: send one tensor 'input' of BYTES, whose elements are "
            "JSON documents, or send the items to another endpoint, such as /infer"
        )
    array = bind(request.inputs, ITEM_INPUTS)["input"]
    most = service.facts.batching.max_queue_size
    if len(array) > most:  # before each item is read
        raise TooLarge(f"body of {len(array)} rows: must have at most {most} (max_queue_size)")
    items, form = _documents(service, array.tolist()), form.replaced(content_type=JSON, accept=JSON)
    if not service.facts.needs_measure:
        return [_items_entry(service, form, items)]
    return [_document_entry(service, form, item, index) for index, item in enumerate(items)]


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


def _document_entry(service: "ModelHandle", form: Form, item: bytes, index: int) -> QueueEntry:
    try:
        measured = service.facts.measure(decode(item, JSON))
    except WeirError as error:
        raise error.at("tensor 'input'", index) from error
    return _measured_entry(service, form, measured, item)


def _whole_entry(request: InferenceRequest, form: Form) -> QueueEntry:
    """Return the entry of a whole request; see Model.takes_requests. Only requests of equal names, datatypes, lengths and parameters share a batch."""
    inputs = [(each.name, each.datatype, each.array, each.parameters) for each in request.inputs]
    parameters = {name: value for name, value in request.parameters.items() if name not in _OF_SERVER}
    outputs = [(each.name, each.parameters) for each in request.outputs or ()]
    item = {"id": request.id, "parameters": parameters, "inputs": inputs, "outputs": outputs}
    rows = {array.shape[:1] for _, _, array, _ in inputs}
    alone = len(rows) != 1 or rows == {()} or bool(outputs)
    described = [(name, datatype, array.shape[1:], *sorted(more.items())) for name, datatype, array, more in inputs]
    key = object() if alone else (*described, *sorted(request.parameters.items()))
    return QueueEntry(form.replaced(key=key, content_type=OBJECT, accept=OBJECT), item)  # rows are requests here


def check_outputs(declared: Sequence[Tensor], request: InferenceRequest, model: str) -> None:
    """Raise InvalidRequest or Unsupported unless every requested output is `declared` by the `model` and is requested once."""
    known = {tensor.name for tensor in declared}
    seen = set()
    for output in request.outputs or ():
        if output.name not in known:
            names = ", ".join(map(repr, known))
            raise InvalidRequest(f"output {output.name!r}: not one of {names}, which model {model!r} has")
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

    If it has `waited` some seconds for a worker to start, its parameter `start_time` says so. It has the requested outputs, in the order in which the model declares them. Raises the error of the first item that failed, with the item's index.
    """
    parameters: Parameters = {}
    if service.facts.model.takes_requests:
        values = [TensorValue(*each) for each in outputs[0]["outputs"]]
        parameters = outputs[0]["parameters"]
    elif service.facts.takes_tensors:
        values = _requested_arrays(service, request, outputs[0])
    else:
        values = [_items(_flat(kinds, outputs))]
    response = InferenceResponse(
        service.facts.name, values, version=service.facts.version, id=request.id, parameters=parameters
    )
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
        raise ModelError(f"output {missing[0]!r}: is missing in the model's result")
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


def scheduled(
    service: "ModelHandle", request: InferenceRequest, timeout: float | None, frontend: str, caller: str, route: str
) -> Form:
    """Return what the queue entries of `request` have in common, whose caller has stated a `timeout` in seconds or None. Raises what `schedule_of` raises."""
    schedule = schedule_of(request.parameters, service.facts.model)
    limits = [limit for limit in (timeout, schedule.timeout) if limit is not None]
    limit = min(limits) if limits else service.facts.settings.timeout
    return Form(limit, priority=schedule.priority, frontend=frontend, caller=caller, route=route)


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
        as_values = to_text if head.form.accept == JSON else to_plain
        return encode(as_values(tensors, head.service.facts.model.outputs), head.form.accept)
    except UNWRITABLE as error:
        failure = ModelError(f"the response cannot be written as {head.form.accept}: {error}")
        failure.__cause__ = error
        return failure


def arrays_size(payload: Any) -> int:
    """Return how many bytes the arrays of a payload have; 0 if it is not a dict of arrays, for it is then part of the body."""
    if not isinstance(payload, dict):
        return 0
    return sum([int(getattr(value, "nbytes", 0)) for value in payload.values()])
