"""What is written for outputs and errors, whatever they hold; and which content types are read, and written unasked."""

import json
from typing import Any

import msgspec
import numpy
import pytest
from tests.fakes import FakeRequest
from tests.frontends.http.models import Add, Blob, Echo, Reader, Shout
from tests.rings import subcases

from weir import errors
from weir.batching.request_state import RequestBase
from weir.catalog.registry import Registry
from weir.errors import UnsupportedMediaType
from weir.messages import JSON, MSGPACK, OCTETS, Dispatch, Form, Kind, Reason, Wakeup
from weir.model import Model
from weir.protocols import HttpSettings
from weir.protocols.entries import output_body
from weir.protocols.exchange import QueuedRequest, items_response
from weir.protocols.native import RequestHead, items_http_response, read_head
from weir.protocols.response import (
    HttpResponse,
    accept_of,
    batch_body,
    content_type_of,
    encode_safely,
    error_response,
    explain_headers,
    read_types,
    weighted,
    write_types,
)
from weir.serving.service import Service
from weir.testing import FakeBlock, FakeExecutor


class Ended(QueuedRequest):
    """A request with its end."""

    def __init__(self, end: Any, **options: Any) -> None:
        arrival = options.pop("arrival", 0.0)
        RequestBase.__init__(self, Form(1.0, **options), None, arrival)
        self.output, self.error = (None, end) if isinstance(end, errors.WeirError) else (end, None)


class Own(Echo):
    """What it takes goes before any other meaning of a type."""

    content_types = ("application/x-www-form-urlencoded", "application/geo+json", "multipart/form-data")


def read_head_of(model: Any, path: str = "/inference", **headers: str) -> RequestHead:
    registry = Registry([Service(model, executor=FakeExecutor())])
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    head = read_head(registry, HttpSettings(), "POST", path, given)
    assert head is not None
    return head


def answer_of(head: RequestHead, requests: list[Ended]) -> HttpResponse:
    """Return what is written for requests that have ended."""
    response = items_response(head, requests)
    return items_http_response(head, response, response.write())


def shown(error: BaseException, **options: Any) -> Any:
    """Return what is written for an error."""
    return json.loads(error_response(error, **options).body)["error"]


def test_an_error_is_a_document_and_says_no_more_than_callers_may_know() -> None:
    answer = error_response(errors.InvalidRequest("no", details=[1]), "square")
    assert (answer.status, answer.headers) == (400, [(b"content-type", b"application/json")])
    said = {"type": "InvalidRequest", "message": "no", "model": "square", "details": [1]}
    assert json.loads(answer.body) == {"error": said}
    assert (b"www-authenticate", b"Bearer") in error_response(errors.Unauthorized("no")).headers
    error = errors.ModelError("it raised", details={"a": 1}, original_type="x.Y", remote_traceback="Traceback ...")
    assert shown(error)["details"] == {"a": 1, "original_type": "x.Y"}
    assert shown(error, development=True)["details"]["traceback"] == "Traceback ..."
    ours = KeyError("secret")
    assert error_response(ours).status == 500 and b"secret" not in error_response(ours).body
    assert b"secret" in error_response(ours, development=True).body


@subcases(("wait", "header"), [(None, b"1"), (0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.1, b"2"), (40.0, b"40")])
def test_retry_after_is_in_whole_seconds_and_exact_in_the_details(wait: float | None, header: bytes) -> None:
    error = errors.Overloaded("full", retry_after=wait)
    assert dict(error_response(error).headers)[b"retry-after"] == header
    assert shown(error)["details"] == (None if wait is None else {"retry_after": wait})


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@subcases(
    "details",
    ["\ud800", {"\udc00": 1}, 2**80, float("nan"), {1, 2}, object(), {(1, 2): 3}, itself(), [[[[b"\xff"]]]], 1 + 2j],
)
def test_details_of_any_kind_can_be_written(details: Any) -> None:
    error = errors.ValidationFailed("half \ud800", details=details)
    assert json.loads(error_response(error).body)["error"]["type"] == "ValidationFailed"
    for accept, decode in ((JSON, json.loads), (MSGPACK, msgspec.msgpack.decode)):
        assert decode(batch_body([error], accept, "square"))[0]["code"] == 422
    assert json.loads(encode_safely({"details": details}))


def test_a_block_is_copied_and_released() -> None:
    block = FakeBlock(3)
    block.view[:] = b"123"
    assert output_body(read_head_of(Echo), block) == b"123"
    assert block.shares == 0


def test_tensors_are_written_in_the_accepted_type() -> None:
    arrays = {"sum": numpy.array([[1.5, 2.0]], numpy.float32)}
    assert output_body(read_head_of(Add), arrays) == b'{"sum":[[1.5,2.0]]}'
    packed = output_body(read_head_of(Add, accept=MSGPACK), arrays)
    assert msgspec.msgpack.decode(packed) == {"sum": [[1.5, 2.0]]}
    with pytest.raises(errors.ModelError, match="application/json"):  # which cannot say this
        output_body(read_head_of(Add), {"sum": numpy.array([b"\xff"], object)})


def test_a_list_is_answered_item_by_item_unless_it_failed_as_a_whole() -> None:
    head = read_head_of(Echo, "/infer/echo/batch")
    together = Ended([b"1", errors.InvalidRequest("no")], kind=Kind.ITEMS)
    for requests in ([together], [Ended(b"1"), Ended(errors.InvalidRequest("no"))]):
        answer = answer_of(head, requests)
        assert answer.status == 200
        assert [item.get("code") for item in json.loads(answer.body)] == [None, 400]
    with pytest.raises(errors.DeadlineExceeded, match="late"):
        answer_of(head, [Ended(errors.DeadlineExceeded("late"), kind=Kind.ITEMS)])


