import fcntl
import os
from collections.abc import Iterator
from itertools import pairwise

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.messages import JSON, OBJECT, Batch
from weir.workers import arena as memory

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[memory.Arena]:
    arena = memory.Arena(memory.create_memory("weir-test", MIB), MIB)
    yield arena
    arena.close()


def reserved(arena: memory.Arena, size: int) -> memory.SharedBlock:
    block = arena.reserve(size)
    assert block is not None
    return block


def test_a_block_is_freed_with_its_last_share(arena: memory.Arena) -> None:
    block = reserved(arena, 1000)
    assert len(block.view) == 1000
    assert arena.free_bytes == MIB - 1024

    block.retain()
    block.release()
    assert arena.free_bytes == MIB - 1024
    block.release()
    assert arena.free_bytes == MIB


def test_a_share_too_many_given_back_is_refused(arena: memory.Arena) -> None:
    block = reserved(arena, 64)
    block.release()
    _other = reserved(arena, 64)

    with pytest.raises(RuntimeError, match="released too often"):
        block.release()

    assert arena.free_bytes == MIB - 64


def test_a_full_arena_has_no_place_and_does_not_grow(arena: memory.Arena) -> None:
    blocks = [arena.reserve(MIB // 4) for _ in range(4)]

    assert all(blocks)
    assert arena.reserve(1) is None
    assert os.fstat(arena.fd).st_size == MIB


def test_the_memory_can_be_neither_shrunk_nor_grown(arena: memory.Arena) -> None:
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, 1033, 0)  # F_ADD_SEALS: not even the seals


def test_memory_is_set_aside_only_as_far_as_it_was_needed() -> None:
    size = 8 * memory.STEP_BYTES
    arena = memory.Arena(memory.create_memory("weir-test", size), size)
    assert os.fstat(arena.fd).st_blocks == 0

    for _ in range(100):
        block = reserved(arena, 100_000)
        block.release()
    assert os.fstat(arena.fd).st_blocks * 512 == memory.STEP_BYTES

    block = reserved(arena, size)
    assert os.fstat(arena.fd).st_blocks * 512 == size
    del block
    arena.close()


def test_memory_that_the_machine_does_not_have_is_no_place(
    arena: memory.Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)

    assert arena.reserve(1000) is None
    assert arena.free_bytes == MIB


def test_a_closed_arena_gives_its_memory_back_when_the_last_view_is_gone() -> None:
    before = set(os.listdir("/proc/self/fd"))
    arena = memory.Arena(memory.create_memory("weir-test", MIB), MIB)
    block = reserved(arena, 1000)
    block.view[:3] = b"abc"

    arena.close()
    arena.close()

    assert bytes(block.view[:3]) == b"abc"
    assert arena.reserve(1) is None
    block.release()
    del block
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (0, MIB + 1), (MIB, 1), (5, -1)])
def test_a_place_outside_of_the_arena_is_refused(arena: memory.Arena, offset: int, size: int) -> None:
    mapping = memory.Mapping(arena.fd, MIB, writable=False)

    with pytest.raises(ValueError, match="outside of an arena"):
        mapping.view(offset, size)

    mapping.close()


def test_results_are_given_back_by_name_once_all_shares_are() -> None:
    fd = memory.create_memory("weir-test", MIB)
    results = memory.Results(fd, MIB)
    os.close(fd)
    block = results.block(64, 100)
    block.retain()
    assert results.held_bytes == 100

    block.release()
    assert results.take_freed() == []
    block.release()

    assert results.take_freed() == [(64, 100)]
    assert results.take_freed() == []
    assert results.held_bytes == 0
    with pytest.raises(RuntimeError, match="released too often"):
        block.release()
    del block
    results.close()


def test_memory_is_found_by_its_address_while_its_place_is_taken(arena: memory.Arena) -> None:
    first, second = reserved(arena, 100), reserved(arena, 1000)
    address = numpy.frombuffer(second.view, numpy.uint8).ctypes.data
    assert arena.find(address, 1000) == (second, second.offset)
    assert arena.find(address + 10, 990) == (second, second.offset + 10)
    assert arena.find(address + 10, 991) is None  # goes on beyond its end
    assert arena.find(address - second.offset + first.offset, 100) == (first, first.offset)
    assert arena.find(address - second.offset - 1, 1) is None
    assert arena.find(id(arena), 1) is None
    second.release()
    assert arena.find(address, 1000) is None
    first.release()
    arena.close()
    assert arena.find(address - second.offset + first.offset, 100) is None


