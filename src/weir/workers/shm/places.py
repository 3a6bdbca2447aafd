"""How large payloads and results get into the arenas and out again: what frames.py asks for as Places and Fetch."""

import threading
from typing import Any

import numpy

from weir.messages import LENT, OBJECT, Batch, Events
from weir.wire.cells import Ref
from weir.workers.shm.arena import Arena, ArenaBlock, Mapping, ResultBlock, Results


class BatchPlaces:
    """In the server, for one batch: puts payloads into the arena, or retains those that lie there already.

    `blocks` are the shares that the batch has; `release` gives them back.
    """

    __slots__ = ("_arena", "blocks")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.blocks: list[ArenaBlock] = []

    def place(self, payload: Any) -> Ref | None:
        """Return where `payload` lies now; None if it is not in the arena and there is no room."""
        if isinstance(payload, ArenaBlock) and payload.arena is self._arena:
            payload.retain()
            self.blocks.append(payload)
            return payload.offset, payload.view.nbytes
        raw = memoryview(payload.view if isinstance(payload, (ArenaBlock, ResultBlock)) else payload).cast("B")
        return self._found(raw) or self._copied(raw)

    def take_back(self, ref: Ref) -> None:
        """Give one share in the place at `ref` back."""
        inside = (position for position, block in enumerate(self.blocks) if block.holds(*ref))
        self.blocks.pop(next(inside)).release()

    def release(self) -> None:
        """Give all shares back."""
        while self.blocks:
            self.blocks.pop().release()

    def _found(self, raw: memoryview) -> Ref | None:
        found = find_array(self._arena, raw)
        if found is None:
            return None
        block, offset = found
        block.retain()
        self.blocks.append(block)
        return offset, raw.nbytes

    def _copied(self, raw: memoryview) -> Ref | None:
        block = self._arena.reserve(raw.nbytes)
        if block is None:
            return None
        block.view[:] = raw
        self.blocks.append(block)
        return block.offset, raw.nbytes


class ResultFetch:
    """In the server: encoded results stay where the worker put them. What backs Python values is copied out, because
    nobody can say when the last of them is gone; unless it `lends`, for values that are arrays say it themselves."""

    def __init__(self, results: Results, *, lends: bool = False) -> None:
        self._results = results
        self._lends = lends

    def cell(self, ref: Ref) -> ResultBlock:
        """Return the place at `ref`."""
        return self._results.block(*ref)

    def buffer(self, ref: Ref) -> Any:
        """Return a copy of the place at `ref`, which the worker may have back; or that place, if it `lends`."""
        block = self._results.block(*ref)
        if self._lends:
            return lease(block)
        copy = bytearray(block.view)
        block.release()
        return copy


def as_values(events: Events, accepts: str | list[str], *, lent: bool = False) -> None:
    """Copy out those results that are Python values: bytes that a model returned, which travel like an encoded answer, and
    arrays that were `lent` to those who want them for good."""
    outputs = events.outputs
    for position, output in enumerate(outputs):
        index = position if events.indices is None else events.indices[position]
        accept = accepts if isinstance(accepts, str) else accepts[index]
        if isinstance(output, ResultBlock):
            if accept in (OBJECT, LENT):
                outputs[position] = bytes(output.view)
                output.release()
        elif lent and accept == OBJECT:
            outputs[position] = owned(output)


def find_array(arena: Arena, raw: memoryview) -> tuple[ArenaBlock, int] | None:
    """Return the place in `arena` of which the array that `raw` is the memory of is a part, and where it begins."""
    array: Any = raw.obj
    if getattr(array, "nbytes", None) != raw.nbytes:
        return None  # of a part of an array, nobody says where it begins
    interface = getattr(array, "__array_interface__", None)
    return None if interface is None else arena.find(interface["data"][0], raw.nbytes)


class ResultPlaces:
    """In the worker: puts results into its own arena, or retains those that the model has put there itself.

    Thread-safe, because with two batches at once another thread hears which places have been read.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._open: list[ArenaBlock] = []  # given to the model for the batch that it computes

    def place(self, payload: Any) -> Ref | None:
        """Return where `payload` lies now; None if it is not in the arena and there is no room."""
        raw = memoryview(payload).cast("B")
        with self._lock:
            found = find_array(self._arena, raw) if self._open else None
            if found is not None:
                block, offset = found
                block.retain()
                return offset, raw.nbytes
            reserved = self._arena.reserve(raw.nbytes)
        if reserved is None:
            return None
        reserved.view[:] = raw
        return reserved.offset, raw.nbytes

    def take_back(self, ref: Ref) -> None:
        """Give the share in the place at `ref` back that `place` took."""
        with self._lock:
            block = self._arena.at(*ref)
            if block is not None:
                block.release()

    def open(self, size_bytes: int) -> memoryview | None:
        """Return memory for the model to write a result into, until `close`; None if there is no room."""
        with self._lock:
            block = self._arena.reserve(size_bytes)
        if block is None:
            return None
        self._open.append(block)
        return block.view

    def close(self) -> None:
        """Take back what the model was given for a batch, but for what `place` has named."""
        with self._lock:
            while self._open:
                self._open.pop().release()


class PayloadFetch:
    """In the worker: encoded payloads are read where they lie. What backs Python values is copied out, so that the
    model may change and keep them; unless it `lends`, to a tensor model that does neither."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self.lends = False

    def cell(self, ref: Ref) -> memoryview:
        """Return the bytes at `ref`, good until the batch is answered."""
        return self._mapping.view(*ref)

    def buffer(self, ref: Ref) -> bytearray | memoryview:
        """Return a copy of the bytes at `ref`; or, if it `lends`, the bytes, good until the batch is answered."""
        view = self._mapping.view(*ref)
        return view if self.lends else bytearray(view)


def own_values(batch: Batch) -> None:
    """Copy out those payloads that are Python values: bytes, which travel like an encoded payload."""
    types, payloads = batch.content_types, batch.payloads
    if types == OBJECT or not isinstance(types, str):
        for index, payload in enumerate(payloads):
            if type(payload) is memoryview and (types if isinstance(types, str) else types[index]) == OBJECT:
                payloads[index] = bytes(payload)


# Results that are arrays, read where the worker put them: the place is given back when the last array over it is gone.
#
# Imported only for tensor models, as it needs numpy.


class Lease(numpy.ndarray[Any, Any]):
    """The bytes of a result, not writable, and the share in its place. Arrays over it keep it alive."""

    _block: ResultBlock | None = None  # views and copies of this array have none

    def __del__(self) -> None:
        if self._block is not None:
            self._block.release()


def lease(block: ResultBlock) -> Lease:
    """Return the bytes of `block` as an array that owns the one share in it."""
    # Made like this, and not as a view of an ordinary array: numpy would have what is made of it refer to that instead.
    leased = Lease(len(block.view), numpy.uint8, block.view)
    leased._block = block
    return leased


def owned(value: Any) -> Any:
    """Return a tensor model's answer such that its receiver may keep it and write to it."""
    if not isinstance(value, dict):
        return value
    return {name: array if array.flags.writeable else array.copy() for name, array in value.items()}
