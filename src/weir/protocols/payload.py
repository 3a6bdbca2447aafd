"""What an inference request of the Open Inference Protocol is to the line, and what an output is in its answer.

Pure, so that every door that speaks the protocol shares it: HTTP (with and without the fast lane), gRPC and WebSocket.
"""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from weir.errors import InvalidRequest, ModelError, TooLarge, Unsupported, WeirError, brief
from weir.messages import JSON, Kind
from weir.model import Tensor, is_tensor_model
from weir.protocols.metadata import ITEM_INPUTS, ITEM_OUTPUTS, outputs_of
from weir.protocols.payloads import QueueEntry, as_work, tensor_work
from weir.serving.delivery import is_block
from weir.serving.service import LONGEST_TIMEOUT
from weir.wire.inference import (
    InferenceRequest,
    InferenceResponse,
    Parameters,
    TensorValue,
    add_batch,
    bind,
    take_batch,
)
from weir.wire.values import decode, encode

if TYPE_CHECKING:
    from weir.serving.service import Service

_LOWEST = 1 << 32  # of the priorities that requests can state
_MICROSECOND = 1e-6

# Parameters that ask for what is not offered: an answer that overlooked them would be a wrong one.
_REFUSED = {"sequence_id": "sequence", "classification": "classification"}


class Schedule(NamedTuple):
    """When a request wants to be served: `priority` as in the line (higher goes first), `timeout` in seconds or None."""

    priority: int
    timeout: float | None


def schedule_of(parameters: Parameters) -> Schedule:
    """Read `priority` and `timeout` from the parameters of a request.

    In the protocol 1 is the highest priority and 0 says nothing; those who state one go before those who do not. A
    timeout is in microseconds; 0 says nothing. Raises InvalidRequest naming the parameter, its value and the rule, and
    Unsupported for a parameter that asks for an extension that there is not.
    """
    if not parameters:
        return NO_WISH
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


NO_WISH = Schedule(0, None)


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
    declared = {tensor.name for tensor in outputs_of(service)}
    seen = set()
    for output in request.outputs or ():
        if output.name not in declared:
            names = ", ".join(map(repr, declared))
            raise InvalidRequest(f"output {output.name!r}: not one of {names}, which model {service.name!r} has")
        if output.name in seen:
            raise InvalidRequest(f"output {output.name!r}: is asked for twice")
        seen.add(output.name)
        _refuse_others(output.parameters)


def response_of(
    service: "Service", request: InferenceRequest, kinds: Sequence[Kind], outputs: Sequence[Any]
) -> InferenceResponse:
    """Return the answer to `request`, whose works were of `kinds` and ended with `outputs`.

    The outputs come in the declared order, only those asked for. Raises the error of an item that failed, which names
    the item.
    """
    if is_tensor_model(service.model):
        values = _asked_arrays(service, request, outputs[0])
    else:
        values = [_items(_flat(kinds, outputs))]
    response = InferenceResponse(service.name, values, version=service.version, id=request.id)
    if request.without_batch:
        take_batch(response)
    return response


def _asked_arrays(service: "Service", request: InferenceRequest, arrays: Any) -> list[TensorValue]:
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
