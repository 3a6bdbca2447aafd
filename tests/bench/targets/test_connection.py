import pytest

from weir.bench.targets.connection import AnswerReader, Garbage, HttpAnswer, error_of, outcome_of

ONE = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n9"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def with_body(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_answers_are_read_however_they_are_cut(step: int) -> None:
    reader = AnswerReader(bodies=True)
    data = ONE + CHUNKED + CLOSING
    found = [answer for at in range(0, len(data), step) for answer in reader.feed(data[at : at + step])]
    assert found == [HttpAnswer(200, b"9", True), HttpAnswer(200, b"abc", True), HttpAnswer(200, b"", False)]


def test_bodies_are_kept_of_errors_only() -> None:
    assert AnswerReader().feed(ONE) == [HttpAnswer(200, b"", True)]
    assert AnswerReader().feed(with_body("400 Bad Request", b"why"))[0].body == b"why"


def test_an_interim_answer_is_none() -> None:
    assert AnswerReader().feed(b"HTTP/1.1 100 Continue\r\n\r\n" + ONE) == [HttpAnswer(200, b"", True)]


@pytest.mark.parametrize(
    "data", [b"garbage\r\n\r\n", b"HTTP/1.1 twohundred\r\n\r\n", b"\x16\x03\x01", b"HTTP/9.9 200 OK\r\n\r\n"]
)
def test_garbage_is_told(data: bytes) -> None:
    with pytest.raises(Garbage):
        AnswerReader().feed(data)


@pytest.mark.parametrize(
    ("status", "body", "outcome"),
    [
        ("200 OK", b"9", "ok"),
        ("204 No Content", b"", "ok"),
        ("429 Too Many Requests", b'{"error":{"type":"Overloaded","message":"full"}}', "429 Overloaded"),
        ("500 Oops", b"<html>", "500"),
        ("500 Oops", b'{"error":"text"}', "500"),
        ("500 Oops", b'{"error":{"type":5}}', "500"),
        ("500 Oops", b"[1]", "500"),
        ("301 Moved", b"", "301"),
    ],
)
def test_errors_are_told_by_code_and_type(status: str, body: bytes, outcome: str) -> None:
    (answer,) = AnswerReader().feed(with_body(status, body))
    assert outcome_of(answer) == outcome
    assert isinstance(error_of(answer), dict)
