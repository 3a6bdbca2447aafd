"""Shared memory of one process."""

from typing import Any

from weir.wire.cells import Ref


class FakeArena:
    """Has `room` bytes. Places are never used twice, and what is taken from them is noted."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.blocks: dict[Ref, bytes] = {}
        self.fetched: list[Ref] = []

    def place(self, payload: Any) -> Ref | None:
        if isinstance(payload, tuple):  # a block that is there already
            return payload
        ref = (sum(map(len, self.blocks.values())), len(data := bytes(payload)))
        if sum(ref) > self.room:
            return None
        self.blocks[ref] = data
        return ref

    def take_back(self, ref: Ref) -> None:
        del self.blocks[ref]

    def cell(self, ref: Ref) -> memoryview:
        self.fetched.append(ref)
        return memoryview(self.blocks[ref])

    buffer = cell
