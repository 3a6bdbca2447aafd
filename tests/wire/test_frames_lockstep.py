import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rings import subcases

from weir.wire.frames import (
    ASK,
    ERROR_IDS,
    FrameError,
    LockstepParser,
    decode_jobs,
    decode_reply,
    encode_jobs,
    encode_reply,
    make_ids,
)

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
