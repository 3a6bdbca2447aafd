import math
from typing import Any

import msgspec
import numpy
import pydantic
import pytest

from weir.errors import InvalidRequest, ModelError, SettingsError, UnsupportedMediaType, ValidationFailed, kind_of
from weir.messages import JSON, MSGPACK, OBJECT, OCTETS
from weir.model import Model, Tensor
from weir.wire.tensors import to_arrays
from weir.workers.run.steps import ENDS_THE_PROCESS, Reader, Writer


class Point(msgspec.Struct):
    x: int


class Ticket(pydantic.BaseModel):
    x: int


class Typed(Model):
    Input = Point


class TypedByPydantic(Model):
    Input = Ticket


class Numbers(Model):
    content_types = ("text/numbers",)

    def decode(self, body: bytes, content_type: str) -> Any:
        if body == b"secret":
            raise ValidationFailed("no secrets")
        return [int(word) for word in body.split()]


class Words(Model):
    content_types = ("text/words",)

    def decode(self, body: bytes) -> Any:  # type: ignore[override]  # the short form that the contract allows
        return body.split()


class Arrays(Numbers):
    inputs = (Tensor("x", "FP32", [-1, 2]),)
    outputs = (Tensor("y", "FP32", [-1]),)

    def decode(self, body: bytes, content_type: str) -> Any:
        return {"x": [super().decode(body, content_type)]}


def read(model: type[Model], payloads: list[Any], content_types: str | list[str]) -> list[Any]:
    return Reader(model(), ENDS_THE_PROCESS).read(payloads, content_types)


def test_json_msgpack_octets_and_python_values() -> None:
    value = {"a": [1, None, 0.5]}
    json, msgpack = msgspec.json.encode(value), msgspec.msgpack.encode(value)
    strange = object()
    assert read(Model, [json, memoryview(json)], JSON) == [value, value]
    assert read(Model, [msgpack], MSGPACK) == [value]
    assert read(Model, [b"\xff\x00", memoryview(b"abc")], OCTETS) == [b"\xff\x00", b"abc"]
    assert read(Model, [strange], OBJECT) == [strange]
    assert read(Model, [json, strange, msgpack], [JSON, OBJECT, MSGPACK]) == [value, strange, value]


@pytest.mark.parametrize("bad", [b"", b"{", b"NaN", b"[" * 10_000, b'"\xff"', b"1e999"])
def test_a_malformed_one_fails_alone(bad: bytes) -> None:
    before, error, after = read(Model, [b"1", bad, b"2"], JSON)
    assert (before, after) == (1, 2)
    assert isinstance(error, InvalidRequest)
    assert "application/json" in error.message


@pytest.mark.parametrize("model", [Typed, TypedByPydantic])
@pytest.mark.parametrize(("encode", "content_type"), [(msgspec.json.encode, JSON), (msgspec.msgpack.encode, MSGPACK)])
def test_one_that_the_schema_refuses_fails_alone(model: type[Model], encode: Any, content_type: str) -> None:
    good, wrong, malformed = read(model, [encode({"x": 1}), encode({"x": "a"}), b"\x81"], content_type)
    assert good == model.Input(x=1)
    assert isinstance(wrong, ValidationFailed)
    assert wrong.details[0]["loc"] == ["x"]
    assert isinstance(malformed, InvalidRequest)


@pytest.mark.parametrize("model", [Typed, TypedByPydantic])
def test_python_values_and_octets_are_validated_too(model: type[Model]) -> None:
    item = model.Input(x=3)
    assert read(model, [item, {"x": 3}], OBJECT) == [item, item]
    assert isinstance(read(model, [{"x": math.pi}], OBJECT)[0], ValidationFailed)
    assert isinstance(read(model, [b"3"], OCTETS)[0], ValidationFailed)


def test_an_error_among_the_payloads_stays() -> None:
    error = InvalidRequest("cannot be unpickled")
    for content_type in (JSON, OBJECT, OCTETS, "image/png"):
        assert read(Model, [error], content_type) == [error]


def test_content_types_of_the_models_own() -> None:
    items = read(Numbers, [b"1 2", b"1 x", b"secret"], "text/numbers")
    assert items[0] == [1, 2]
    assert isinstance(items[1], InvalidRequest)
    assert "text/numbers" in items[1].message
    assert isinstance(items[1].__cause__, ValueError)
    assert isinstance(items[2], ValidationFailed)


def test_an_own_decoded_item_is_validated() -> None:
    class Own(Numbers):
        Input = list[int]

        def decode(self, body: bytes, content_type: str) -> Any:
            return {"a": 1} if body == b"odd" else super().decode(body, content_type)

    good, odd = read(Own, [b"1", b"odd"], "text/numbers")
    assert good == [1]
    assert isinstance(odd, ValidationFailed)


def test_own_types_without_decode_are_only_written() -> None:
    class OnlyWritten(Model):
        content_types = ("image/png",)

        def encode(self, value: Any, content_type: str) -> bytes:
            return bytes(value)

    assert isinstance(read(OnlyWritten, [b"a"], "image/png")[0], UnsupportedMediaType)


