"""Bounded shared memory for large payloads and results.

An arena is written by the process that allocates in it, and read by another process. It has no name: it is a file in memory whose descriptor the
reader inherits, so it vanishes with the last process that holds it, however that process ends. It is sealed against growing and shrinking, and
a place is given out only after its memory has been set aside, so that no access can fail with SIGBUS.

    server: Arena of requests  ->  worker: Mapping, read-only
    worker: Arena of results   ->  server: Results; places that were read are freed with the next frame

The classes at the end put the payloads and results of batches into arenas and take them out again: `wire/frames.py` uses them as Places and Fetch.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable
from typing import Any

from weir.messages import LENT, OBJECT, Batch, Events
from weir.wire.cells import Ref

_RUN = 4  # a place that does not follow the last one is put where this many of its length fit, if possible
ALIGNMENT = 64  # bytes: a cache line, and what vector instructions want of an array


class Allocator:
    """Says which places in a range of `size_bytes` are taken; it has no memory itself. Each call costs two or three binary searches.

    A new place comes after the last one, or else where it fits best, at the lowest address among equals. So places that are allocated one after
    the other lie one after the other, and the inputs of a batch need not be copied together (tensors.adjoined). No such run goes further
    than twice what is taken: low addresses are reused soon, while they are still in caches, and memory that was never needed is never touched.
    Free neighbours are joined at once.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // ALIGNMENT * ALIGNMENT
        self.free_bytes = self.size_bytes
        self._taken: dict[int, int] = {}  # offset -> length
        self._lengths: dict[int, int] = {}  # free places: offset -> length
        self._offsets: dict[int, int] = {}  # free places: end -> offset
        self._sorted: list[tuple[int, int]] = []  # free places: (length, offset)
        self._end = 0  # of the last place that was allocated
        if self.size_bytes:
            self._insert(0, self.size_bytes)

    def __len__(self) -> int:
        return len(self._taken)

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of a place of `size_bytes`, aligned to 64, or None when no free place is as long."""
        length = max(1, -(-size_bytes // ALIGNMENT)) * ALIGNMENT
        offset = self._following(length)
        if offset is None:
            offset = self._fitting(_RUN * length)
        if offset is None:
            offset = self._fitting(length)
        if offset is None:
            return None
        found = self._lengths[offset]
        self._remove(offset, found)
        if found > length:
            self._insert(offset + length, found - length)
        self._taken[offset] = length
        self.free_bytes -= length
        self._end = offset + length
        return offset

    def _following(self, length: int) -> int | None:
        """Return the end of the last place if there is room after it, and it is not too far away."""
        taken_bytes = self.size_bytes - self.free_bytes
        end = self._end
        return end if end <= 2 * taken_bytes and self._lengths.get(end, 0) >= length else None

    def _fitting(self, length: int) -> int | None:
        """Return the free place that fits best; None if none is as long."""
        position = bisect_left(self._sorted, (length, 0))
        return None if position == len(self._sorted) else self._sorted[position][1]

    def free(self, offset: int) -> None:
        """Free the place at `offset`. Raises KeyError if it is not taken; nothing is changed then."""
        length = self._taken.pop(offset)
        self.free_bytes += length
        following = self._lengths.get(offset + length)
        if following is not None:
            self._remove(offset + length, following)
            length += following
        before = self._offsets.get(offset)
        if before is not None:
            self._remove(before, offset - before)
            offset, length = before, length + offset - before
        self._insert(offset, length)

    def _insert(self, offset: int, length: int) -> None:
        self._lengths[offset] = length
        self._offsets[offset + length] = offset
        insort(self._sorted, (length, offset))

    def _remove(self, offset: int, length: int) -> None:
        del self._lengths[offset], self._offsets[offset + length]
        del self._sorted[bisect_left(self._sorted, (length, offset))]


STEP_BYTES = 4 << 20  # memory is set aside in steps of this, about a millisecond of work each

MAX_NAME = 60  # characters; the kernel allows 249 bytes

# From linux/fcntl.h; the fcntl module has the names only where Python was built against a new enough libc.
F_ADD_SEALS = 1033
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4


def create_memory(name: str, size_bytes: int) -> int:
    """Return the descriptor of shared memory of exactly `size_bytes`; `name` is only shown in /proc. Raises OSError if the system refuses."""
    fd = os.memfd_create(name[:MAX_NAME], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Mapping:
    """The bytes of shared memory in this process. It does not need `fd` after its construction."""

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._mmap: mmap.mmap | None = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, protection)
        self.bytes = memoryview(self._mmap)
        self.address = _address(self._mmap) if writable else 0  # where it begins in this process's memory

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Return the bytes of one place (read-only unless the mapping is writable). Raises ValueError if it lies outside."""
        if offset < 0 or size_bytes < 0 or offset + size_bytes > len(self.bytes):
            raise ValueError(f"bytes {offset} to {offset + size_bytes} lie outside of an arena of {len(self.bytes)}")
        return self.bytes[offset : offset + size_bytes]

    def close(self) -> None:
        """Unmap the memory now, or when the last view of it is gone. Idempotent."""
        self.bytes.release()
        mapped, self._mmap = self._mmap, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # the views own it from here on
                mapped.close()


