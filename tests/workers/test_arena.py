import fcntl
import mmap
import os
from collections.abc import Iterator

import numpy
import pytest

from weir.workers.arena import STEP_BYTES, Arena, Mapping, Results, create_memory

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(create_memory("weir-test", MIB), MIB)
    yield arena
    arena.close()


def test_a_block_is_freed_with_its_last_share(arena: Arena) -> None:
    block = arena.reserve(1000)
    assert block is not None
    assert len(block.view) == 1000
    assert arena.free_bytes == MIB - 1024

    block.retain()
    block.release()
    assert arena.free_bytes == MIB - 1024
    block.release()
    assert arena.free_bytes == MIB


def test_a_share_too_many_given_back_is_refused_and_frees_nobody_elses_place(arena: Arena) -> None:
    block = arena.reserve(64)
    assert block is not None
    block.release()
    other = arena.reserve(64)
    assert other is not None

    with pytest.raises(RuntimeError, match="released too often"):
        block.release()

    assert arena.free_bytes == MIB - 64


def test_a_full_arena_has_no_place_and_does_not_grow(arena: Arena) -> None:
    blocks = [arena.reserve(MIB // 4) for _ in range(4)]

    assert all(blocks)
    assert arena.reserve(1) is None
    assert os.fstat(arena.fd).st_size == MIB


def test_the_memory_can_be_neither_shrunk_nor_grown(arena: Arena) -> None:
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, 1033, 0)  # F_ADD_SEALS: not even the seals


def test_memory_is_set_aside_only_as_far_as_it_was_needed() -> None:
    size = 8 * STEP_BYTES
    arena = Arena(create_memory("weir-test", size), size)
    assert os.fstat(arena.fd).st_blocks == 0

    for _ in range(100):
        block = arena.reserve(100_000)
        assert block is not None
        block.release()
    assert os.fstat(arena.fd).st_blocks * 512 == STEP_BYTES

    block = arena.reserve(size)
    assert block is not None
    assert os.fstat(arena.fd).st_blocks * 512 == size
    del block
    arena.close()


def test_memory_that_the_machine_does_not_have_is_no_place(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)

    assert arena.reserve(1000) is None
    assert arena.free_bytes == MIB


def test_a_closed_arena_gives_its_memory_back_when_the_last_view_is_gone() -> None:
    before = set(os.listdir("/proc/self/fd"))
    arena = Arena(create_memory("weir-test", MIB), MIB)
    block = arena.reserve(1000)
    assert block is not None
    block.view[:3] = b"abc"

    arena.close()
    arena.close()

    assert bytes(block.view[:3]) == b"abc"
    assert arena.reserve(1) is None
    block.release()
    del block
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_one_side_writes_the_other_side_reads_but_cannot_change(arena: Arena) -> None:
    mapping = Mapping(arena.fd, MIB, writable=False)
    block = arena.reserve(5)
    assert block is not None
    block.view[:] = b"level"

    view = mapping.view(block.offset, 5)

    assert bytes(view) == b"level"
    with pytest.raises(TypeError):
        view[0] = 0
    del view
    mapping.close()


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (0, MIB + 1), (MIB, 1), (5, -1)])
def test_a_place_outside_of_the_arena_is_refused(arena: Arena, offset: int, size: int) -> None:
    mapping = Mapping(arena.fd, MIB, writable=False)

    with pytest.raises(ValueError, match="outside of an arena"):
        mapping.view(offset, size)

    mapping.close()


def test_results_are_given_back_by_name_once_all_shares_are() -> None:
    fd = create_memory("weir-test", MIB)
    results = Results(fd, MIB)
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


def test_results_of_a_dead_worker_stay_readable_until_they_are_released() -> None:
    before = set(os.listdir("/proc/self/fd"))
    fd = create_memory("weir-test", mmap.PAGESIZE)
    os.pwrite(fd, b"answer", 128)
    results = Results(fd, mmap.PAGESIZE)
    os.close(fd)
    block = results.block(128, 6)

    results.close()

    assert bytes(block.view) == b"answer"
    block.release()
    assert results.take_freed() == []
    del block
    assert set(os.listdir("/proc/self/fd")) == before


def test_memory_is_found_by_its_address_while_its_place_is_taken(arena: Arena) -> None:
    first, second = arena.reserve(100), arena.reserve(1000)
    assert first is not None
    assert second is not None
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
