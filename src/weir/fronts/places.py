"""Places in shared memory: those in the models' arenas that the dispatcher lends to fronts, so that large bodies are received where the workers read them, and
those in the workers' arenas of results, where fronts read large outputs.

    front: WantPlace  ->  dispatcher: Granted, and the arena's descriptor with the first one
    front: Submit, any number of times, when the body is there  ->  the response; the front may use the place again
    dispatcher: PlacedOutput, and the arena's descriptor with the first one  ->  front: the response
    front, of either: PlaceFree

The dispatcher alone allocates. It counts the front as an owner of a place, and each request in it as another one: a place is free when the front has given
it back, or has ended, and no batch reads it any more. What the front cannot read in its place travels as a copy.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from weir.fronts.messages import (
    Batched,
    Granted,
    MemoryGone,
    Outputs,
    PlacedOutput,
    PlaceFree,
    SentPlace,
    Violation,
    WantCopy,
    WantPlace,
)
from weir.workers.arena import Arena, Mapping, Results, SharedBlock

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle

# The number of memory and its bytes: that of a model for its arena, or one below 0 for results.
_MEMORY = struct.Struct("<qq")
_STEP = 64 << 10  # bytes: places have a multiple of it, so that similar bodies can use one after the other
_IDLE_PART = 4  # the idle places of all fronts together may take this part of an arena: 1/4
_UNREAD_PART = 4  # what one front has not read yet may take this part of an arena of results


# In the dispatcher.


class _InPlace(SharedBlock):
    """The payload of one request: the beginning of a place that the front has."""

    __slots__ = ("_place",)

    def __init__(self, place: SharedBlock, size_bytes: int) -> None:
        super().__init__(place.memory, place.offset, place.view[:size_bytes])
        place.retain()
        self._place = place

    def release(self) -> None:
        """See Block."""
        self._owners -= 1
        if not self._owners:
            self._place.release()


class PlacesOfFront:
    """The places that one front has, for bodies and with outputs. `connections` is the socket over which it gets the descriptors of memory."""

    def __init__(self, connections: socket.socket, send: Callable[[Any], None]) -> None:
        self._socket = connections
        self._send = send
        self._places: dict[tuple[int, int], SharedBlock] = {}  # by the number of the memory, and the offset
        self._known: set[int] = set()  # the numbers of the memory that the front has
        self._waiting: list[tuple[WantPlace, ModelHandle, int]] = []  # with how many seconds they have waited
        # Of the arenas of results that the front has; 0 of one that it cannot have.
        self._numbers: dict[Results, int] = {}
        self._next = -1  # the number of the next one
        self._unread: dict[tuple[int, int], PlacedOutput] = {}
        self._unread_bytes = 0

    # Bodies.

    def want(self, message: WantPlace, handle: "ModelHandle | None") -> bool:
        """Lend a place, if there is room; return whether there was. Otherwise the front gets its response in one or two seconds."""
        if handle is None or not handle.control.arena_bytes:
            self._refuse(message)
            return True
        if self._grant(message, handle):
            return True
        self._waiting.append((message, handle, 0))
        return False

    def retry(self, model: int = 0) -> bool:
        """Lend places that were not free before. Return whether one in the arena of `model` is still wanted."""
        waiting, self._waiting = self._waiting, []
        self._waiting = [each for each in waiting if not self._grant(each[0], each[1])]
        return any(message.model == model for message, _, _ in self._waiting)

    def sweep(self) -> None:
        """Note that a second has passed: refuse what has waited for more than one, and have the front forget the arenas of workers that have ended."""
        for memory in [each for each in self._numbers if each.closed]:
            if number := self._numbers.pop(memory):
                self._known.discard(number)
                self._send(MemoryGone(number))
        self.retry()
        waiting, self._waiting = self._waiting, []
        for message, handle, seconds in waiting:
            if seconds:
                self._refuse(message)
            else:
                self._waiting.append((message, handle, 1))

    def payloads(self, model: int, sent: Sequence[Any]) -> list[Any]:
        """Return the payloads of requests, with what is in a place for each SentPlace. Raises Violation, and takes none, if the front has no such place."""
        found = [self._found(model, each) if type(each) is SentPlace else None for each in sent]
        return [
            each if place is None else _InPlace(place, each.size_bytes) for each, place in zip(sent, found, strict=True)
        ]

    def _found(self, model: int, sent: SentPlace) -> SharedBlock:
        place = self._places.get((model, sent.offset))
        if place is None or sent.size_bytes > len(place.view):
            raise Violation("a request in a place that it does not have")
        return place

    def _grant(self, message: WantPlace, handle: "ModelHandle") -> bool:
        place = handle.reserve(message.size_bytes)
        if place is None:
            return False
        if type(place) is not SharedBlock or not self._shows(message.model, place.memory):
            place.release()
            self._refuse(message)
            return True
        self._places[message.model, place.offset] = place
        self._send(Granted(message.model, message.size_bytes, place.offset))
        return True

    def _refuse(self, message: WantPlace) -> None:
        self._send(Granted(message.model, message.size_bytes, -1))

    # Outputs.

    def place(self, number: int, output: Any, batch: Batched) -> bool:
        """Have the front read the response to the request `number` in its place, which is owned here from then on.

        Returns False, with nothing changed, if a copy must travel.
        """
        if type(output) is not SharedBlock or not isinstance(output.memory, Results):
            return False
        size, memory = len(output.view), output.memory
        if self._unread_bytes + size > memory.size_bytes // _UNREAD_PART or not (known := self._number(memory)):
            return False
        place = known, output.offset
        self._places[place] = output
        self._unread[place] = message = PlacedOutput(number, known, output.offset, size, batch)
        self._unread_bytes += size
        self._send(message)
        return True

    def copied(self, message: WantCopy) -> Outputs:
        """Return a copy of an output whose arena the front cannot have: it gets copies of all in that arena. Raises Violation if it has no such output."""
        placed = self._unread.get((message.memory, message.offset))
        block = self._taken(message.memory, message.offset)
        try:
            if placed is None or not isinstance(block.memory, Results):
                raise Violation("a copy of what is no output")
            self._numbers[block.memory] = 0
            return Outputs([placed.number], [bytes(block.view)], placed.batch)
        finally:
            block.release()

    def _number(self, memory: Results) -> int:
        """Return the number under which the front knows an arena of results; 0 if it cannot have it."""
        number = self._numbers.get(memory)
        if number is None:
            number = self._next  # models have the numbers above 0
            if memory.closed or not self._shows(number, memory):
                return 0
            self._numbers[memory] = number
            self._next -= 1
        return number

    # Both.

    def free(self, message: PlaceFree) -> None:
        """Take a place back. Raises Violation if the front has no such place."""
        self._taken(message.memory, message.offset).release()

    def close(self) -> None:
        """Take all places back: the front has ended. Idempotent."""
        self._waiting.clear()
        for memory, offset in list(self._places):
            self._taken(memory, offset).release()

    def _taken(self, memory: int, offset: int) -> SharedBlock:
        place = self._places.pop((memory, offset), None)
        if place is None:
            raise Violation("a place back that it does not have")
        read = self._unread.pop((memory, offset), None)
        if read is not None:
            self._unread_bytes -= read.size_bytes
        return place

    def _shows(self, number: int, memory: Any) -> bool:
        """Send the front the descriptor of memory, unless it has it. Return whether it can have it."""
        if number in self._known:
            return True
        if not isinstance(memory, (Arena, Results)):
            return False
        try:
            socket.send_fds(self._socket, [_MEMORY.pack(number, memory.size_bytes)], [memory.fd])
        except OSError:
            return False
        self._known.add(number)
        return True


# In a front.


class LentPlace:
    """The memory for one body, of exactly its size: a Block. When its last owner has released it, another body may come there, unless it is `spoilt`."""

    __slots__ = ("_owners", "_places", "address", "offset", "room_bytes", "spoilt", "view")

    def __init__(self, places: "LentPlaces", offset: int, room_bytes: int, view: memoryview, address: int) -> None:
        self._owners = 1
        self._places = places
        self.offset = offset
        self.room_bytes = room_bytes
        self.view = view
        self.address = address
        self.spoilt = False

    def retain(self) -> None:
        """Add an owner."""
        self._owners += 1

    def release(self) -> None:
        """Remove an owner."""
        self._owners -= 1
        if not self._owners:
            self._places.take_back(self)


class LentPlaces:
    """The places that this front has in the arena of a model. `memory` receives the arena's descriptor."""

    def __init__(self, model: int, fronts: int, send: Callable[[Any], None], memory: "MemoryReceiver") -> None:
        self._model = model
        self._fronts = fronts
        self._send = send
        self._memory = memory
        self._mapping: Mapping | None = None
        self._idle: dict[int, int] = {}  # room by offset, the longest unused first
        self._idle_bytes = 0
        self._unused: set[int] = set()  # idle since the last sweep
        self._asked: list[tuple[int, Callable[[bool], None]]] = []
        self._pressed = False  # while places are given back
        self._closed = False

    def reserve(self, size_bytes: int) -> LentPlace | None:
        """Return a place for `size_bytes`; None if there is none here: see `ask`."""
        offset = self._find(size_bytes)
        if offset is None or self._mapping is None:
            return None
        room = self._forget(offset)
        return LentPlace(self, offset, room, self._mapping.view(offset, size_bytes), self._mapping.address + offset)

    def has(self, size_bytes: int) -> bool:
        """Return whether `reserve` would return a place."""
        return self._find(size_bytes) is not None

    def _find(self, size_bytes: int) -> int | None:
        wanted = _room(size_bytes)
        # The one used last: the caches still have it.
        return next((offset for offset, room in reversed(self._idle.items()) if wanted <= room <= 2 * wanted), None)

    def ask(self, size_bytes: int, answered: Callable[[bool], None]) -> None:
        """Ask the dispatcher for a place. `answered` is called with True when `reserve` returns one, or with False if there is no room."""
        room = _room(size_bytes)
        self._asked.append((room, answered))
        self._send(WantPlace(self._model, room))

    def granted(self, message: Granted) -> None:
        """Handle the dispatcher's reply to the oldest request for memory of this size."""
        index = next(index for index, (room, _) in enumerate(self._asked) if room == message.size_bytes)
        _, answered = self._asked.pop(index)
        has = message.offset >= 0
        if has and not self._maps():
            self._send(PlaceFree(self._model, message.offset))
            has = False
        if has:
            self._keep(message.offset, message.size_bytes)
        answered(has)

    def take_back(self, place: LentPlace) -> None:
        """Nobody uses `place` any more here."""
        has_room = not self._closed and self._idle_bytes + place.room_bytes <= self._most_idle
        if place.spoilt or self._pressed or not has_room:
            self._send(PlaceFree(self._model, place.offset))
        else:
            self._keep(place.offset, place.room_bytes)

    def sweep(self) -> None:
        """Give places back that were idle for a second."""
        for offset in self._unused & self._idle.keys():
            self._give(offset)
        self._unused = set(self._idle)

    def give_back(self, move: Callable[[], None]) -> None:
        """Give back all idle places, and those that `move` makes free."""
        self._pressed = True
        try:
            move()
            for offset in list(self._idle):
                self._give(offset)
        finally:
            self._pressed = False

    def close(self) -> None:
        """The model is not there any more. What is under way goes on."""
        self._closed = True
        asked, self._asked = self._asked, []
        for _, answered in asked:
            answered(False)
        for offset in list(self._idle):
            self._give(offset)
        if self._mapping is not None:
            self._mapping.close()

    @property
    def _most_idle(self) -> int:
        return 0 if self._mapping is None else len(self._mapping.bytes) // (_IDLE_PART * self._fronts)

    def _keep(self, offset: int, room: int) -> None:
        self._idle[offset] = room
        self._idle_bytes += room
        self._unused.discard(offset)

    def _forget(self, offset: int) -> int:
        room = self._idle.pop(offset)
        self._idle_bytes -= room
        return room

    def _give(self, offset: int) -> None:
        self._forget(offset)
        self._send(PlaceFree(self._model, offset))

    def _maps(self) -> bool:
        """Map the arena, which the dispatcher has sent before it granted the first place. Return whether it is mapped."""
        if self._mapping is None and not self._closed:
            self._mapping = self._memory.mapping(self._model, writable=True)
        return self._mapping is not None and not self._closed


