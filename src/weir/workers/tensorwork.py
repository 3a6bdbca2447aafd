"""What is different for tensor models: their entries are dicts of arrays, read from and written to the forms of doors.

Imported only for them, as numpy takes longer to load than all the rest of a worker.
"""

from collections.abc import Callable
from typing import Any

from weir.messages import JSON, KSERVE, MSGPACK, OBJECT
from weir.model import Model, is_batched
from weir.wire.tensors import rows_of, to_arrays, to_plain, to_text
from weir.wire.values import DECODE, ENCODE
from weir.workers.kservework import BodyReader, BodyWriter, head_of
from weir.workers.splitting import wrong_tensors


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
    json, msgpack = ENCODE[JSON], ENCODE[MSGPACK]
    name, _, version = label.partition("/")
    return {
        JSON: lambda arrays: json(to_text(arrays, model.outputs)),
        MSGPACK: lambda arrays: msgpack(to_plain(arrays, model.outputs)),
        KSERVE: BodyWriter(type(model), name, version),
    }


def heads_of(items: list[Any]) -> list[Any]:
    """Return what the writer for KSERVE must know of each entry besides the answer."""
    return list(map(head_of, items))


def part_of(model: Model) -> Callable[[Any], Any]:
    """Return the function that holds one answer of a streaming model against the tensors declared. It raises ModelError."""
    return lambda answer: to_arrays(answer, model.outputs, wrong_tensors)


def repeated(model: type[Model], example: Any, rows: int) -> list[Any]:
    """Return the example as often as it takes for about so many rows, at least once."""
    arrays = to_arrays(example, model.inputs)
    return [arrays] * max(1, rows // rows_of(arrays)) if is_batched(model) else [arrays]