def test_an_unknown_content_type_is_named_with_the_known_ones() -> None:
    (error,) = read(Numbers, [b"?"], "image/png")
    assert isinstance(error, UnsupportedMediaType)
    assert "'image/png'" in error.message
    assert "application/json, application/msgpack, application/octet-stream, text/numbers" in error.message


class Picky(pydantic.BaseModel):
    x: int

    @pydantic.field_validator("x")
    @classmethod
    def look_up(cls, value: int) -> int:
        return {1: 1}[value]


def test_a_validator_that_breaks_is_the_models_error() -> None:
    class Breaking(Model):
        Input = Picky

    good, broken = read(Breaking, [b'{"x": 1}', b'{"x": 2}'], JSON)
    assert good.x == 1
    assert isinstance(broken, ModelError)
    assert broken.original_type == "KeyError"


def test_an_input_that_is_no_type() -> None:
    class Wrong(Model):
        Input = 3

    with pytest.raises(SettingsError, match=r"Wrong\.Input=3"):
        Reader(Wrong(), ENDS_THE_PROCESS)


def test_tensors_from_every_form() -> None:
    value = {"x": [[1, 2]]}
    payloads: list[Any] = [msgspec.json.encode(value), msgspec.msgpack.encode(value), value, b"1 2"]
    for arrays in read(Arrays, payloads, [JSON, MSGPACK, OBJECT, "text/numbers"]):
        assert arrays["x"].dtype == numpy.float32
        assert arrays["x"].tolist() == [[1, 2]]
    good, wrong, malformed = read(Arrays, [payloads[0], b'{"x": [1]}', b"{"], JSON)
    assert good["x"].shape == (1, 2)
    assert "tensor 'x': has shape [1]" in wrong.message
    assert isinstance(malformed, InvalidRequest)
    assert isinstance(read(Arrays, [b"12345678"], OCTETS)[0], UnsupportedMediaType)


def test_decode_without_the_content_type() -> None:
    assert read(Words, [b"a b"], "text/words") == [[b"a", b"b"]]


class PointOut(msgspec.Struct):
    x: float


class TicketOut(pydantic.BaseModel):
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


def test_answers_in_json_msgpack_octets_and_as_python_values() -> None:
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
    assert f"writing the result ({kind_of(answer)}) as {accept} raised" in bad.message


def test_octets_of_something_else_are_the_callers_error() -> None:
    good, bad = write(Model, [b"1", 1], OCTETS)
    assert good == b"1"
    assert isinstance(bad, UnsupportedMediaType)
    assert "the result is an int, only bytes are written so" in bad.message


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


@pytest.mark.parametrize("declared", [PointOut, TicketOut])
def test_answers_are_held_against_output(declared: Any) -> None:
    class Typed(Model):
        Output = declared

    answers = [{"x": 1.0}, declared(x=0.5), {"x": numpy.float32(0.5)}, {"x": "one"}, InvalidRequest("before")]
    *good, wrong, before = write(Typed, answers, JSON)
    assert good == [b'{"x":1.0}', b'{"x":0.5}', b'{"x":0.5}']
    assert isinstance(wrong, ModelError)
    assert wrong.message.startswith("the model's result is not a valid Output: ")
    assert wrong.details[0]["loc"] == ["x"]
    assert before.message == "before"
    assert write(Typed, [{"x": 1.0}], OBJECT) == [declared(x=1.0)]


def test_tensors_are_written_in_every_form() -> None:
    arrays = to_arrays({"t": ["ä", "b"]}, Texts.inputs)
    json, msgpack, value = write(Texts, [arrays] * 3, [JSON, MSGPACK, OBJECT])
    assert json == '{"t":["ä","b"]}'.encode()
    assert msgspec.msgpack.decode(msgpack) == {"t": ["ä".encode(), b"b"]}
    assert value is arrays
    (wrong,) = write(Texts, [to_arrays({"t": [b"\xff"]}, Texts.inputs)], JSON)
    assert isinstance(wrong, ModelError)


def test_encode_without_the_content_type() -> None:
    assert write(Joining, [["a", "b"]], "text/words") == [b"a b"]


@pytest.mark.parametrize("model", [Typed, TypedByPydantic])
def test_a_list_for_one_item_is_refused_with_the_path_for_several(model: type[Model]) -> None:
    (refused,) = read(model, [b'[{"x": 1}, {"x": 2}]'], JSON)
    assert type(refused) is ValidationFailed
    assert refused.message.endswith("; to send several items, POST the list to /infer/NAME/batch")
    (other,) = read(model, [b'{"x": "no"}'], JSON)
    assert "batch" not in other.message


def test_a_body_without_its_type_is_refused_with_the_types_that_are_read() -> None:
    (refused,) = read(Numbers, [b"\x89PNG\r\n"], JSON)
    assert type(refused) is InvalidRequest
    assert refused.message.endswith("; the model reads text/numbers: curl -H 'Content-Type: text/numbers'")
    (other,) = read(Numbers, [b"{"], JSON)
    assert "curl" not in other.message
