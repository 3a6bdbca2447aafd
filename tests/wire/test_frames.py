import struct
from itertools import pairwise
from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rings import subcases
from tests.wire.arena import FakeArena

from weir.errors import InvalidRequest, ModelError, Overloaded
from weir.messages import JSON, MSGPACK, OBJECT, Batch, EventKind, Events, Timing
from weir.wire import frames
from weir.wire.cells import LARGE_BYTES
from weir.wire.frames import (
    ASK,
    ERROR_IDS,
    Frame,
    FrameError,
    FrameParser,
    LockstepParser,
    decode_jobs,
    decode_reply,
    encode_batch,
    encode_control,
    encode_events,
    encode_jobs,
    encode_reply,
    make_ids,
)


def encode(frame: Frame, arena: FakeArena | None = None) -> bytes:
    if isinstance(frame, Batch):
        return bytes(encode_batch(frame, arena))
    return bytes(encode_events(frame, arena) if isinstance(frame, Events) else encode_control(frame))


def round_trip(frame: Any, arena: FakeArena | None = None) -> Any:
    (back,) = FrameParser(arena).feed(encode(frame, arena))
    return back


def look(frame: Any) -> Any:
    """A frame as something that can be compared."""
    if isinstance(frame, Batch):
        return frame.batch_id, frame.payloads, frame.content_types, frame.accepts, frame.attempt, frame.share
    if isinstance(frame, Events):
        return frame.batch_id, frame.outputs, frame.indices, frame.kinds, frame.final, frame.timing
    if isinstance(frame, frames.StartFailed):
        return type(frame.error), str(frame.error)
    return frame


TIMING = Timing(0.25, 0.5, 0.125)

FRAMES: list[Frame] = [
    frames.Start("square:Square", {"worker_index": 3}),
    frames.Start(b"pickled class", {}),
    Batch(1, [b"1", b"2"], JSON, JSON),
    Batch(2**40, [b"1", b"\x02"], [JSON, MSGPACK], [JSON, OBJECT], attempt=2, share=3),
    Batch(3, [1, "two", None, [4.0], {"five": (6, 7)}], OBJECT, OBJECT),
    Batch(4, [b"1", {"a": 1}, b""], [JSON, OBJECT, OBJECT], JSON),
    Batch(5, [], JSON, JSON),
    frames.Cancel(7, [0, 3]),
    frames.Free([(0, 40000), (65536, 1)]),
    frames.Stop(),
    frames.Ready(),
    frames.StartFailed(ModelError("no weights", original_type="OSError", remote_traceback="Traceback ...")),
    frames.Restarted(9),
    frames.Turn(),
    frames.Turn(wanted=False),
    frames.WorkerWaits("no room"),
    frames.WorkerPlaced(7, "4f2a", "192.0.2.1", ["0", "1"], "a1"),
    frames.WorkerLeaves("preempted"),
    frames.WorkerEnded("it was killed"),
    Events(1, [b"1", b"2"], timing=TIMING),
    Events(1, [b"part"], indices=[4], kinds=[EventKind.PART], final=False),
    Events(2, [1, 2.5, "x", None], timing=TIMING),
    Events(2, [b"1", 2, {"a": {1, 2}}], timing=TIMING),
]


def test_each_comes_back_as_it_was_one_byte_at_a_time() -> None:
    parser, back = FrameParser(), []
    for byte in b"".join(map(encode, FRAMES)):
        back += parser.feed(bytes([byte]))
    assert [(type(frame), look(frame)) for frame in back] == [(type(frame), look(frame)) for frame in FRAMES]


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


@settings(max_examples=12)  # they are large
@given(st.lists(json_values))
def test_any_values(values: list[Any]) -> None:
    assert round_trip(Batch(1, values, OBJECT, OBJECT)).payloads == values
    assert round_trip(Events(1, values)).outputs == values