def _address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


class Arena:
    """The writing side: allocates places. Not thread-safe.

    `fd` is the descriptor of memory of at least `size_bytes` made by `create_memory`. The arena owns it, and closes it also when the memory
    cannot be mapped.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self._allocator = Allocator(size_bytes)
        try:
            self._mapping = Mapping(fd, size_bytes, writable=True)
        except BaseException:
            os.close(fd)
            raise
        self._blocks: dict[int, SharedBlock] = {}  # by offset
        self._offsets: list[int] = []  # their offsets in order
        self._ready_bytes = 0  # set aside from the start up to here
        self._closed = False

    @property
    def size_bytes(self) -> int:
        """The number of bytes that it can hold when empty."""
        return self._allocator.size_bytes

    @property
    def free_bytes(self) -> int:
        """The number of free bytes, in one piece or in several."""
        return self._allocator.free_bytes

    def reserve(self, size_bytes: int) -> "SharedBlock | None":
        """Return a new place with one owner; None if no free one is as long, or the system has no memory left."""
        offset = None if self._closed else self._allocator.allocate(size_bytes)
        if offset is None:
            return None
        if offset + size_bytes > self._ready_bytes and not self._set_aside(offset + size_bytes):
            self._allocator.free(offset)
            return None
        block = self._blocks[offset] = SharedBlock(self, offset, self._mapping.view(offset, size_bytes))
        insort(self._offsets, offset)
        return block

    def find(self, address: int, size_bytes: int) -> "tuple[SharedBlock, int] | None":
        """Return the taken place that holds all of these bytes of this process's memory, and their offset in the arena; None if no place
        does."""
        offset = address - self._mapping.address
        block = self.at(offset, size_bytes)
        return None if block is None else (block, offset)

    def at(self, offset: int, size_bytes: int) -> "SharedBlock | None":
        """Return the taken place that holds all of these bytes of the arena; None if no place does."""
        position = bisect_right(self._offsets, offset) - 1
        if position < 0:
            return None
        block = self._blocks[self._offsets[position]]
        return block if block.holds(offset, size_bytes) else None

    def free(self, offset: int, size_bytes: int) -> None:
        """Free the `size_bytes` at `offset`. Blocks call this."""
        if not self._closed:
            self._allocator.free(offset)
            del self._blocks[offset], self._offsets[bisect_left(self._offsets, offset)]

    def close(self) -> None:
        """Give the memory back to the system, at the latest when the last view of a block is gone. Idempotent."""
        if not self._closed:
            self._closed = True
            self._blocks.clear()
            self._offsets.clear()
            os.close(self.fd)
            self._mapping.close()

    def _set_aside(self, end: int) -> bool:
        length = -(-(end - self._ready_bytes) // STEP_BYTES) * STEP_BYTES
        length = min(length, self.size_bytes - self._ready_bytes)
        try:
            os.posix_fallocate(self.fd, self._ready_bytes, length)
        except OSError:  # the machine, or this container, has no memory left
            return False
        self._ready_bytes += length
        return True


class SharedBlock:
    """A place in `memory` that counts its owners, and is freed when the last one releases it. See the Block protocol."""

    __slots__ = ("_owners", "memory", "offset", "view")

    def __init__(self, memory: "Arena | Results", offset: int, view: memoryview) -> None:
        self._owners = 1
        self.memory = memory
        self.offset = offset
        self.view = view

    def __bytes__(self) -> bytes:
        """Return a copy, for a worker that this memory is not shared with."""
        return bytes(self.view)

    def holds(self, offset: int, size_bytes: int) -> bool:
        """Return whether these bytes of the memory are all in it."""
        return self.offset <= offset and offset + size_bytes <= self.offset + len(self.view)

    def retain(self) -> None:
        """Add an owner."""
        self._owners += 1

    def release(self) -> None:
        """Remove an owner; the last one frees the place. Raises RuntimeError if there is no owner."""
        self._owners -= 1
        if self._owners == 0:
            self.memory.free(self.offset, len(self.view))
        elif self._owners < 0:
            raise RuntimeError(f"the block at {self.offset} was released too often. This is a bug in Weir")


class Results:
    """The reading side of a worker's arena of results.

    Places that were released, on whatever thread, are in `returned`, then in `freed` until `take_freed`; Child sends them to the worker with the next
    frame. `unsettled_bytes` is how much is not `freed` yet.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._mapping = Mapping(fd, size_bytes, writable=False)
        self.fd = os.dup(fd)  # for other processes that read results
        self.returned: deque[Ref] = deque()
        self.freed: list[Ref] = []
        self.unsettled_bytes = 0
        self.closed = False
        self.size_bytes = size_bytes

    @property
    def held_bytes(self) -> int:
        """The number of bytes that have not been released yet."""
        self._settle()
        return self.unsettled_bytes

    def block(self, offset: int, size_bytes: int) -> "SharedBlock":
        """Return the place that the worker named, with one owner."""
        view = self._mapping.view(offset, size_bytes)
        self.unsettled_bytes += size_bytes
        return SharedBlock(self, offset, view)

    def free(self, offset: int, size_bytes: int) -> None:
        """Note that the worker may use this place again. Blocks call this, on any thread and at any moment: the end of an array is one."""
        self.returned.append((offset, size_bytes))

    def take_freed(self) -> list[Ref]:
        """Return the places that were released since the last call."""
        self._settle()
        freed, self.freed = self.freed, []
        return freed

    def close(self) -> None:
        """Unmap the memory now, or when the last view of a block is gone. Idempotent."""
        if not self.closed:
            self.closed = True
            self.freed.clear()
            os.close(self.fd)
            self._mapping.close()

    def _settle(self) -> None:
        while self.returned:
            ref = self.returned.popleft()
            self.unsettled_bytes -= ref[1]
            if not self.closed:
                self.freed.append(ref)


