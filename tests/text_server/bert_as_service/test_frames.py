import json
import struct

import numpy
import pytest
from tests.rings import subcases

from weir.errors import InvalidRequest, Overloaded, TooLarge, WeirError
from weir.text_models.texts import Text
from weir.text_server.bert_as_service import frames
from weir.text_server.bert_as_service.frames import COMMAND, GREETING, MORE, Received, ZeroMqRequest, frame, pack, ready

STOCK = [b"me", b'["a", "b"]', b"12", b"2"]


def asking(payload: bytes = b"", size: int = 1) -> ZeroMqRequest:
    return ZeroMqRequest(b"me", payload, b"7", size)


def read(payload: bytes, size: int) -> list[Text]:
    return frames.read_texts(asking(payload, size))


def test_a_stock_request_has_four_frames() -> None:
    assert frames.read_request(STOCK) == ZeroMqRequest(b"me", b'["a", "b"]', b"12", 2)


def test_what_is_no_request_is_refused() -> None:
    frame_counts = {"frames: 0": [], "frames: 3": STOCK[:3], "frames: 5": [*STOCK, b"{}"]}
    names = {"identity: 0 bytes": [b"", *STOCK[1:]], "identity: 256 bytes": [b"x" * 256, *STOCK[1:]]}
    numbers = {"id: b'-1'": [*STOCK[:2], b"-1", b"2"], "id: b''": [*STOCK[:2], b"", b"2"]}
    for text, sent in (frame_counts | names | numbers | {"count: b'9": [*STOCK[:3], b"9" * 21]}).items():
        with pytest.raises(InvalidRequest, match=text):
            frames.read_request(sent)


def test_texts_are_pairs_words_or_token_ids() -> None:
    payload = b'["a ||| b ||| c", ["x", "|||", "y"], "plain"]'
    assert read(payload, 3) == [("a ||| b", "c"), ["x", "|||", "y"], "plain"]
    payload = b'["a ||| b", [1, 2], []]'
    assert read(payload, 3) == [("a", "b"), [1, 2], []]


def test_what_are_no_texts_is_refused() -> None:
    none = [b'"a"', b"[1]", b'[{"text": "a", "second": "b"}]', b"[" * 5000]
    none += [b'{"\\ud800": 1}', b'["\\ud800"', b'["\\ud800", 1]']
    for rule, payloads in {
        "count: 2, but there are 1": [b'["a"]'],
        "must not be empty": [b"[]"],
        "must be a JSON list": none,
        r"texts\[0\]: must be all words": [b'[["a", 1]]'],
    }.items():
        for payload in payloads:
            with pytest.raises(InvalidRequest, match=rule):
                read(payload, {b'["a"]': 2, b"[]": 0}.get(payload, 1))


def test_what_is_no_character_is_left_out_of_a_stock_text() -> None:
    payload = rb'["a\u0000b", "\u0000", "c\ud800d", "\udc00", "e\ud83d\ude00", "f \u0000||| g", ""]'
    assert read(payload, 7) == ["ab", " ", "cd", " ", "e\U0001f600", ("f", "g"), ""]
    words = rb'[["a\u0000", "b"], ["\ud800", "b"], ["c"]]'
    assert read(words, 3) == [["�", "b"], ["�", "b"], ["c"]]
    assert read(rb'["a", "\u0000"]', 2) == ["a", " "]


