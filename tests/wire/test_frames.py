import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.errors import InvalidRequest, ModelError, Overloaded
from weir.messages import JSON, MSGPACK, OBJECT, Batch, EventKind, Events, Timing
from weir.wire.cells import LARGE_BYTES, Ref
from weir.wire.frames import (
    Cancel,
    Frame,
    FrameError,
    FrameParser,
    Free,
    Ready,
    Restarted,
    Start,
    StartFailed,
    Stop,
    Turn,
    WorkerEnded,
    WorkerLeaves,
    WorkerPlaced,
    WorkerWaits,
    encode_batch,
    encode_control,
    encode_events,
)


class FakeArena:
    """Shared memory of one process: places are never used twice, and what is fetched is counted."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.blocks: dict[Ref, bytes] = {}
        self.fetched: list[Ref] = []

    def place(self, payload: Any) -> Ref | None:
        if isinstance(payload, tuple):  # our Block: it is there already
            return payload
        data = bytes(payload)
        if len(data) > self.room:
            return None
        ref = (sum(map(len, self.blocks.values())), len(data))
        self.blocks[ref] = data
        return ref

    def take_back(self, ref: Ref) -> None:
        del self.blocks[ref]

    def cell(self, ref: Ref) -> memoryview:
        self.fetched.append(ref)
        return memoryview(self.blocks[ref])

    buffer = cell


def encode(frame: Frame, arena: FakeArena | None = None) -> bytes:
    if isinstance(frame, Batch):
        return bytes(encode_batch(frame, arena))
    if isinstance(frame, Events):
        return bytes(encode_events(frame, arena))
    return bytes(encode_control(frame))


def round_trip(frame: Any, arena: FakeArena | None = None) -> Any:
    (back,) = FrameParser(arena).feed(encode(frame, arena))
    assert type(back) is type(frame)
    return back


def look(frame: Any) -> Any:
    """A frame as something that can be compared."""
    if isinstance(frame, Batch):
        return frame.batch_id, frame.payloads, frame.content_types, frame.accepts, frame.attempt, frame.share
    if isinstance(frame, Events):
        return frame.batch_id, frame.outputs, frame.indices, frame.kinds, frame.final, frame.timing
    if isinstance(frame, StartFailed):
        return type(frame.error), str(frame.error)
    return frame


TIMING = Timing(0.25, 0.5, 0.125)

FRAMES: list[Frame] = [
    Start("square:Square", {"worker_index": 3}),
    Start(b"pickled class", {}),
    Batch(1, [b"1", b"2"], JSON, JSON),
    Batch(2**40, [b"1", b"\x02"], [JSON, MSGPACK], [JSON, OBJECT], attempt=2, share=3),
    Batch(3, [1, "two", None, [4.0], {"five": (6, 7)}], OBJECT, OBJECT),
    Batch(4, [b"1", {"a": 1}, b""], [JSON, OBJECT, OBJECT], JSON),
    Batch(5, [], JSON, JSON),
    Cancel(7, [0, 3]),
    Free([(0, 40000), (65536, 1)]),
    Stop(),
    Ready(),
    StartFailed(ModelError("no weights", original_type="OSError", remote_traceback="Traceback ...")),
    Restarted(9),
    Turn(),
    Turn(wanted=False),
    Events(1, [b"1", b"2"], timing=TIMING),
    Events(1, [b"part"], indices=[4], kinds=[EventKind.PART], final=False),
    Events(2, [1, 2.5, "x", None], timing=TIMING),
    Events(2, [b"1", 2, {"a": {1, 2}}], timing=TIMING),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_comes_back_as_it_was(frame: Frame) -> None:
    assert look(round_trip(frame)) == look(frame)


def test_one_byte_at_a_time() -> None:
    parser, back = FrameParser(), []
    for byte in b"".join(map(encode, FRAMES)):
        back += parser.feed(bytes([byte]))
    assert list(map(look, back)) == list(map(look, FRAMES))


@given(st.lists(st.integers(0, len(FRAMES) - 1)), st.lists(st.integers(0, 3000)))
def test_pieces_of_any_size(picks: list[int], cuts: list[int]) -> None:
    stream = b"".join(encode(FRAMES[pick]) for pick in picks)
    parser, back = FrameParser(), []
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for start, stop in pairwise(edges):
        piece = bytearray(stream[start:stop])
        back += parser.feed(piece)
        piece[:] = bytes(len(piece))  # the parser keeps nothing of it
    assert list(map(look, back)) == [look(FRAMES[pick]) for pick in picks]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=30)  # they are large
@given(st.lists(json_values), st.lists(json_values))
def test_any_values(payloads: list[Any], outputs: list[Any]) -> None:
    assert round_trip(Batch(1, payloads, OBJECT, OBJECT)).payloads == payloads
    assert round_trip(Events(1, outputs)).outputs == outputs


@given(st.binary())
def test_garbage_is_an_error_or_nothing(data: bytes) -> None:
    parser = FrameParser(max_frame_bytes=1 << 16)
    try:
        parser.feed(struct.pack(">I", len(data)) + data)
    except FrameError:
        with pytest.raises(FrameError):
            parser.feed(encode(Stop()))


@given(st.sampled_from(range(len(FRAMES))), st.data())
def test_one_wrong_byte_is_an_error_or_another_frame(pick: int, data: st.DataObject) -> None:
    if isinstance(FRAMES[pick], Start):
        return  # its pickle is trusted as a whole
    stream = bytearray(encode(FRAMES[pick]))
    at = data.draw(st.integers(4, len(stream) - 1))
    stream[at] ^= data.draw(st.integers(1, 255))
    try:
        FrameParser().feed(stream)
    except FrameError as error:
        assert "cannot be read" in str(error)


def test_too_long_a_frame_is_refused_at_its_head() -> None:
    parser = FrameParser(max_frame_bytes=100)
    with pytest.raises(FrameError, match="a frame of 101 bytes, over the limit of 100"):
        parser.feed(struct.pack(">I", 101))


def test_too_long_a_batch_becomes_errors_and_leaves_nothing_in_the_arena() -> None:
    arena = FakeArena()
    batch = Batch(1, [b"x" * LARGE_BYTES, b"y" * 900, Overloaded("full")], JSON, JSON)
    (back,) = FrameParser(max_frame_bytes=900).feed(encode_batch(batch, arena, max_frame_bytes=900))
    assert isinstance(back, Batch)
    assert [type(payload) for payload in back.payloads] == [InvalidRequest, InvalidRequest, Overloaded]
    assert "over the limit of 900" in str(back.payloads[0])
    assert not arena.blocks
    (ended,) = FrameParser().feed(encode_events(Events(1, [b"y" * 900]), max_frame_bytes=900))
    assert isinstance(ended, Events)
    assert isinstance(ended.outputs[0], ModelError)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("never")


class UnpicklableThere:
    def __reduce__(self) -> Any:
        return fail, ()


def fail() -> None:
    raise RuntimeError("not here")


@pytest.mark.parametrize("bad", [Unpicklable(), UnpicklableThere(), [UnpicklableThere()], lambda: 0])
def test_one_that_cannot_be_pickled_or_unpickled_fails_alone(bad: Any) -> None:
    arena = FakeArena()
    good = numpy.arange(LARGE_BYTES, dtype=numpy.uint8)
    payloads = round_trip(Batch(1, [1, bad, good, {"x": 3}], OBJECT, OBJECT), arena).payloads
    assert payloads[0] == 1
    assert isinstance(payloads[1], InvalidRequest)
    assert "pickled" in str(payloads[1])
    assert (payloads[2] == good).all()
    assert payloads[3] == {"x": 3}
    outputs = round_trip(Events(1, [1, bad])).outputs
    assert outputs[0] == 1
    assert isinstance(outputs[1], ModelError)
    assert len(arena.blocks) == len(arena.fetched) == 1


def test_large_bytes_and_arrays_lie_in_the_arena() -> None:
    arena = FakeArena()
    body, array = b"x" * LARGE_BYTES, numpy.arange(10_000.0)
    batch = round_trip(Batch(1, [body, b"small"], JSON, JSON), arena)
    assert [bytes(payload) for payload in batch.payloads] == [body, b"small"]
    assert isinstance(batch.payloads[0], memoryview)
    events = round_trip(Events(1, [{"a": array, "b": [1]}, {"a": array[:3], "b": []}]), arena)
    assert (events.outputs[0]["a"] == array).all()
    assert (events.outputs[1]["a"] == array[:3]).all()
    assert sorted(arena.fetched) == sorted(arena.blocks)
    assert [length for _, length in arena.blocks] == [LARGE_BYTES, 80_000]


def test_without_room_they_travel_inline() -> None:
    body, array = b"x" * LARGE_BYTES, numpy.arange(10_000.0)
    full = FakeArena(room=0)
    assert round_trip(Batch(1, [body], JSON, JSON), full).payloads == [body]
    assert (round_trip(Batch(1, [array], OBJECT, JSON), full).payloads[0] == array).all()
    assert (round_trip(Batch(1, [array], OBJECT, JSON)).payloads[0] == array).all()


def test_a_payload_that_is_in_the_arena_already_is_not_copied() -> None:
    arena = FakeArena()
    block = arena.place(b"received into its place")
    batch = round_trip(Batch(1, [block, memoryview(b"view"), bytearray(b"array")], JSON, JSON), arena)
    assert bytes(batch.payloads[0]) == b"received into its place"
    assert batch.payloads[0].obj is arena.blocks[block] if block else False


def test_a_reference_without_an_arena_is_a_broken_stream() -> None:
    frame = encode(Batch(1, [b"x" * LARGE_BYTES], JSON, JSON), FakeArena())
    with pytest.raises(FrameError, match="no arena"):
        FrameParser().feed(frame)


def test_small_arrays_come_back_writable() -> None:
    (array,) = round_trip(Batch(1, [numpy.zeros(4)], OBJECT, OBJECT)).payloads
    array += 1
    assert array.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("column", [[JSON, JSON, JSON], JSON])
def test_a_uniform_column_is_one_string(column: Sequence[str]) -> None:
    content_types = column if isinstance(column, str) else list(column)
    assert round_trip(Batch(1, [b"1"] * 3, content_types, OBJECT)).content_types == JSON


def test_errors_among_payloads_and_outputs() -> None:
    error = InvalidRequest("wrong", details=[{"loc": ["a"], "msg": "no"}])
    outputs: list[Any] = [b"1", error, 3]
    back: list[Any] = round_trip(Events(1, outputs, kinds=[1, 2, 1])).outputs
    assert back[0] == b"1"
    assert isinstance(back[1], InvalidRequest)
    assert (back[1].message, back[1].details) == ("wrong", [{"loc": ["a"], "msg": "no"}])
    assert round_trip(Batch(1, [error], JSON, JSON)).payloads[0].message == "wrong"


@pytest.mark.parametrize(
    "frame",
    [
        WorkerWaits("no room"), WorkerPlaced(7, "4f2a", "192.0.2.1", ["0", "1"], "a1"), WorkerLeaves("preempted"),
        WorkerEnded("it was killed"),
    ],
)  # fmt: skip
def test_notices_about_a_worker_in_a_cluster(frame: Any) -> None:
    assert round_trip(frame) == frame