@given(st.binary())
def test_garbage_is_an_error_or_nothing(data: bytes) -> None:
    parser = FrameParser(max_frame_bytes=1 << 16)
    try:
        parser.feed(struct.pack(">I", len(data)) + data)
    except FrameError:
        with pytest.raises(FrameError):
            parser.feed(encode(frames.Stop()))


def test_too_long_a_frame_is_refused_at_its_head() -> None:
    parser = FrameParser(max_frame_bytes=100)
    with pytest.raises(FrameError, match="a frame of 101 bytes, over the limit of 100"):
        parser.feed(struct.pack(">I", 101))


def test_too_long_a_batch_becomes_errors_and_leaves_nothing_in_the_arena() -> None:
    arena = FakeArena()
    batch = Batch(1, [b"x" * LARGE_BYTES, b"y" * 900, Overloaded("full")], JSON, JSON)
    back: Any = FrameParser(max_frame_bytes=900).feed(encode_batch(batch, arena, max_frame_bytes=900))[0]
    assert [type(payload) for payload in back.payloads] == [InvalidRequest, InvalidRequest, Overloaded]
    assert "over the limit of 900" in str(back.payloads[0]) and not arena.blocks
    ended: Any = FrameParser().feed(encode_events(Events(1, [b"y" * 900]), max_frame_bytes=900))[0]
    assert isinstance(ended.outputs[0], ModelError)


class Unpicklable:
    def __init__(self, *, here: bool) -> None:
        self.here = here

    def __reduce__(self) -> Any:
        return fail() if self.here else (fail, ())


def fail() -> None:
    raise RuntimeError("not here")


@subcases("bad", [Unpicklable(here=True), Unpicklable(here=False), [Unpicklable(here=False)], lambda: 0])
def test_one_that_cannot_be_pickled_or_unpickled_fails_alone(bad: Any) -> None:
    arena = FakeArena()
    good = numpy.arange(LARGE_BYTES, dtype=numpy.uint8)
    payloads = round_trip(Batch(1, [1, bad, good, {"x": 3}], OBJECT, OBJECT), arena).payloads
    assert (payloads[0], payloads[3]) == (1, {"x": 3}) and (payloads[2] == good).all()
    assert isinstance(payloads[1], InvalidRequest) and "pickled" in str(payloads[1])
    outputs = round_trip(Events(1, [1, bad])).outputs
    assert outputs[0] == 1 and isinstance(outputs[1], ModelError)
    assert len(arena.blocks) == len(arena.fetched) == 1


def test_large_bytes_and_arrays_lie_in_the_arena_while_it_has_room() -> None:
    arena = FakeArena()
    body, array = b"x" * LARGE_BYTES, numpy.arange(10_000.0)
    batch = round_trip(Batch(1, [body, b"small"], JSON, JSON), arena)
    assert [bytes(payload) for payload in batch.payloads] == [body, b"small"]
    assert isinstance(batch.payloads[0], memoryview)
    events = round_trip(Events(1, [{"a": array, "b": [1]}, {"a": array[:3], "b": []}]), arena)
    assert (events.outputs[0]["a"] == array).all() and (events.outputs[1]["a"] == array[:3]).all()
    assert sorted(arena.fetched) == sorted(arena.blocks)
    assert [length for _, length in arena.blocks] == [LARGE_BYTES, 80_000]
    for without in (FakeArena(room=0), None):
        assert round_trip(Batch(1, [body], JSON, JSON), without).payloads == [body]
        assert (round_trip(Batch(1, [array], OBJECT, JSON), without).payloads[0] == array).all()
    with pytest.raises(FrameError, match="no arena"):
        FrameParser().feed(encode(Batch(1, [body], JSON, JSON), FakeArena()))


def test_a_payload_that_is_in_the_arena_already_is_not_copied() -> None:
    arena = FakeArena()
    block = arena.place(b"received into its place")
    assert block is not None
    payloads = round_trip(Batch(1, [block, memoryview(b"view"), bytearray(b"array")], JSON, JSON), arena).payloads
    assert bytes(payloads[0]) == b"received into its place" and payloads[0].obj is arena.blocks[block]


