"""What is different for tensor models: their entries are dicts of arrays, joined for `predict` and divided afterwards.

Imported only for them, as numpy takes longer to load than all the rest of a worker.
"""

from collections.abc import Callable
from typing import Any

from weir.errors import ModelError
from weir.messages import JSON, KSERVE, MSGPACK, OBJECT
from weir.model import Model
from weir.wire.tensors import concatenate, divide, rows_of, to_arrays, to_text
from weir.wire.values import DECODE, ENCODE
from weir.workers.kservework import BodyReader, BodyWriter, head_of


def readers(model: Model) -> dict[str, Callable[[Any], Any]]:
    """Return how an entry is read from each content type."""

    def arrays(value: Any) -> Any:
        return to_arrays(value, model.inputs)

    def arrays_in(content_type: str) -> Callable[[Any], Any]:
        decode = DECODE[content_type]
        return lambda payload: arrays(decode(payload))

    return {
        OBJECT: arrays, JSON: arrays_in(JSON), MSGPACK: arrays_in(MSGPACK), KSERVE: BodyReader(type(model)),
    }  # fmt: skip


def writers(model: Model, label: str) -> dict[str, Callable[..., bytes]]:
    """Return how an entry's answer is written for each content type; for KSERVE with the entry's head. `label`: name of
    the service, and after a slash its version, if it has one."""
    json = ENCODE[JSON]
    name, _, version = label.partition("/")
    return {
        JSON: lambda arrays: json(to_text(arrays)),
        MSGPACK: ENCODE[MSGPACK],
        KSERVE: BodyWriter(type(model), name, version),
    }


def heads_of(items: list[Any]) -> list[Any]:
    """Return what the writer for KSERVE must know of each entry besides the answer."""
    return list(map(head_of, items))


def predictor(model: Model) -> Callable[[list[Any]], Any]:
    """Return the function from a list of entries to what `predict` returns for all their rows."""
    return lambda entries: model.predict(concatenate(entries))


def judge_of(model: Model) -> Callable[[Any, list[Any]], list[Any]]:
    """Return the function that divides what `predict` returned among the entries. It raises ModelError for anything but
    the tensors declared, with as many rows as the entries have."""

    def judge(returned: Any, entries: list[Any]) -> list[Any]:
        arrays = to_arrays(returned, model.outputs, _wrong_tensors)
        counts = [rows_of(entry) for entry in entries]
        if rows_of(arrays) != sum(counts):
            raise ModelError(f"predict returned {rows_of(arrays)} rows for a batch of {sum(counts)}")
        return list(divide(arrays, counts))

    return judge


def part_of(model: Model) -> Callable[[Any], Any]:
    """Return the function that holds one answer of a streaming model against the tensors declared. It raises ModelError."""
    return lambda answer: to_arrays(answer, model.outputs, _wrong_tensors)


def repeated(model: type[Model], example: Any, rows: int) -> list[Any]:
    """Return the example as often as it takes for about so many rows, at least once."""
    arrays = to_arrays(example, model.inputs)
    return [arrays] * max(1, rows // rows_of(arrays))


def _wrong_tensors(text: str) -> ModelError:
    return ModelError(f"predict returned wrong tensors: {text}")