class BatchPlaces:
    """In the server, for one batch: puts payloads into the arena, or retains those that lie there already.

    The batch owns `blocks`; `release` releases them.
    """

    __slots__ = ("_arena", "blocks")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.blocks: list[SharedBlock] = []

    def place(self, payload: Any) -> Ref | None:
        """Return where `payload` lies in the arena now; None if there is no room for it."""
        if isinstance(payload, SharedBlock) and payload.memory is self._arena:
            payload.retain()
            self.blocks.append(payload)
            return payload.offset, payload.view.nbytes
        raw = memoryview(payload.view if isinstance(payload, SharedBlock) else payload).cast("B")
        placed = find_array(self._arena, raw) or copied(self._arena, raw)
        if placed is None:
            return None
        block, offset = placed
        self.blocks.append(block)
        return offset, raw.nbytes

    def take_back(self, ref: Ref) -> None:
        """Release the block that `place` put at `ref`, or retained there."""
        inside = (position for position, block in enumerate(self.blocks) if block.holds(*ref))
        self.blocks.pop(next(inside)).release()

    def release(self) -> None:
        """Release all blocks."""
        while self.blocks:
            self.blocks.pop().release()


class ResultFetch:
    """In the server: encoded results stay where the worker put them. Buffers of Python values are copied out, because it is not known when the
    last value is gone; with `lease`, the values are arrays, of whose memory it makes an array that releases its place itself."""

    def __init__(self, results: Results, lease: Callable[[SharedBlock], Any] | None = None) -> None:
        self._results = results
        self._lease = lease

    def cell(self, ref: Ref) -> SharedBlock:
        """Return the place at `ref`."""
        return self._results.block(*ref)

    def buffer(self, ref: Ref) -> Any:
        """Return a copy of the place at `ref`, which is released; or, with `lease`, an array over that place."""
        block = self._results.block(*ref)
        if self._lease is not None:
            return self._lease(block)
        copy = bytearray(block.view)
        block.release()
        return copy