def test_what_the_errors_of_a_list_say_together_is_bounded() -> None:
    long = errors.ValidationFailed("no " * 600, details=["x" * 2000])
    short = errors.InvalidRequest("must be a number", details=[1])
    for accept, decode in ((JSON, json.loads), (MSGPACK, msgspec.msgpack.decode)):
        body = batch_body([short, *[long] * 1022, short], accept, "square")
        assert len(body) < 64 * 1024 + 1024 * 512
        items = decode(body)
        assert [item["code"] for item in items] == [400, *[422] * 1022, 400]
        assert items[1]["error"]["details"] == ["x" * 2000]
        assert (items[1000]["error"]["type"], items[1000]["error"]["details"]) == ("ValidationFailed", None)
        assert (items[0]["error"]["details"], items[-1]["error"]["details"]) == ([1], None)
        assert items[-1]["error"]["message"] == "must be a number"


def test_an_item_with_endless_details_leaves_room_for_those_after_it() -> None:
    endless = errors.ModelError("it raised", details={"seen": "x" * 1_000_000}, original_type="x.Y")
    first, second = json.loads(batch_body([endless, errors.InvalidRequest("no", details=[1])], JSON, "square"))
    assert (first["error"]["message"], first["error"]["details"]) == ("it raised", None)
    assert second["error"]["details"] == [1]


def test_an_explanation_has_a_limit_only_if_the_policy_had() -> None:
    request = FakeRequest(None, arrival=10.0)
    dispatch = Dispatch(7, 0, [request], None, 3, 3.0, Reason.DELAY, 5, 0.25, None, Wakeup.TIMER, 10.5)
    assert dict(explain_headers(request.arrival, dispatch)) == {
        b"x-batch-size": b"3", b"x-batch-reason": b"delay", b"x-batch-waiting": b"5", b"x-batch-oldest-age": b"0.250000",
        b"x-batch-wakeup": b"timer", b"x-queue-time": b"0.500000",
    }  # fmt: skip
    dispatch.limit = 8
    assert dict(explain_headers(request.arrival, dispatch))[b"x-batch-limit"] == b"8"


@subcases(
    ("model", "batch", "types"),
    [
        (Echo, False, [JSON, MSGPACK, OCTETS]), (Echo, True, [JSON, MSGPACK]), (Add, False, [JSON, MSGPACK]),
        (Shout, False, [JSON, MSGPACK, OCTETS, "text/plain", "text/x-loud"]), (Shout, True, [JSON, MSGPACK]),
    ],
)  # fmt: skip
def test_what_a_model_reads(model: type[Model], batch: bool, types: list[str]) -> None:
    assert read_types(model, batch) == types


@subcases(
    ("model", "sent", "preferred"),
    [
        (Echo, JSON, JSON), (Echo, MSGPACK, MSGPACK), (Echo, OCTETS, JSON), (Blob, OCTETS, OCTETS),
        (Shout, "text/plain", "text/plain"), (Reader, "text/plain", JSON), (Own, "multipart/form-data; boundary=x", JSON),
    ],
)  # fmt: skip
def test_the_preferred_type_of_answers(model: type[Model], sent: str, preferred: str) -> None:
    assert write_types(model, False, sent)[0] == preferred


@subcases(
    ("model", "value", "meaning"),
    [
        (Shout, "application/vnd.api+json", JSON),
        (Shout, "text/json", JSON),
        (Shout, "TEXT/PLAIN;charset=x", "text/plain"),
        (Shout, " application/json ", JSON),
        (Shout, "application/x-msgpack", MSGPACK),
        (Own, "application/x-www-form-urlencoded", "application/x-www-form-urlencoded"),
        (Own, "application/geo+json", "application/geo+json"),
        (Own, 'Multipart/Form-Data; boundary="aB c"', 'multipart/form-data; boundary="aB c"'),
        (Own, "multipart/form-data;", "multipart/form-data"),
    ],
)
def test_content_types(model: type[Model], value: str, meaning: str) -> None:
    assert content_type_of(value, model, False) == meaning


@subcases(
    ("value", "wanted"),
    [
        ("", JSON), ("*/*", JSON), ("*/*;q=0.1", JSON), ("application/*;q=0.5, text/plain", "text/plain"),
        ("text/*", "text/plain"), ("application/json;q=0.2,application/msgpack;q=0.3", MSGPACK),
        ("application/json;version=2", JSON), ("application/json;q=0, application/*", MSGPACK), (",,;q=1,*/*", JSON),
        ("application/json;q=oops, application/msgpack", MSGPACK),
    ],
)  # fmt: skip
def test_preferences(value: str, wanted: str) -> None:
    assert accept_of(value, [JSON, MSGPACK, "text/plain"]) == wanted


@subcases("value", ["text/html", "image/*", "application/json;q=0", "*/*;q=0", "nonsense"])
def test_preferences_that_cannot_be_met(value: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="responses are written as"):
        accept_of(value, [JSON])


def test_weights_of_which_the_first_are_read() -> None:
    assert weighted("gzip;q=0.5, ZSTD ; q=1.0,br") == {"gzip": 0.5, "zstd": 1.0, "br": 1.0}
    assert list(weighted(",".join(["a"] * 63 + ["b", "c"]))) == ["a", "b"]