@pytest.mark.parametrize(
    "texts",
    [
        ["first", ",", '","', '", "', "\\", '\\"', "], [", '"],["', "{", "}", "\\\\", 'a\\\\"', "ü☃\U0001f600", " "],
        [["first", ","], ["]", '","'], ["\\", "["], ["{", '\\"']],
        ["x" * 3_000_000, "y", ["z"] * 10, "]" * 70_000, "[" * 70_000, "," * 70_000, '"' * 70_000],
        ["one", ["two", "three"], "four", ["five"]],
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_many_texts_are_read_in_pieces(texts: list[Text], ascii_only: bool) -> None:
    texts = texts * max(1, 40_000 // len(texts)) if len(texts) != 7 else texts
    payload = json.dumps(texts, ensure_ascii=ascii_only).encode()
    pieces = list(frames._pieces(payload))
    assert read(payload, len(texts)) == texts
    assert max(map(len, pieces)) < 1_100_000 or max(map(len, texts)) > 1_000_000
    assert len(pieces) >= len(payload) // 4_500_000


def test_a_large_list_that_is_broken_is_refused() -> None:
    item = b'"%b", ' % (b"x" * 100)
    for payload in (
        b"[" + item * 30_000, b"[" + item * 30_000 + b'"x"', item * 30_000, b"{" + item * 30_000 + b"}",
        b"[" + item * 20_000 + b", " + item * 20_000 + b'"x"]', b"[" * 3_000_000, b"[" + b"[1," * 1_000_000,
        b"[" + item * 30_000 + b'{"x": 1}]', b'["' + b"x" * 3_000_000, b"[" + b"]" * 3_000_000, b'x["a"]' * 500_000,
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match="must be a JSON list of texts"):
            read(payload, 1)


def test_commas_with_nothing_between_them_are_refused_wherever_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_PIECE", 8)
    between = [b'["abc",, "d", "e"]', b'["abcd", ,"e"]', b'["abcde",]', b'["abc", "d" , ]', b'[,"abcdefg"]']
    for payload in (*between, b'["abc",\n,\n"d"]'):
        with pytest.raises(InvalidRequest, match="must be a JSON list of texts"):
            read(payload, len(payload.split(b'"')) // 2)
    assert read(b'[ "abc" ,\n"d" , "efghijklm",["n"] ]', 4) == ["abc", "d", "efghijklm", ["n"]]


def test_a_refusal_is_no_array_for_a_stock_client() -> None:
    ask = asking(b"", 1)
    error = TooLarge("texts: 9, at most 8 (max_texts)" + "x" * 600)
    topic, said, body, number = frames.write_refusal(ask, frames.refusal_of(error, 413))
    assert (topic, body, number) == (b"me", b"", b"7")
    with pytest.raises(TypeError, match="refused by the server: TooLarge: texts: 9; at most 8"):
        numpy.frombuffer(body, dtype=str(json.loads(bytes(said))["dtype"]))
    assert json.loads(bytes(said))["error"] | {"message": ""} == {"type": "TooLarge", "message": "", "status": 413}


def test_vectors_go_as_bytes() -> None:
    vectors = numpy.arange(6, dtype="float32").reshape(3, 2)[:, ::-1]
    ask = asking(b"", 3)
    assert [bytes(each) for each in frames.write_vectors(ask, vectors, None)] == [
        b"me", b'{"dtype":"float32","shape":[3,2],"tokens":""}', numpy.ascontiguousarray(vectors).tobytes(), b"7",
    ]  # fmt: skip
    _, said, _, _ = frames.write_vectors(ask, vectors, [["a"]])
    assert json.loads(bytes(said))["tokens"] == [["a"]]
    assert frames.write_vectors(ask, vectors[:0], None)[2] == b""


def test_facts_and_errors_go_as_json() -> None:
    assert frames.write_facts(asking(b"", 0), {"a": 1}) == [b"me", b'{"a":1}', b"7"]
    failed = frames.refusal_of(Overloaded("full", retry_after=2.0), 429)
    assert failed == frames.RefusedRequest("Overloaded", "full", 429, 2.0)


BEGIN = GREETING + ready("PUSH")


def pull(**limits: int) -> frames.ZmtpParser:
    return frames.ZmtpParser("PULL", **{"max_message": 1000, "max_frames": 3, **limits})


def events(parser: frames.ZmtpParser, data: bytes, step: int = 1 << 30) -> list[frames.Event]:
    return [event for start in range(0, len(data), step) for event in parser.feed(data[start : start + step])]


def test_a_message_comes_whole_however_it_is_cut() -> None:
    frames = [b"me", b"", b"x" * 300]
    stream = BEGIN + b"".join(pack(frames)) + frame(b"next")
    for size in (1, 7, 64, len(stream)):
        parser = pull()
        assert events(parser, stream, size) == [Received(frames), Received([b"next"])]
        assert parser.ready
        assert parser.held == 0


def test_what_has_not_come_whole_is_held() -> None:
    parser = pull()
    assert not parser.ready
    assert events(parser, BEGIN + frame(b"12345", MORE) + frame(b"678")[:-1]) == []
    assert parser.held == 5 + 4


def test_subscriptions_have_two_forms() -> None:
    parser = frames.ZmtpParser("PUB", 1024, 1)
    said = frame(b"\1a") + frame(b"\0a") + frame(b"\x09SUBSCRIBEb", COMMAND) + frame(b"\x06CANCELb", COMMAND)
    assert events(parser, GREETING + ready("SUB") + said) == [
        frames.Subscribed(b"a", True), frames.Subscribed(b"a", False), frames.Subscribed(b"b", True), frames.Subscribed(b"b", False),
    ]  # fmt: skip


def test_a_ping_is_answered_and_other_commands_mean_nothing() -> None:
    said = frame(b"\x04PING\x00\x01abc", COMMAND) + frame(b"\x05OTHER", COMMAND) + frame(b"\x09SUBSCRIBEb", COMMAND)
    assert events(pull(), BEGIN + said) == [frames.ZmtpReply(frame(b"\x04PONGabc", COMMAND))]


def test_what_cannot_become_a_greeting_is_refused_at_once() -> None:
    old = GREETING[:10] + b"\x01", b"\x01\x00", GREETING[:12] + b"PLAIN".ljust(20, b"\0")
    for greeting in (b"G", b"\xff" + bytes(8) + b"\x00", *old):
        with pytest.raises(InvalidRequest, match="greeting"):
            events(pull(), greeting)


def test_a_wrong_handshake_is_refused() -> None:
    endless = frame(b"\x05READY\x0bSocket-Type\x00\x00\x01\x00PUSH", COMMAND), frame(b"\x05READY\xffS", COMMAND)
    for text, wrong in {
        "before the handshake": [frame(b"early")],
        "instead of READY": [frame(b"\x05HELLO", COMMAND)],
        "a socket of type b'REQ', must be PUSH": [ready("REQ")],
        "a socket of type b''": [frame(b"\x05READY", COMMAND)],
        "does not end": endless,
        "without a name": [frame(b"", COMMAND), frame(b"\x08x", COMMAND)],
        "flags 0x08": [b"\x08\x00"],
        "flags 0x05": [b"\x05\x00"],
        "a command of 513 bytes": [b"\x06" + struct.pack(">Q", 513)],
    }.items():
        for said in wrong:
            with pytest.raises(WeirError, match=text):
                events(pull(), GREETING + said)


def test_a_first_frame_that_is_too_large_is_refused_by_its_head() -> None:
    assert len(events(pull(), BEGIN + frame(b"x" * 1000))) == 1
    with pytest.raises(TooLarge, match="more than 1000 bytes"):
        events(pull(), BEGIN + bytes((frames.LONG,)) + struct.pack(">Q", 1001))
    with pytest.raises(TooLarge, match="more than 3 frames"):
        events(pull(), BEGIN + frame(b"", MORE) * 4)


@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 20])
def test_of_a_message_that_is_too_large_the_small_frames_are_kept(step: int) -> None:
    stream = BEGIN + b"".join(pack([b"me", b"x" * 300_000, b"7"])) + b"".join(pack([b"me", b"y" * 900, b"8"]))
    parser, found, held = pull(), list[frames.Event](), 0
    for start in range(0, len(stream), step):
        found += parser.feed(stream[start : start + step])
        held = max(held, parser.held)
    assert found == [Received([b"me", b"", b"7"], 300_003), Received([b"me", b"y" * 900, b"8"])]
    assert held < 1000 + 32 and not parser.unfinished


def test_the_numbers_of_a_message_that_is_just_full_are_kept() -> None:
    assert events(pull(), BEGIN + b"".join(pack([b"me", b"x" * 998, b"7"]))) == [Received([b"me", b"x" * 998, b"7"])]


@subcases("step", [4096, 70_000, 1 << 20])
def test_a_large_frame_is_not_copied(step: int) -> None:
    bodies = [b"x" * 200_000, b"y" * 65_536, b"z" * 65_535]
    stream = BEGIN + b"".join(pack([b"me", *bodies, b"7"])) + frame(b"next")
    first, second = events(pull(max_message=1 << 20, max_frames=5), stream, step)
    assert (first, second) == (Received([b"me", *bodies, b"7"]), Received([b"next"]))
    assert isinstance(first, Received)
    assert [type(each) for each in first.frames[1:3]] == ([bytes] * 2 if step == 1 << 20 else [bytearray] * 2)


def test_a_part_of_a_message_is_unfinished_whatever_is_kept_of_it() -> None:
    parser, found = pull(), []
    for said in (BEGIN, frame(b"me", MORE) + bytes((frames.LONG | MORE,)) + struct.pack(">Q", 1 << 40) + b"x" * 5000):
        assert events(parser, said) == []
        found.append((parser.unfinished, parser.held))
    assert found == [(False, 0), (True, 2)]


def test_a_wrong_subscription_is_refused() -> None:
    for said in (frame(b"\2a"), frame(b"")):
        with pytest.raises(InvalidRequest, match="not a subscription"):
            events(frames.ZmtpParser("PUB", 1024, 1), GREETING + ready("XSUB") + said)
    with pytest.raises(TooLarge, match="has 301 bytes"):
        events(frames.ZmtpParser("PUB", 1024, 1), GREETING + ready("SUB") + frame(b"\1" + b"x" * 301))
