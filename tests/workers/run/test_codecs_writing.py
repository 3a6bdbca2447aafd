import math
from typing import Any

import msgspec
import numpy
import pydantic
import pytest

from weir.errors import InvalidRequest, ModelError, UnsupportedMediaType
from weir.messages import JSON, MSGPACK, OBJECT, OCTETS
from weir.model import Model, Tensor
from weir.wire.tensors import to_arrays
from weir.workers.faults import ENDS_THE_PROCESS
from weir.workers.run.codecs import Writer


class Point(msgspec.Struct):
    x: float


class Ticket(pydantic.BaseModel):
    x: float


class Shouting(Model):
    content_types = ("text/shout",)

    def encode(self, value: Any, content_type: str) -> Any:
        return value.upper().encode() if value != "count" else len(value)


class Joining(Model):
    content_types = ("text/words",)

    def encode(self, value: Any) -> bytes:  # type: ignore[override]  # the short form that the contract allows
        return " ".join(value).encode()


class Texts(Model):
    inputs = outputs = (Tensor("t", "BYTES", [-1]),)


def write(model: type[Model], answers: list[Any], accepts: str | list[str]) -> list[Any]:
    return Writer(model(), ENDS_THE_PROCESS).write(answers, accepts)


def test_json_msgpack_octets_and_python_values() -> None:
    strange = object()
    assert write(Model, [1, {"a": numpy.float32(0.5)}], JSON) == [b"1", b'{"a":0.5}']
    assert write(Model, [[1]], MSGPACK) == [b"\x91\x01"]
    assert write(Model, [b"\xff", bytearray(b"a"), memoryview(b"b")], OCTETS) == [b"\xff", b"a", b"b"]
    assert write(Model, [strange], OBJECT) == [strange]
    assert write(Model, [1, strange, [1]], [JSON, OBJECT, MSGPACK]) == [b"1", strange, b"\x91\x01"]


def test_what_is_not_finite_is_null_in_json() -> None:
    assert write(Model, [math.nan, numpy.array([math.inf])], JSON) == [b"null", b"[null]"]


@pytest.mark.parametrize("answer", [object(), "\ud800", {1j: 2}])
@pytest.mark.parametrize("accept", [JSON, MSGPACK])
def test_an_answer_that_cannot_be_written_is_the_models_error_alone(answer: Any, accept: str) -> None:
    good, bad = write(Model, [1, answer], accept)
    assert isinstance(good, bytes)
    assert isinstance(bad, ModelError)
    assert f"writing the answer (a {type(answer).__name__}) as {accept} raised" in bad.message


def test_octets_of_something_else_are_the_callers_error() -> None:
    good, bad = write(Model, [b"1", 1], OCTETS)
    assert good == b"1"
    assert isinstance(bad, UnsupportedMediaType)
    assert "the answer is a int, only bytes are written so" in bad.message


def test_an_unknown_form_is_named_with_the_known_ones() -> None:
    error, before = write(Shouting, ["a", InvalidRequest("before")], "image/png")
    assert isinstance(error, UnsupportedMediaType)
    assert "application/json, application/msgpack, application/octet-stream, text/shout" in error.message
    assert before.message == "before"


def test_forms_of_the_models_own() -> None:
    good, no_bytes, broken = write(Shouting, ["hi", "count", 3], "text/shout")
    assert good == b"HI"
    assert no_bytes.message == "encode returned int for text/shout, must be bytes"
    assert isinstance(broken, ModelError)
    assert broken.original_type == "AttributeError"


def test_own_types_without_encode_are_only_read() -> None:
    class OnlyRead(Model):
        content_types = ("image/png",)

        def decode(self, body: bytes, content_type: str) -> Any:
            return body

    assert isinstance(write(OnlyRead, ["a"], "image/png")[0], UnsupportedMediaType)
    assert write(OnlyRead, ["a"], JSON) == [b'"a"']


@pytest.mark.parametrize("declared", [Point, Ticket])
def test_answers_are_held_against_output(declared: Any) -> None:
    class Typed(Model):
        Output = declared

    answers = [{"x": 1.0}, declared(x=0.5), {"x": numpy.float32(0.5)}, {"x": "one"}, InvalidRequest("before")]
    *good, wrong, before = write(Typed, answers, JSON)
    assert good == [b'{"x":1.0}', b'{"x":0.5}', b'{"x":0.5}']
    assert isinstance(wrong, ModelError)
    assert wrong.message.startswith("the model's answer is no valid Output: ")
    assert wrong.details[0]["loc"] == ["x"]
    assert before.message == "before"
    assert write(Typed, [{"x": 1.0}], OBJECT) == [declared(x=1.0)]


def test_tensors() -> None:
    arrays = to_arrays({"t": ["ä", "b"]}, Texts.inputs)
    json, msgpack, value = write(Texts, [arrays] * 3, [JSON, MSGPACK, OBJECT])
    assert json == '{"t":["ä","b"]}'.encode()
    assert msgspec.msgpack.decode(msgpack) == {"t": ["ä".encode(), b"b"]}
    assert value is arrays
    (wrong,) = write(Texts, [to_arrays({"t": [b"\xff"]}, Texts.inputs)], JSON)
    assert isinstance(wrong, ModelError)


def test_encode_without_the_content_type() -> None:
    assert write(Joining, [["a", "b"]], "text/words") == [b"a b"]
