import struct

import pytest

from weir.errors import InvalidRequest, TooLarge, WeirError
from weir.text_server.bert_as_service.zmtp import (
    COMMAND,
    GREETING,
    LONG,
    MORE,
    Event,
    Received,
    Subscribed,
    ZmtpParser,
    ZmtpReply,
    frame,
    pack,
    ready,
)

BEGIN = GREETING + ready("PUSH")


def pull(**limits: int) -> ZmtpParser:
    return ZmtpParser("PULL", **{"max_message": 1000, "max_frames": 3, **limits})


def events(parser: ZmtpParser, data: bytes) -> list[Event]:
    return list(parser.feed(data))


def test_a_message_comes_whole_however_it_is_cut() -> None:
    frames = [b"me", b"", b"x" * 300]
    stream = BEGIN + b"".join(pack(frames)) + frame(b"next")
    for size in (1, 7, 64, len(stream)):
        parser, found = pull(), list[Event]()
        for start in range(0, len(stream), size):
            found += parser.feed(stream[start : start + size])
        assert found == [Received(frames), Received([b"next"])]
        assert parser.ready
        assert parser.held == 0


def test_what_has_not_come_whole_is_held() -> None:
    parser = pull()
    assert not parser.ready
    assert events(parser, BEGIN + frame(b"12345", MORE) + frame(b"678")[:-1]) == []
    assert parser.held == 5 + 4


def test_subscriptions_have_two_forms() -> None:
    parser = ZmtpParser("PUB", 1024, 1)
    said = frame(b"\1a") + frame(b"\0a") + frame(b"\x09SUBSCRIBEb", COMMAND) + frame(b"\x06CANCELb", COMMAND)
    assert events(parser, GREETING + ready("SUB") + said) == [
        Subscribed(b"a", True), Subscribed(b"a", False), Subscribed(b"b", True), Subscribed(b"b", False),
    ]  # fmt: skip


def test_a_ping_is_answered_and_other_commands_mean_nothing() -> None:
    said = frame(b"\x04PING\x00\x01abc", COMMAND) + frame(b"\x05OTHER", COMMAND) + frame(b"\x09SUBSCRIBEb", COMMAND)
    assert events(pull(), BEGIN + said) == [ZmtpReply(frame(b"\x04PONGabc", COMMAND))]


@pytest.mark.parametrize(
    "greeting",
    [
        b"G",
        b"\xff" + bytes(8) + b"\x00",
        GREETING[:10] + b"\x01",
        GREETING[:12] + b"PLAIN".ljust(20, b"\0"),
        b"\x01\x00",
    ],
)
def test_what_cannot_become_a_greeting_is_refused_at_once(greeting: bytes) -> None:
    with pytest.raises(InvalidRequest, match="greeting"):
        events(pull(), greeting)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (frame(b"early"), "before the handshake"),
        (frame(b"\x05HELLO", COMMAND), "instead of READY"),
        (ready("REQ"), "a socket of type b'REQ', must be PUSH"),
        (frame(b"\x05READY", COMMAND), "a socket of type b''"),
        (frame(b"\x05READY\x0bSocket-Type\x00\x00\x01\x00PUSH", COMMAND), "does not end"),
        (frame(b"\x05READY\xffS", COMMAND), "does not end"),
        (frame(b"", COMMAND), "without a name"),
        (frame(b"\x08x", COMMAND), "without a name"),
        (b"\x08\x00", "flags 0x08"),
        (b"\x05\x00", "flags 0x05"),
        (b"\x06" + struct.pack(">Q", 513), "a command of 513 bytes"),
    ],
)
def test_a_wrong_handshake_is_refused(said: bytes, text: str) -> None:
    with pytest.raises(WeirError, match=text):
        events(pull(), GREETING + said)


def test_a_first_frame_that_is_too_large_is_refused_by_its_head() -> None:
    assert len(events(pull(), BEGIN + frame(b"x" * 1000))) == 1
    with pytest.raises(TooLarge, match="more than 1000 bytes"):
        events(pull(), BEGIN + bytes((LONG,)) + struct.pack(">Q", 1001))
    with pytest.raises(TooLarge, match="more than 3 frames"):
        events(pull(), BEGIN + frame(b"", MORE) * 4)


@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 20])
def test_of_a_message_that_is_too_large_the_small_frames_are_kept(step: int) -> None:
    stream = BEGIN + b"".join(pack([b"me", b"x" * 300_000, b"7"])) + b"".join(pack([b"me", b"y" * 900, b"8"]))
    parser, found, held = pull(), list[Event](), 0
    for start in range(0, len(stream), step):
        found += parser.feed(stream[start : start + step])
        held = max(held, parser.held)
    assert found == [Received([b"me", b"", b"7"], 300_003), Received([b"me", b"y" * 900, b"8"])]
    assert held < 1000 + 32 and not parser.unfinished


def test_the_numbers_of_a_message_that_is_just_full_are_kept() -> None:
    assert events(pull(), BEGIN + b"".join(pack([b"me", b"x" * 998, b"7"]))) == [Received([b"me", b"x" * 998, b"7"])]


@pytest.mark.parametrize("step", [4096, 70_000, 1 << 20])
def test_a_large_frame_is_not_copied(step: int) -> None:
    bodies = [b"x" * 200_000, b"y" * 65_536, b"z" * 65_535]
    stream = BEGIN + b"".join(pack([b"me", *bodies, b"7"])) + frame(b"next")
    parser, found = pull(max_message=1 << 20, max_frames=5), list[Event]()
    for start in range(0, len(stream), step):
        found += parser.feed(stream[start : start + step])
    assert found == [Received([b"me", *bodies, b"7"]), Received([b"next"])]
    first = found[0]
    assert isinstance(first, Received)
    assert [type(each) for each in first.frames[1:3]] == ([bytes] * 2 if step == 1 << 20 else [bytearray] * 2)


def test_a_part_of_a_message_is_unfinished_whatever_is_kept_of_it() -> None:
    parser, found = pull(), []
    for said in (BEGIN, frame(b"me", MORE) + bytes((LONG | MORE,)) + struct.pack(">Q", 1 << 40) + b"x" * 5000):
        assert events(parser, said) == []
        found.append((parser.unfinished, parser.held))
    assert found == [(False, 0), (True, 2)]


def test_a_wrong_subscription_is_refused() -> None:
    for said in (frame(b"\2a"), frame(b"")):
        with pytest.raises(InvalidRequest, match="not a subscription"):
            events(ZmtpParser("PUB", 1024, 1), GREETING + ready("XSUB") + said)
    with pytest.raises(TooLarge, match="has 301 bytes"):
        events(ZmtpParser("PUB", 1024, 1), GREETING + ready("SUB") + frame(b"\1" + b"x" * 301))