def test_errors_among_payloads_and_outputs() -> None:
    error = InvalidRequest("wrong", details=[{"loc": ["a"], "msg": "no"}])
    outputs = round_trip(Events(1, [b"1", error, 3], kinds=[1, 2, 1])).outputs
    for back in (outputs[1], *round_trip(Batch(1, [error], JSON, JSON)).payloads):
        assert (type(back), back.message, back.details) == (InvalidRequest, "wrong", [{"loc": ["a"], "msg": "no"}])
    assert outputs[0] == b"1"


pack = msgspec.msgpack.encode
IDS = make_ids(7, 1, 3)


def body_of(frame: bytes) -> bytes:
    (body,) = LockstepParser().feed(frame)
    return body


@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 50))
def test_frames_are_found_however_the_bytes_arrive(bodies: list[bytes], step: int) -> None:
    parser = LockstepParser()
    data = memoryview(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))
    assert bodies == [body for start in range(0, len(data), step) for body in parser.feed(data[start : start + step])]


def test_one_byte_at_a_time() -> None:
    parser = LockstepParser()
    frame = ASK + encode_jobs(IDS, [b"a", b"b" * 70_000, b""])
    found = [body for byte in frame for body in parser.feed(bytes([byte]))]
    assert found[0] == b""
    assert decode_jobs(found[1]) == dict(zip(IDS, [b"a", b"b" * 70_000, b""], strict=True))


@subcases("head", [b"\xff\xff\xff\xff", b"\x80\x00\x00\x00", b"\x00\x00\x04\x01"])
def test_a_length_over_the_limit_is_refused_before_its_bytes_have_come(head: bytes) -> None:
    with pytest.raises(FrameError, match=r"a frame of \d+ bytes, over the limit of 1024"):
        LockstepParser(1024).feed(head)
    assert LockstepParser(1024).feed(b"\x00\x00\x04\x00" + bytes(1024)) == [bytes(1024)]


@given(st.integers(0, 1 << 32), st.integers(0, (1 << 40) - 1), st.integers(0, 200))
def test_ids_are_36_characters_and_differ(salt: int, batch_id: int, count: int) -> None:
    ids = make_ids(salt, batch_id, count)
    assert {len(each) for each in ids} <= {36}
    assert len(set(ids)) == count
    assert not set(ids) & {*make_ids(salt, batch_id + 1, count), *make_ids(salt ^ 1, batch_id, count)}


def test_an_answer_is_aligned_to_the_ids_whatever_its_order() -> None:
    reply = decode_reply(body_of(encode_reply({IDS[2]: b"two", "unknown": b"?", IDS[0]: b"zero"}, [IDS[2]])), IDS)
    assert reply.bodies == [b"zero", None, b"two"] and reply.failed == {2}
    reply = decode_reply(pack({IDS[0]: b"x", ERROR_IDS: "z" * 36 + IDS[0]}), IDS[:1])
    assert reply.failed == {0}  # ids of no batch are left out


@subcases("head", [b"\xc4\3", b"\xc5\0\3", b"\xc6\0\0\0\3", b"\xa3", b"\xd9\3", b"\xda\0\3", b"\xdb\0\0\0\3"])
def test_bodies_may_be_bytes_or_texts_even_of_no_language(head: bytes) -> None:
    assert decode_reply(b"\x81" + pack(IDS[0]) + head + b"\xff\x00x", IDS[:1]).bodies == [b"\xff\x00x"]


@subcases(
    "body",
    [
        b"", b"\x00", b"\xc1", b"\xff" * 10, pack([1]), pack({IDS[0]: 7}), pack({IDS[0]: None}), pack({IDS[0]: {}}), pack({1: b"x"}),
        pack({IDS[0]: b"x"}) + b"x", pack({IDS[0]: b"x"})[:-1], b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000,
        b"\x81\xa1x\xc6\xff\xff\xff\xff", pack({ERROR_IDS: "x" * 35}), pack({ERROR_IDS: IDS[0] + "x"}),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        decode_reply(body, IDS)
