"""Large outputs, which fronts read where the workers have written them: in the workers' arenas of results.

    dispatcher: PlacedOutput, and the arena's descriptor with the first one  ->  front: OutputsRead, once the response has left

The dispatcher owns the place until then, or until the front has ended. What the front cannot read in its place travels as a copy.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from weir.fronts.lending import MemoryReceiver, send_memory
from weir.fronts.messages import Batched, DetailedOutput, MemoryGone, OutputsRead, PlacedOutput
from weir.workers.arena import Mapping, Results, SharedBlock

_PART = 4  # what one front has not read yet may take this part of an arena: 1/4


# In the dispatcher.


class PlacedOutputs:
    """The outputs that one front reads in their places. `connections` is the socket over which it gets the descriptors of arenas."""

    def __init__(self, connections: socket.socket, send: Callable[[Any], None]) -> None:
        self._socket = connections
        self._send = send
        self._numbers: dict[Results, int] = {}  # of the arenas that the front has; 0 of one that it cannot have
        self._last = 0
        self._held: dict[int, tuple[SharedBlock, PlacedOutput]] = {}
        self._held_bytes = 0

    def place(self, number: int, output: Any, batch: Batched) -> bool:
        """Have the front read the response to the request `number` in its place, which is owned here from then on.

        Returns False, with nothing changed, if a copy must travel.
        """
        if type(output) is not SharedBlock or not isinstance(output.memory, Results):
            return False
        size = len(output.view)
        if self._held_bytes + size > output.memory.size_bytes // _PART or not (memory := self._number(output.memory)):
            return False
        message = PlacedOutput(number, memory, output.offset, size, batch)
        self._held[number] = output, message
        self._held_bytes += size
        self._send(message)
        return True

    def read(self, numbers: Iterable[int]) -> None:
        """Free places. Raises ValueError for one that the front does not have."""
        for number in numbers:
            self._taken(number)[0].release()

    def copied(self, number: int) -> DetailedOutput:
        """Return a copy of an output whose arena the front cannot have: it gets copies of all in that arena. Raises ValueError as `read` does."""
        block, message = self._taken(number)
        try:
            if isinstance(block.memory, Results):
                self._numbers[block.memory] = 0
            return DetailedOutput(number, bytes(block.view), message.batch)
        finally:
            block.release()

    def sweep(self) -> None:
        """Have the front forget the arenas of workers that have ended."""
        for memory in [each for each in self._numbers if each.closed]:
            if number := self._numbers.pop(memory):
                self._send(MemoryGone(number))

    def close(self) -> None:
        """Free all places: the front has ended. Idempotent."""
        self.read(list(self._held))

    def _taken(self, number: int) -> tuple[SharedBlock, PlacedOutput]:
        found = self._held.pop(number, None)
        if found is None:
            raise ValueError("an output back that it does not have")
        self._held_bytes -= found[1].size_bytes
        return found

    def _number(self, memory: Results) -> int:
        """Return the number under which the front knows an arena; 0 if it cannot have it."""
        number = self._numbers.get(memory)
        if number is None:
            number = self._last - 1  # models have the numbers above 0
            if memory.closed or not send_memory(self._socket, number, memory):
                return 0
            self._last = self._numbers[memory] = number
        return number


# In a front.


class OutputBlock:
    """A Block with the response to one request. Once its last owner has released it, on any thread, the worker may use its place again."""

    __slots__ = ("_number", "_owners", "_reader", "view")

    def __init__(self, reader: "OutputReader", number: int, view: memoryview) -> None:
        self._owners = 1
        self._reader = reader
        self._number = number
        self.view = view

    def retain(self) -> None:
        """Add an owner."""
        self._owners += 1

    def release(self) -> None:
        """Remove an owner."""
        self._owners -= 1
        if not self._owners:
            self._reader.read(self._number)


class OutputReader:
    """The outputs that this front reads in their places. `memory` receives the descriptors of arenas."""

    def __init__(
        self, memory: MemoryReceiver, send: Callable[[OutputsRead], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._memory = memory
        self._send = send
        self._loop = loop
        self._mappings: dict[int, Mapping] = {}
        self._read: deque[int] = deque()
        self._scheduled = False

    def block(self, message: PlacedOutput) -> OutputBlock | None:
        """Return the response of `message`, with one owner; None if its arena cannot be mapped here."""
        mapping = self._mappings.get(message.memory)
        if mapping is None:
            mapping = self._memory.mapping(message.memory, writable=False)
            if mapping is None:
                return None
            self._mappings[message.memory] = mapping
        return OutputBlock(self, message.number, mapping.view(message.offset, message.size_bytes))

    def read(self, number: int) -> None:
        """Note that nobody here needs an output any more; may be called on any thread, and while memory is freed at any moment."""
        self._read.append(number)
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
        numbers = []
        while self._read:
            numbers.append(self._read.popleft())
        self._send(OutputsRead(numbers))