def as_values(events: Events, accepts: str | list[str], *, lent: bool = False) -> None:
    """Copy those results out of shared memory that their callers keep: bytes that a model returned, which travel like an encoded response, and, if
    arrays were `lent`, arrays that were not wanted as LENT."""
    outputs = events.outputs
    for position, output in enumerate(outputs):
        index = position if events.indices is None else events.indices[position]
        accept = accepts if isinstance(accepts, str) else accepts[index]
        if isinstance(output, SharedBlock):
            if accept in (OBJECT, LENT):
                outputs[position] = bytes(output.view)
                output.release()
        elif lent and accept == OBJECT and isinstance(output, dict):
            outputs[position] = {
                name: array if array.flags.writeable else array.copy() for name, array in output.items()
            }


def find_array(arena: Arena, raw: memoryview) -> tuple[SharedBlock, int] | None:
    """Return the place in `arena` that holds the array whose memory is `raw`, with one more owner, and where the array begins; None if it is not in
    the arena."""
    array: Any = raw.obj
    if getattr(array, "nbytes", None) != raw.nbytes:
        return None  # it is a part of an array: its address is unknown
    interface = getattr(array, "__array_interface__", None)
    found = None if interface is None else arena.find(interface["data"][0], raw.nbytes)
    if found is not None:
        found[0].retain()
    return found


def copied(arena: Arena, raw: memoryview) -> tuple[SharedBlock, int] | None:
    """Return a new place in `arena` with a copy of `raw`, and where it begins; None if there is no room for it."""
    block = arena.reserve(raw.nbytes)
    if block is None:
        return None
    block.view[:] = raw
    return block, block.offset


class ResultPlaces:
    """In the worker: puts results into its own arena, or retains those that the model has put there itself.

    Thread-safe, because with two batches at once another thread reads which places were freed.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._open: list[SharedBlock] = []  # given to the model for the batch that it computes

    def place(self, payload: Any) -> Ref | None:
        """Return where `payload` lies in the arena now; None if there is no room for it."""
        raw = memoryview(payload).cast("B")
        with self._lock:
            placed = (find_array(self._arena, raw) if self._open else None) or copied(self._arena, raw)
        return None if placed is None else (placed[1], raw.nbytes)

    def take_back(self, ref: Ref) -> None:
        """Release the block that `place` put at `ref`, or retained there."""
        with self._lock:
            block = self._arena.at(*ref)
            if block is not None:
                block.release()

    def open(self, size_bytes: int) -> memoryview | None:
        """Return memory into which the model may write a result until `close`; None if there is no room."""
        with self._lock:
            block = self._arena.reserve(size_bytes)
        if block is None:
            return None
        self._open.append(block)
        return block.view

    def close(self) -> None:
        """Release the memory that the model got for a batch. A place that `place` has retained stays taken."""
        if not self._open:
            return
        with self._lock:
            while self._open:
                self._open.pop().release()

    def give_back(self) -> None:
        """Give the whole arena back to the system: who read it has left."""
        self.close()
        with self._lock:
            self._arena.close()


class PayloadFetch:
    """In the worker: encoded payloads are read where they lie. Buffers of Python values are copied out, so that the model may change and keep
    them, unless it `lends`, to a tensor model that does neither."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self.lends = False

    def cell(self, ref: Ref) -> memoryview:
        """Return the bytes at `ref`, which are valid until the batch has its responses."""
        return self._mapping.view(*ref)

    def buffer(self, ref: Ref) -> bytearray | memoryview:
        """Return a copy of the bytes at `ref`; or, if it `lends`, the bytes, which are valid until the batch has its responses."""
        view = self._mapping.view(*ref)
        return view if self.lends else bytearray(view)

    def give_back(self) -> None:
        """Unmap the arena, now or when its last payload is gone: who wrote to it has left."""
        self._mapping.close()


def own_values(batch: Batch) -> None:
    """Copy those payloads out of shared memory that are Python values: bytes, which travel like an encoded payload."""
    types, payloads = batch.content_types, batch.payloads
    if types == OBJECT or not isinstance(types, str):
        for index, payload in enumerate(payloads):
            if type(payload) is memoryview and (types if isinstance(types, str) else types[index]) == OBJECT:
                payloads[index] = bytes(payload)
