"""What a JSON header with binary tensors after it means, for headers that come again byte by byte.

Clients that send tensors of one shape send the same header over and over: then the arrays are cut out of the body, and the
header of the answer is written, as they were before.
"""

from typing import Any, NamedTuple

import numpy

from weir.protocols.kserve.replies import Reply
from weir.protocols.response import Headers
from weir.protocols.shared_memory import wants_regions
from weir.serving.inference import QueueEntry, Schedule
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.kserve_binary import contiguous_bytes
from weir.wire.tensors import DTYPES, Arrays

_MAX_REPLIES = 64  # whose heads are kept for each header


class _Place(NamedTuple):
    """Where an array lies: `offset` counts from the end of the header."""

    name: str
    shape: tuple[int, ...]
    dtype: numpy.dtype[Any]
    offset: int


class Layout:
    """The meaning of `header`. `asked` is the request without its inputs, `work` what it is to the line, without them."""

    __slots__ = ("_places", "_replies", "asked", "header", "schedule", "wants_regions", "work")

    def __init__(
        self, header: bytes, places: list[_Place], asked: InferenceRequest, work: QueueEntry, schedule: Schedule
    ) -> None:
        self.header = header
        self.asked = asked
        self.wants_regions = wants_regions(asked)
        self.work = work
        self.schedule = schedule
        self._places = places
        # Of outputs that have been answered: what they were -> headers, JSON, and the names of those that follow it.
        self._replies: dict[tuple[Any, ...], tuple[Headers, bytes | memoryview, list[str]]] = {}

    def arrays(self, body: memoryview) -> Arrays:
        """Return the arrays in a `body` with this header and the same length, as read-only views."""
        rest = body.toreadonly()[len(self.header) :]
        return {name: numpy.ndarray(shape, dtype, rest, offset) for name, shape, dtype, offset in self._places}

    def reply(self, output: Arrays) -> Reply | None:
        """Return the reply with the tensors of `output`, if one like it has been remembered."""
        known = self._replies.get(_described(output))
        if known is None:
            return None
        headers, json, names = known
        return Reply(headers, [json, *[contiguous_bytes(output[name]) for name in names]])

    def remember(self, output: Arrays, response: InferenceResponse, reply: Reply) -> None:
        """Keep the head of `reply`, which was made of `output` by way of `response`, if it depends on nothing else."""
        numbers = all(DTYPES[value.datatype] == value.array.dtype != object for value in response.outputs)
        if numbers and len(reply.parts) == 1 + len(response.outputs) and len(self._replies) < _MAX_REPLIES:
            names = [value.name for value in response.outputs]
            self._replies[_described(output)] = reply.headers, reply.parts[0], names


def _described(output: Arrays) -> tuple[Any, ...]:
    return tuple([(name, array.shape, array.dtype) for name, array in output.items()])


def layout_of(
    header: bytes, body_length: int, asked: InferenceRequest, work: QueueEntry, schedule: Schedule
) -> Layout | None:
    """Return the layout of a request that was read from `header` and the bytes after it, if these are all its inputs, and
    numbers."""
    places, offset = {}, 0
    for value in asked.inputs:
        array = value.array
        if array.dtype.kind == "O":
            return None
        places[value.name] = _Place(value.name, array.shape, array.dtype, offset)
        offset += array.nbytes
    if len(header) + offset != body_length:  # an input stands in the JSON, or in shared memory
        return None
    bare = InferenceRequest(
        asked.model, [], version=asked.version, id=asked.id, outputs=asked.outputs, parameters=asked.parameters
    )
    bare.without_batch = asked.without_batch
    return Layout(header, [places[name] for name in work.payload], bare, work._replace(payload=None), schedule)
