import json

import numpy
import pytest

from weir.errors import InvalidRequest, Overloaded, TooLarge
from weir.wire import zeromq
from weir.wire.zeromq import Ask, Failed, Said, Wishes

STOCK = [b"me", b'["a", "b"]', b"12", b"2"]


def test_a_stock_request_has_four_frames() -> None:
    ask = zeromq.read_ask(STOCK)
    assert ask == Ask(b"me", b'["a", "b"]', b"12", 2)
    assert ask.topic == b"me"


def test_an_own_request_says_what_it_wishes() -> None:
    wishes = Wishes(timeout=1.5, model="m", tokens=True, ids=[3])
    frames = zeromq.write_ask(b"me", b"[]", 12, 2, wishes)
    ask = zeromq.read_ask(frames)
    assert ask.topic == b"\0weir\0me\0" == zeromq.own_topic(b"me")
    assert ask.wishes is not None
    assert zeromq.read_wishes(ask.wishes) == wishes


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "frames: 0"),
        (STOCK[:3], "frames: 3"),
        ([*STOCK, b"{}", b""], "frames: 6"),
        ([b"", *STOCK[1:]], "identity: 0 bytes"),
        ([b"x" * 256, *STOCK[1:]], "identity: 256 bytes"),
        ([b"\0x", *STOCK[1:]], "zero byte"),
        ([*STOCK[:2], b"-1", b"2"], "id: b'-1'"),
        ([*STOCK[:2], b"", b"2"], "id: b''"),
        ([*STOCK[:3], b"9" * 21], "count: b'9"),
    ],
)
def test_what_is_no_request_is_refused(frames: list[bytes], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        zeromq.read_ask(frames)


def test_wishes_are_bounded_and_well_formed() -> None:
    for data in (
        b"{",
        b"[]",
        b'{"timeout": "long"}',
        b'{"ids": ["a"]}',
        b'{"priority": 1000000000}',
        b"\xff",
        b"[" * 5000,
    ):
        with pytest.raises(InvalidRequest, match="must be a JSON object"):
            zeromq.read_wishes(data)
    with pytest.raises(InvalidRequest, match="70000 bytes"):
        zeromq.read_wishes(b" " * 70_000)


def test_texts_are_read_in_each_dialect() -> None:
    payload = b'["a ||| b ||| c", ["x", "|||", "y"], "plain"]'
    assert zeromq.read_texts(Ask(b"me", payload, b"1", 3)) == [("a ||| b", "c"), ["x", "|||", "y"], "plain"]
    payload = b'["a ||| b", [1, 2], {"text": "a", "second": "b"}, []]'
    assert zeromq.read_texts(Ask(b"me", payload, b"1", 4, b"{}")) == ["a ||| b", [1, 2], ("a", "b"), []]


@pytest.mark.parametrize(
    ("payload", "size", "text"),
    [
        (b'["a"]', 2, "count: 2, but there are 1"),
        (b"[]", 0, "must not be empty"),
        (b'"a"', 1, "must be a JSON list"),
        (b"[1]", 1, "must be a JSON list"),
        (b'[["a", 1]]', 1, r"texts\[0\]: must be all words"),
        (b"[" * 5000, 1, "must be a JSON list"),
        (b'{"\\ud800": 1}', 1, "must be a JSON list"),
        (b'["\\ud800"', 1, "must be a JSON list"),
        (b'["\\ud800", 1]', 2, "must be a JSON list"),
    ],
)
def test_what_are_no_texts_is_refused(payload: bytes, size: int, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        zeromq.read_texts(Ask(b"me", payload, b"1", size))


def stock(payload: bytes, size: int) -> list[zeromq.Text]:
    return zeromq.read_texts(Ask(b"me", payload, b"1", size))


def test_what_is_no_character_is_left_out_of_a_stock_text() -> None:
    payload = rb'["a\u0000b", "\u0000", "c\ud800d", "\udc00", "e\ud83d\ude00", "f \u0000||| g", ""]'
    assert stock(payload, 7) == ["ab", " ", "cd", " ", "e\U0001f600", ("f", "g"), ""]
    words = rb'[["a\u0000", "b"], ["\ud800", "b"], ["c"]]'
    assert stock(words, 3) == [["�", "b"], ["�", "b"], ["c"]]
    assert stock(rb'["a", "\u0000"]', 2) == ["a", " "]


def test_what_is_no_character_is_named_in_other_dialects() -> None:
    many = b'"%b", ' % (b"x" * 1000) * 3000
    for payload, size, text in (
        (rb'["a", "b\ud800"]', 2, r"texts\[1\]: is not valid Unicode: character 1 is half"),
        (rb'["a", ["b", "\ud800"]]', 2, r"texts\[1\]\[1\]: is not valid Unicode"),
        (b"[" + many + rb'"\ud800"]', 3001, r"texts\[3000\]: is not valid Unicode"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            zeromq.read_texts(Ask(b"me", payload, b"1", size, b"{}"))
    assert zeromq.read_texts(Ask(b"me", rb'["a\u0000"]', b"1", 1, b"{}")) == ["a\0"]  # the tokenizer refuses it


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
def test_many_texts_are_read_in_pieces(texts: list[zeromq.Text], ascii_only: bool) -> None:
    texts = texts * max(1, 40_000 // len(texts)) if len(texts) != 7 else texts
    payload = json.dumps(texts, ensure_ascii=ascii_only).encode()
    pieces = list(zeromq._pieces(payload))
    assert zeromq.read_texts(Ask(b"me", payload, b"1", len(texts), b"{}")) == texts
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
    monkeypatch.setattr(zeromq, "_PIECE", 8)
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
    ask = Ask(b"me", b"", b"7", 1)
    error = TooLarge("texts: 9, at most 8 (max_texts)" + "x" * 600)
    topic, said, body, number = zeromq.write_refusal(ask, zeromq.failed(error, 413))
    assert (topic, body, number) == (b"me", b"", b"7")
    with pytest.raises(TypeError, match="refused by the server: TooLarge: texts: 9; at most 8"):
        numpy.frombuffer(body, dtype=str(json.loads(bytes(said))["dtype"]))
    assert json.loads(bytes(said))["error"] | {"message": ""} == {"type": "TooLarge", "message": "", "status": 413}
    with pytest.raises(InvalidRequest, match="refused by the"):
        zeromq.read_stock_answer([b"me", bytes(said), b"", b"7"])


def test_texts_are_read_as_they_were_written() -> None:
    texts: list[zeromq.Text] = ["ä ||| b", ("a", "b"), ["x", "y"], [1, 2]]
    assert zeromq.read_texts(Ask(b"me", zeromq.write_texts(texts), b"1", 4, b"{}")) == texts
    with pytest.raises(InvalidRequest, match=r"texts\[1\]"):
        zeromq.write_texts(["a", ("b", "\udc00")])


def test_vectors_go_in_each_dialect() -> None:
    vectors = numpy.arange(6, dtype="float32").reshape(3, 2)[:, ::-1]
    stock = Ask(b"me", b"", b"7", 3)
    assert [bytes(each) for each in zeromq.write_vectors(stock, vectors, [1], None)] == [
        b"me", b'{"dtype":"float32","shape":[3,2],"tokens":""}', numpy.ascontiguousarray(vectors).tobytes(), b"7",
    ]  # fmt: skip
    heard = zeromq.read_stock_answer([bytes(each) for each in zeromq.write_vectors(stock, vectors, [], [["a"]])])
    assert heard is not None
    assert heard.said.tokens == [["a"]]
    own = stock._replace(wishes=b"{}")
    answer = zeromq.read_answer([bytes(each) for each in zeromq.write_vectors(own, vectors, [1], [["a"]])])
    assert answer.id == 7
    assert (answer.said.truncated, answer.said.tokens) == ([1], [["a"]])
    assert answer.vectors is not None
    assert answer.vectors.tolist() == vectors.tolist()
    empty = zeromq.read_answer([bytes(each) for each in zeromq.write_vectors(own, vectors[:0], [], None)])
    assert empty.vectors is not None
    assert empty.vectors.shape == (0, 2)


def test_facts_and_errors_go_as_json() -> None:
    stock = Ask(b"me", b"", b"7", 0)
    assert zeromq.write_facts(stock, {"a": 1}) == [b"me", b'{"a":1}', b"7"]
    own = stock._replace(wishes=b"{}")
    assert zeromq.read_answer([bytes(each) for each in zeromq.write_facts(own, {"a": 1})]).said.facts == {"a": 1}
    failed = zeromq.failed(Overloaded("full", retry_after=2.0), 429)
    assert failed == Failed("Overloaded", "full", 429, 2.0)
    answer = zeromq.read_answer([bytes(each) for each in zeromq.write_said(own, Said(error=failed))])
    assert answer.said.error == failed
    assert zeromq.read_stock_answer([b"me", b"{}", b"7"]) is None


@pytest.mark.parametrize(
    "frames",
    [
        [b"me", b"{}", b""],
        [b"me", b"{}", b"", b"x"],
        [b"me", b"[]", b"", b"1"],
        [b"me", b'{"dtype": "object", "shape": [1]}', b"1234", b"1"],
        [b"me", b'{"dtype": "float32", "shape": [-1]}', b"1234", b"1"],
        [b"me", b'{"dtype": "float32", "shape": [2]}', b"1234", b"1"],
        [b"me", b'{"dtype": "float32", "shape": [1]}', b"12345", b"1"],
        [b"me", b'{"dtype": "float32", "shape": [99999999999, 99999999999]}', b"1234", b"1"],
    ],
)
def test_what_is_no_answer_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(InvalidRequest, match="answer:"):
        zeromq.read_answer(frames)


def test_what_is_no_stock_answer_is_refused() -> None:
    for said in (b"{", b"[]", b"3", b'{"dtype": 3, "shape": []}', b'{"shape": [1]}'):
        with pytest.raises(InvalidRequest, match="answer:"):
            zeromq.read_stock_answer([b"me", said, b"1234", b"1"])
