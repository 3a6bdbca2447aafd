"""Says of a call in process what a door says of a request: kind, rows, cost, batch key."""

from typing import Any

from weir.errors import InvalidRequest, ModelError, RequestError
from weir.manager.call import Call, ThreadCall
from weir.manager.streamed import Streamed
from weir.messages import Kind, with_key
from weir.model import Measure, Model, is_batched, is_tensor_model, overrides


def measure(model: type[Model], item: Any) -> Measure:
    """Return what `model.measure` says of `item`.

    Raises the RequestError that it raises, InvalidRequest for any other exception or a size that cannot be, and ModelError
    if it returns something else than it may.
    """
    try:
        said = model.measure(item)
    except RequestError:
        raise
    except Exception as error:
        raise InvalidRequest(f"{model.__name__}.measure cannot measure this item: {error!r}") from error
    if said is None:
        return Measure()
    measured = Measure(said) if isinstance(said, int) else said
    if not _is_measure(measured):
        raise ModelError(
            f"{model.__name__}.measure returned {said!r:.200}: must be rows, None, or a Measure whose key is hashable"
        )
    if measured.rows < 1 or not measured.cost >= 0:
        raise InvalidRequest(f"{model.__name__}.measure returned {said!r}: rows must be 1 or more and cost 0 or more")
    return measured


def _is_measure(said: Any) -> bool:
    if not (isinstance(said, Measure) and isinstance(said.rows, int) and isinstance(said.cost, (int, float))):
        return False
    return is_hashable(said.key)


def is_hashable(key: Any) -> bool:
    """Tell whether `key` can be a batch key: `hash` works, also of what is inside."""
    try:
        hash(key)
    except Exception:  # whatever a stranger's __hash__ raises
        return False
    return True


def describe(model: type[Model], call: Call | ThreadCall | Streamed) -> None:
    """Set on `call` what its item says of itself. Raises as `measure` does."""
    if is_tensor_model(model):
        _describe_tensors(model, call)
        if not overrides(model, "measure"):
            return
    measured = measure(model, call.payload)
    if not is_tensor_model(model):
        call.rows = measured.rows
    call.cost = measured.cost
    call.key = with_key(call.key, measured.key)


def _describe_tensors(model: type[Model], call: Call | ThreadCall | Streamed) -> None:
    from weir.wire.tensors import rows_of, shape_key, to_arrays  # only tensor models need numpy

    call.payload = to_arrays(call.payload, model.inputs)
    alone = not is_batched(model)
    call.kind = Kind.ITEM if model.streaming or alone else Kind.TENSORS  # a stream is not divided
    call.rows = 1 if alone else rows_of(call.payload)
    call.cost = float(call.rows)
    shapes = None if model.streaming else shape_key(call.payload, model.inputs)  # streams are not joined
    call.key = with_key(call.key, shapes)
