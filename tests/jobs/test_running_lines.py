"""Lines of input files, right and wrong; and the lines of outputs."""

import os
from codecs import BOM_UTF8
from pathlib import Path

import msgspec
import pytest
from tests.rings import subcases

from weir.errors import InvalidRequest
from weir.jobs.running import InputFile, answer_of, body_of, check_endpoint
from weir.jobs.store import JobRequest

GOOD = b'{"custom_id":"a","method":"POST","url":"/infer/m","body":{"x": [1, 2]}}\n'


def read(tmp_path: Path, body: bytes, **limits: int) -> tuple[list[JobRequest], list[tuple[str, int | None]]]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(body)
    lines = InputFile(
        path, "/infer/m", max_requests=limits.get("max_requests", 9), max_line=limits.get("max_line", 200)
    )
    return list(lines), [(error["code"], error["line"]) for error in lines.errors]


def test_requests_are_found_by_their_place(tmp_path: Path) -> None:
    requests, errors = read(tmp_path, GOOD + b"\n" + GOOD.replace(b'"a"', b'"b"').rstrip())
    assert (errors, [request.custom_id for request in requests]) == ([], ["a", "b"])
    assert [request.number for request in requests] == [0, 1]
    file = os.open(tmp_path / "in.jsonl", os.O_RDONLY)
    assert [body_of(file, request) for request in requests] == [b'{"x": [1, 2]}'] * 2
    os.close(file)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (request,), errors = read(tmp_path, BOM_UTF8 + GOOD)
    assert errors == []
    with (tmp_path / "in.jsonl").open("rb") as file:
        assert body_of(file.fileno(), request) == b'{"x": [1, 2]}'
    assert read(tmp_path, BOM_UTF8)[1] == [("empty_file", None)]


@subcases(("line", "code"), [
    (b"no json\n", "invalid_json_line"), (b"[1]\n", "invalid_json_line"),
    (b'{"custom_id":"a","url":"/infer/m"}\n', "invalid_json_line"), (GOOD.replace(b'"a"', b'""'), "invalid_custom_id"),
    (GOOD.replace(b"POST", b"GET"), "invalid_method"), (GOOD.replace(b"/m", b"/n"), "mismatched_url"),
    (GOOD.replace(b"[1, 2]", b"[" + b"1, " * 99 + b"2]"), "line_too_long"),
])  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: bytes, code: str) -> None:
    assert read(tmp_path, GOOD + line)[1] == [(code, 2)]


def test_an_empty_file_and_one_with_too_many_requests(tmp_path: Path) -> None:
    assert read(tmp_path, b"\n\n")[1] == [("empty_file", None)]
    assert read(tmp_path, b"\n" * 9 + GOOD)[1] == []
    assert read(tmp_path, b"\n" * 10_000_000 + GOOD)[1] == [("too_many_lines", 10)]
    assert read(tmp_path, GOOD * 3, max_requests=2)[1] == [("too_many_requests", 3)]
    assert len(read(tmp_path, b"x\n" * 90, max_requests=99)[1]) == 50


def test_an_endpoint_is_a_path_of_inference_however_it_is_encoded() -> None:
    assert check_endpoint("/infer/a%2Fb", {"/infer/a/b"}) == "/infer/a%2Fb"
    with pytest.raises(InvalidRequest, match=r"endpoint='/infer/c': must be a path of inference"):
        check_endpoint("/infer/c", {"/infer/a/b"})


@subcases(("body", "shown"), [
    (b'{"a":1}', {"a": 1}), (b'{"a":\n1}', {"a": 1}), (b"null", None), (b"\xff\x00", "\ufffd\x00"), (b"oops", "oops"),
    (b'["\xff"]', '["\ufffd"]'), (b"[" * 5000, "[" * 5000),
])  # fmt: skip
def test_a_line_of_the_output(body: bytes, shown: object) -> None:
    answer = answer_of("batch_7", JobRequest(3, "ä", 0, 1), 200, body)
    assert b"\n" not in answer.line
    assert msgspec.json.decode(answer.line) == {
        "id": "batch_req_7_3", "custom_id": "ä", "response": {"status_code": 200, "request_id": "batch_req_7_3", "body": shown}, "error": None,
    }  # fmt: skip