def test_the_shortest_place_that_suffices_is_taken() -> None:
    allocator = memory.Allocator(64 * 10)
    offsets = [allocator.allocate(size) for size in (128, 64, 64, 64, 64, 64)]
    for position in (0, 2, 4):  # places of 128, 64 and 64 bytes
        offset = offsets[position]
        assert offset is not None
        allocator.free(offset)

    assert allocator.allocate(64) == offsets[2]
    assert allocator.allocate(64) == offsets[4]
    assert allocator.allocate(128) == offsets[0]


def test_a_line_of_places_goes_no_further_than_twice_what_is_taken() -> None:
    allocator = memory.Allocator(64 * 1000)
    waiting: list[int] = []
    furthest = 0
    for _ in range(200):
        offset = allocator.allocate(64)
        assert offset is not None
        furthest = max(furthest, offset)
        waiting.append(offset)
        if len(waiting) == 8:
            allocator.free(waiting.pop(0))

    assert furthest <= 64 * 2 * 8
    runs = sum(after - before == 64 for before, after in pairwise(waiting))
    assert runs >= len(waiting) - 2


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=200))
def test_whatever_happens_places_are_disjoint_and_nothing_is_lost(steps: list[tuple[bool, int]]) -> None:
    allocator = memory.Allocator(4096)
    taken: dict[int, int] = {}
    for take, number in steps:
        if take:
            offset = allocator.allocate(number)
            if offset is None:
                continue
            length = max(1, -(-number // memory.ALIGNMENT)) * memory.ALIGNMENT
            assert offset % memory.ALIGNMENT == 0
            assert offset + length <= 4096
            assert all(offset + length <= other or other + size <= offset for other, size in taken.items())
            taken[offset] = length
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            del taken[offset]
            allocator.free(offset)
        assert allocator.free_bytes == 4096 - sum(taken.values())
        assert len(allocator) == len(taken)
    for offset in taken:
        allocator.free(offset)
    assert allocator.allocate(4096) == 0


def test_what_goes_into_no_frame_is_taken_back(arena: memory.Arena) -> None:
    places = memory.BatchPlaces(arena)
    first, second = places.place(b"first"), places.place(b"second")
    assert first is not None
    assert second is not None

    places.take_back(first)

    assert arena.free_bytes == MIB - 64
    places.release()
    assert arena.free_bytes == MIB


def test_a_result_of_another_worker_can_be_a_payload(arena: memory.Arena) -> None:
    fd = memory.create_memory("weir-test", MIB)
    results = memory.Results(fd, MIB)
    block = results.block(0, 10)
    places = memory.BatchPlaces(arena)

    assert places.place(block) == (0, 10)

    places.release()
    block.release()
    del block
    results.close()
    memory.Arena(fd, MIB).close()


def test_payloads_of_python_callers_belong_to_the_model() -> None:
    def payloads(content_types: str | list[str]) -> list[type]:
        batch = Batch(1, [memoryview(b"a"), memoryview(b"b"), 3], content_types, OBJECT)
        memory.own_values(batch)
        return [type(payload) for payload in batch.payloads]

    assert payloads(OBJECT) == [bytes, bytes, int]
    assert payloads([OBJECT, JSON, OBJECT]) == [bytes, memoryview, int]
    assert payloads(JSON) == [memoryview, memoryview, int]


def test_arrays_in_the_arena_are_not_copied_but_their_place_is_retained(arena: memory.Arena) -> None:
    block = reserved(arena, 200)
    places = memory.BatchPlaces(arena)
    array = numpy.frombuffer(block.view[8:], numpy.uint8)
    assert places.place(array[:100].data) == (block.offset + 8, 100)
    assert places.place(array[100:].data) == (block.offset + 108, 92)
    block.release()
    places.take_back((block.offset + 108, 92))
    assert arena.free_bytes == MIB - 256
    places.release()
    assert arena.free_bytes == MIB
    assert places.place(numpy.zeros(100, numpy.uint8).data) == (0, 100)
    assert places.place(array.data[100:]) == (128, 92)  # of a part of an array nobody says where it begins: copied
    places.release()
