"""Says of a call in process what a door says of a request: rows, cost, batch key, kind."""

from typing import Any

from weir.errors import InvalidRequest, RequestError
from weir.manager.call import Call, ThreadCall
from weir.model import Measure, Model


def measure(model: type[Model], item: Any) -> Measure:
    """Return what `model.measure` says of `item`.

    Raises the RequestError that it raises, and InvalidRequest for any other exception or an answer against its rules.
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
    if measured.rows < 1 or not measured.cost >= 0:
        raise InvalidRequest(f"{model.__name__}.measure returned {said!r}: rows must be 1 or more and cost 0 or more")
    return measured


def describe(model: type[Model], call: Call | ThreadCall, small_request_size: int) -> None:
    """Set on `call` what its item says of itself. Raises InvalidRequest."""
    measured = measure(model, call.payload)
    call.rows = measured.rows
    call.cost = measured.cost
    if measured.key is not None:
        call.key = measured.key if call.key is None else (call.key, measured.key)
    call.large = 0 < small_request_size < call.rows
