from collections.abc import Iterator

import numpy
import pytest

from weir.messages import JSON, LENT, OBJECT, Batch, Events
from weir.workers.arena import (
    Arena,
    BatchPlaces,
    Mapping,
    PayloadFetch,
    ResultFetch,
    ResultPlaces,
    Results,
    as_values,
    create_memory,
    own_values,
)

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(create_memory("weir-test", MIB), MIB)
    yield arena
    arena.close()


def test_a_payload_is_copied_in_and_read_where_it_lies(arena: Arena) -> None:
    places, mapping = BatchPlaces(arena), Mapping(arena.fd, MIB, writable=False)

    ref = places.place(b"payload")

    assert ref == (0, 7)
    assert bytes(PayloadFetch(mapping).cell(ref)) == b"payload"
    copy = PayloadFetch(mapping).buffer(ref)
    copy[:] = b"changed"
    assert bytes(PayloadFetch(mapping).cell(ref)) == b"payload"
    places.release()
    assert arena.free_bytes == MIB
    mapping.close()


def test_a_block_is_not_copied_but_retained(arena: Arena) -> None:
    block = arena.reserve(100)
    assert block is not None
    places = BatchPlaces(arena)

    assert places.place(block) == (block.offset, 100)
    block.release()

    assert arena.free_bytes == MIB - 128
    places.release()
    assert arena.free_bytes == MIB


def test_what_goes_into_no_frame_is_taken_back(arena: Arena) -> None:
    places = BatchPlaces(arena)
    first, second = places.place(b"first"), places.place(b"second")
    assert first is not None
    assert second is not None

    places.take_back(first)

    assert arena.free_bytes == MIB - 64
    places.release()
    assert arena.free_bytes == MIB


def test_without_room_there_is_no_place(arena: Arena) -> None:
    assert BatchPlaces(arena).place(bytes(MIB + 1)) is None
    assert ResultPlaces(arena).place(bytes(MIB + 1)) is None


def test_a_result_of_another_worker_can_be_a_payload(arena: Arena) -> None:
    fd = create_memory("weir-test", MIB)
    results = Results(fd, MIB)
    block = results.block(0, 10)
    places = BatchPlaces(arena)

    assert places.place(block) == (0, 10)

    places.release()
    block.release()
    del block
    results.close()
    Arena(fd, MIB).close()


def test_a_result_stays_where_it_is_and_what_backs_a_value_is_copied_out(arena: Arena) -> None:
    results = Results(arena.fd, MIB)
    worker, fetch = ResultPlaces(arena), ResultFetch(results)
    first, second = worker.place(b"answer"), worker.place(b"buffer")
    assert first is not None
    assert second is not None

    block, copy = fetch.cell(first), fetch.buffer(second)

    assert (bytes(block.view), copy) == (b"answer", bytearray(b"buffer"))
    assert results.take_freed() == [second]
    block.release()
    assert results.take_freed() == [first]
    for ref in (first, second):
        worker.take_back(ref)
    assert arena.free_bytes == MIB
    del block
    results.close()


@pytest.mark.parametrize("accepts", [OBJECT, [JSON, OBJECT]])
def test_results_for_python_callers_are_values(arena: Arena, accepts: str | list[str]) -> None:
    results = Results(arena.fd, MIB)
    block = results.block(0, 4)
    events = Events(1, [block], indices=[1])

    as_values(events, accepts)

    assert events.outputs == [bytes(4)]
    assert results.held_bytes == 0
    del block
    results.close()


def test_results_for_doors_stay_blocks(arena: Arena) -> None:
    results = Results(arena.fd, MIB)
    block = results.block(0, 4)
    events = Events(1, [block])

    as_values(events, JSON)

    assert events.outputs == [block]
    block.release()
    del block, events
    results.close()


def test_payloads_of_python_callers_belong_to_the_model() -> None:
    def payloads(content_types: str | list[str]) -> list[type]:
        batch = Batch(1, [memoryview(b"a"), memoryview(b"b"), 3], content_types, OBJECT)
        own_values(batch)
        return [type(payload) for payload in batch.payloads]

    assert payloads(OBJECT) == [bytes, bytes, int]
    assert payloads([OBJECT, JSON, OBJECT]) == [bytes, memoryview, int]
    assert payloads(JSON) == [memoryview, memoryview, int]


def test_arrays_in_the_arena_are_not_copied_but_their_place_is_retained(arena: Arena) -> None:
    block = arena.reserve(200)
    assert block is not None
    places = BatchPlaces(arena)
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


def test_arrays_are_lent_to_a_model_that_borrows(arena: Arena) -> None:
    fetch = PayloadFetch(Mapping(arena.fd, MIB, writable=False))
    assert type(fetch.buffer((0, 8))) is bytearray
    fetch.lends = True
    lent = fetch.buffer((0, 8))
    assert type(lent) is memoryview
    assert lent.readonly


@pytest.mark.parametrize(("accept", "copied"), [(OBJECT, True), (LENT, False)])
def test_lent_arrays_are_copied_for_those_who_want_them_for_good(arena: Arena, accept: str, copied: bool) -> None:
    results = Results(arena.fd, MIB)
    lent = ResultFetch(results, lends=True).buffer((0, 8))
    arrays = {"x": numpy.frombuffer(lent, numpy.uint8), "y": numpy.zeros(1)}
    del lent
    events = Events(1, [arrays, ValueError()])
    del arrays

    as_values(events, accept, lent=True)

    assert events.outputs[0]["x"].flags.writeable == copied
    assert results.held_bytes == (0 if copied else 8)
    del events
    assert results.held_bytes == 0
    results.close()