def _room(size_bytes: int) -> int:
    return -(-size_bytes // _STEP) * _STEP


class OutputBlock:
    """A Block with the response to one request. Once its last owner has released it, on any thread, the worker may use its place again."""

    __slots__ = ("_owners", "_place", "_reader", "view")

    def __init__(self, reader: "OutputReader", place: PlaceFree, view: memoryview) -> None:
        self._owners = 1
        self._reader = reader
        self._place = place
        self.view = view

    def retain(self) -> None:
        """Add an owner."""
        self._owners += 1

    def release(self) -> None:
        """Remove an owner."""
        self._owners -= 1
        if not self._owners:
            self._reader.read(self._place)


class OutputReader:
    """The outputs that this front reads in their places. `memory` receives the descriptors of arenas."""

    def __init__(
        self, memory: "MemoryReceiver", send: Callable[[PlaceFree], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._memory = memory
        self._send = send
        self._loop = loop
        self._mappings: dict[int, Mapping] = {}
        self._read: deque[PlaceFree] = deque()
        self._scheduled = False

    def block(self, message: PlacedOutput) -> OutputBlock | None:
        """Return the response of `message`, with one owner; None if its arena cannot be mapped here."""
        mapping = self._mappings.get(message.memory)
        if mapping is None:
            mapping = self._memory.mapping(message.memory, writable=False)
            if mapping is None:
                return None
            self._mappings[message.memory] = mapping
        place = PlaceFree(message.memory, message.offset)
        return OutputBlock(self, place, mapping.view(message.offset, message.size_bytes))

    def read(self, place: PlaceFree) -> None:
        """Note that nobody here needs an output any more; may be called on any thread, and while memory is freed at any moment."""
        self._read.append(place)
        if not self._scheduled:
            self._scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so will the front
                self._loop.call_soon_threadsafe(self._report)

    def forget(self, message: MemoryGone) -> None:
        """Unmap an arena, now or when its last output has been read: its worker has ended."""
        mapping = self._mappings.pop(message.memory, None)
        if mapping is not None:
            mapping.close()

    def _report(self) -> None:
        self._scheduled = False
        while self._read:
            self._send(self._read.popleft())


class MemoryReceiver:
    """Receives descriptors of arenas in a front, over the socket on which it passes connections on."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._come: dict[int, tuple[int, int]] = {}

    def mapping(self, number: int, *, writable: bool) -> Mapping | None:
        """Return the memory with this number, whose descriptor has arrived; None if that was lost for want of descriptors, or cannot be mapped."""
        found = self._descriptor(number)
        if found is None:
            return None
        fd, size_bytes = found
        try:
            return Mapping(fd, size_bytes, writable=writable)
        except OSError:
            return None
        finally:
            os.close(fd)

    def _descriptor(self, wanted: int) -> tuple[int, int] | None:
        while wanted not in self._come:
            try:
                message, descriptors, *_ = socket.recv_fds(self._socket, _MEMORY.size, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                return None
            if not message:
                return None
            number, size_bytes = _MEMORY.unpack(message)
            if descriptors:
                self._come[number] = descriptors[0], size_bytes
            elif number == wanted:
                return None
        return self._come.pop(wanted)
