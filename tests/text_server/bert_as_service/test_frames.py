import json

import numpy
import pytest

from weir.errors import InvalidRequest, Overloaded, TooLarge
from weir.text_models.texts import Text
from weir.text_server.bert_as_service import frames
from weir.text_server.bert_as_service.frames import RefusedRequest, ZeroMqRequest

STOCK = [b"me", b'["a", "b"]', b"12", b"2"]


def test_a_stock_request_has_four_frames() -> None:
    ask = frames.read_request(STOCK)
    assert ask == ZeroMqRequest(b"me", b'["a", "b"]', b"12", 2)


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ([], "frames: 0"),
        (STOCK[:3], "frames: 3"),
        ([*STOCK, b"{}"], "frames: 5"),
        ([b"", *STOCK[1:]], "identity: 0 bytes"),
        ([b"x" * 256, *STOCK[1:]], "identity: 256 bytes"),
        ([*STOCK[:2], b"-1", b"2"], "id: b'-1'"),
        ([*STOCK[:2], b"", b"2"], "id: b''"),
        ([*STOCK[:3], b"9" * 21], "count: b'9"),
    ],
)
def test_what_is_no_request_is_refused(sent: list[bytes], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        frames.read_request(sent)


def test_texts_are_pairs_words_or_token_ids() -> None:
    payload = b'["a ||| b ||| c", ["x", "|||", "y"], "plain"]'
    assert frames.read_texts(ZeroMqRequest(b"me", payload, b"1", 3)) == [("a ||| b", "c"), ["x", "|||", "y"], "plain"]
    payload = b'["a ||| b", [1, 2], []]'
    assert frames.read_texts(ZeroMqRequest(b"me", payload, b"1", 3)) == [("a", "b"), [1, 2], []]


@pytest.mark.parametrize(
    ("payload", "size", "text"),
    [
        (b'["a"]', 2, "count: 2, but there are 1"),
        (b"[]", 0, "must not be empty"),
        (b'"a"', 1, "must be a JSON list"),
        (b"[1]", 1, "must be a JSON list"),
        (b'[{"text": "a", "second": "b"}]', 1, "must be a JSON list"),
        (b'[["a", 1]]', 1, r"texts\[0\]: must be all words"),
        (b"[" * 5000, 1, "must be a JSON list"),
        (b'{"\\ud800": 1}', 1, "must be a JSON list"),
        (b'["\\ud800"', 1, "must be a JSON list"),
        (b'["\\ud800", 1]', 2, "must be a JSON list"),
    ],
)
def test_what_are_no_texts_is_refused(payload: bytes, size: int, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        frames.read_texts(ZeroMqRequest(b"me", payload, b"1", size))


def stock(payload: bytes, size: int) -> list[Text]:
    return frames.read_texts(ZeroMqRequest(b"me", payload, b"1", size))


def test_what_is_no_character_is_left_out_of_a_stock_text() -> None:
    payload = rb'["a\u0000b", "\u0000", "c\ud800d", "\udc00", "e\ud83d\ude00", "f \u0000||| g", ""]'
    assert stock(payload, 7) == ["ab", " ", "cd", " ", "e\U0001f600", ("f", "g"), ""]
    words = rb'[["a\u0000", "b"], ["\ud800", "b"], ["c"]]'
    assert stock(words, 3) == [["�", "b"], ["�", "b"], ["c"]]
    assert stock(rb'["a", "\u0000"]', 2) == ["a", " "]


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
    assert frames.read_texts(ZeroMqRequest(b"me", payload, b"1", len(texts))) == texts
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
            stock(payload, 1)


def test_commas_with_nothing_between_them_are_refused_wherever_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_PIECE", 8)
    for payload in (
        b'["abc",, "d", "e"]',
        b'["abcd", ,"e"]',
        b'["abcde",]',
        b'["abc", "d" , ]',
        b'[,"abcdefg"]',
        b'["abc",\n,\n"d"]',
    ):
        with pytest.raises(InvalidRequest, match="must be a JSON list of texts"):
            stock(payload, len(payload.split(b'"')) // 2)
    assert stock(b'[ "abc" ,\n"d" , "efghijklm",["n"] ]', 4) == ["abc", "d", "efghijklm", ["n"]]


def test_a_refusal_is_no_array_for_a_stock_client() -> None:
    ask = ZeroMqRequest(b"me", b"", b"7", 1)
    error = TooLarge("texts: 9, at most 8 (max_texts)" + "x" * 600)
    topic, said, body, number = frames.write_refusal(ask, frames.refusal_of(error, 413))
    assert (topic, body, number) == (b"me", b"", b"7")
    with pytest.raises(TypeError, match="refused by the server: TooLarge: texts: 9; at most 8"):
        numpy.frombuffer(body, dtype=str(json.loads(bytes(said))["dtype"]))
    assert json.loads(bytes(said))["error"] | {"message": ""} == {"type": "TooLarge", "message": "", "status": 413}


def test_vectors_go_as_bytes() -> None:
    vectors = numpy.arange(6, dtype="float32").reshape(3, 2)[:, ::-1]
    ask = ZeroMqRequest(b"me", b"", b"7", 3)
    assert [bytes(each) for each in frames.write_vectors(ask, vectors, None)] == [
        b"me", b'{"dtype":"float32","shape":[3,2],"tokens":""}', numpy.ascontiguousarray(vectors).tobytes(), b"7",
    ]  # fmt: skip
    _, said, _, _ = frames.write_vectors(ask, vectors, [["a"]])
    assert json.loads(bytes(said))["tokens"] == [["a"]]
    assert frames.write_vectors(ask, vectors[:0], None)[2] == b""


def test_facts_and_errors_go_as_json() -> None:
    assert frames.write_facts(ZeroMqRequest(b"me", b"", b"7", 0), {"a": 1}) == [b"me", b'{"a":1}', b"7"]
    failed = frames.refusal_of(Overloaded("full", retry_after=2.0), 429)
    assert failed == RefusedRequest("Overloaded", "full", 429, 2.0)
