import datetime
import decimal
import enum
import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal

import annotated_types
import msgspec
import numpy
import pydantic
import pytest
from tests.rings import subcases

from weir.errors import InvalidRequest, SettingsError, ValidationFailed
from weir.messages import JSON, MSGPACK
from weir.wire.schema import MAX_ERRORS, MAX_LISTED, read_document, refusal, schema_of
from weir.wire.values import encode


class Point(msgspec.Struct):
    x: float
    tags: list[str] = []


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    x: float


class PointModel(pydantic.BaseModel):
    x: float
    tags: list[str] = []


class Nested(pydantic.BaseModel):
    point: PointModel


def read(declared: Any, value: Any, content_type: str = JSON) -> Any:
    body = value if isinstance(value, bytes) else encode(value, content_type)
    try:
        return schema_of(declared, "Input").reader(content_type)(body)
    except Exception as error:
        answer = refusal(error, content_type, body)
        if answer is None:
            raise
        raise answer from None


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@subcases("declared", [Point, PointModel])
def test_a_good_body_becomes_an_instance(declared: Any, content_type: str) -> None:
    assert read(declared, {"x": 1, "tags": ["a"]}, content_type) == declared(x=1.0, tags=["a"])
    assert read(list[declared], [{"x": 1}], content_type) == [declared(x=1.0)]


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@subcases("declared", [Point, PointModel])
def test_a_bad_one_gets_the_validators_own_list(declared: Any, content_type: str) -> None:
    with pytest.raises(ValidationFailed, match="tags") as caught:
        read(declared, {"x": 1, "tags": ["a", 2]}, content_type)
    (detail,) = caught.value.details
    assert detail["loc"] == ["tags", 1]
    assert {"loc", "msg", "type"} <= set(detail)
    encode(caught.value.details, JSON)


@subcases("declared", [Point, PointModel, int, Annotated[int, pydantic.Field(gt=0)]])
def test_what_is_no_json_is_malformed_not_invalid(declared: Any) -> None:
    for body in (b"", b"{", b"NaN", b'{"x": NaN}', b"[" * 100_000, b'"\xff"'):
        with pytest.raises(InvalidRequest, match="body: must be application/json"):
            read(declared, body)


@subcases("declared", [Point, PointModel])
def test_a_number_no_float_can_hold(declared: Any) -> None:
    with pytest.raises(InvalidRequest, match="out of range"):
        read(declared, b'{"x": 1e999}')


@subcases(
    ("body", "kind", "loc"),
    [
        (b"{}", "missing", []),
        (b"[]", "type", []),
        (b'{"x": "a"}', "type", ["x"]),
        (b'{"x": 1, "y": 2}', "unknown_field", []),
    ],
)
def test_kinds_of_msgspec_errors(body: bytes, kind: str, loc: list[Any]) -> None:
    with pytest.raises(ValidationFailed) as caught:
        read(Strict, body)
    assert [(each["type"], each["loc"]) for each in caught.value.details] == [(kind, loc)]


@subcases("declared", [Point, PointModel])
def test_python_values(declared: Any) -> None:
    schema = schema_of(declared, "Output")
    assert schema.check({"x": 1.0}) == schema.check(declared(x=1.0)) == declared(x=1.0)
    assert schema.check({"x": numpy.float32(0.5), "tags": []}).x == 0.5
    wrong: list[Any] = [{"x": "one"}, object(), *([Point("no number")] if declared is Point else [])]  # type: ignore[arg-type]  # as a user might
    for value in wrong:
        with pytest.raises(ValidationFailed):
            schema.check(value)


class Picture(msgspec.Struct):
    pixels: numpy.ndarray[Any, Any]


def test_a_struct_may_hold_what_only_the_model_understands() -> None:
    picture = Picture(numpy.zeros((2, 2), dtype=object))
    assert schema_of(Picture, "Input").check(picture) is picture
    strange: Any = {1j: object()}
    with pytest.raises(ValidationFailed):
        schema_of(Picture, "Input").check({"pixels": strange})


@subcases("rule", [msgspec.Meta(gt=0), pydantic.Field(gt=0), annotated_types.Gt(0)])
def test_rules_of_pydantic_and_of_msgspec_in_annotations(rule: Any) -> None:
    assert read(Annotated[int, rule], b"1") == 1
    with pytest.raises(ValidationFailed):
        read(Annotated[int, rule], b"0")


class Picky(pydantic.BaseModel):
    x: int

    @pydantic.field_validator("x")
    @classmethod
    def refuse(cls, value: int) -> int:
        if value == 7:
            raise LookupError("a validator's own trouble")
        raise ValueError("none is good enough")


def test_errors_of_validators() -> None:
    with pytest.raises(ValidationFailed, match="x: Value error, none is good enough") as caught:
        read(Picky, {"x": 1})
    assert caught.value.details[0]["ctx"] == {"error": "none is good enough"}
    with pytest.raises(LookupError):
        read(Picky, {"x": 7})


def test_a_long_list_of_errors_is_cut() -> None:
    with pytest.raises(ValidationFailed, match=r"and 4999 more") as caught:
        read(list[PointModel], [{"x": "a" * 3000}] * 5000)
    assert len(caught.value.details) == MAX_ERRORS
    assert len(encode(caught.value.details, JSON)) < 200_000


def test_what_is_no_type() -> None:
    for wrong in (3, "int"):
        with pytest.raises(SettingsError, match=r"Square\.Input=.*must be a pydantic model"):
            schema_of(wrong, "Square.Input")


@subcases("output", [False, True])
def test_json_schemas_refer_to_components(output: bool) -> None:
    for declared, name, title in ((Point, "Point", {}), (list[PointModel], "PointModel", {"title": "X"})):
        schema, components = schema_of(declared, "Input").json_schema(output=output)
        assert f"#/components/schemas/{name}" in str(schema)
        assert components[name]["properties"]["x"] == {"type": "number"} | title
    schema, components = schema_of(Nested, "Input").json_schema(output=output)
    assert schema["properties"]["point"] == {"$ref": "#/components/schemas/PointModel"}
    assert schema_of(Picture, "Input").json_schema(output=output)
    assert schema_of(int, "Input").json_schema(output=output) == ({"type": "integer"}, {})


def test_pydantic_is_not_imported_for_others() -> None:
    code = "import sys, weir.wire.schema as s; s.schema_of(list[int], 'Input').check([1]); assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_of_thousands_of_errors_only_the_number_is_reported() -> None:
    # Pydantic lists all of them at a kilobyte each.
    schema = schema_of(Annotated[list[int], pydantic.Field(max_length=10**6)], "Input")
    for count, listed in ((MAX_LISTED, MAX_ERRORS), (MAX_LISTED + 1, 0)):
        with pytest.raises(
            ValidationFailed, match=f"and {count - 1} more" if listed else f"^item: {count} errors"
        ) as caught:
            schema.check(["x"] * count)
        assert len(caught.value.details) == listed


class Area(msgspec.Struct):
    unit: Literal["m", "km"] = "m"


class Plan(msgspec.Struct, forbid_unknown_fields=True):
    """A document of declared fields."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    rate: float | None = None
    areas: list[Area] = []
    labels: dict[str, str] = {}


def test_a_document_is_read_as_its_type() -> None:
    plan = read_document({"name": "x", "count": 2, "rate": 1, "areas": [{"unit": "km"}], "labels": {"a": "b"}}, Plan)
    assert plan == Plan("x", 2, 1.0, [Area("km")], {"a": "b"})
    assert read_document({"a": 1, "b": "x"}, dict[str, int | str]) == {"a": 1, "b": "x"}


@subcases(
    ("document", "says"),
    [
        ({}, "name: is missing, must be a text"),
        ({"name": None}, "name=None: must be a text"),
        ({"name": ""}, "name='': must be a text of length >= 1"),
        ({"name": "x", "count": 0}, "count=0: must be an integer >= 1"),
        ({"name": "x", "count": "2"}, "count='2': must be an integer or null"),
        ({"name": "x", "count": True}, "count=True: must be an integer or null"),
        ({"name": "x", "rate": []}, "rate=[]: must be a number or null"),
        ({"name": "x", "areas": [{}, {"unit": "mile"}]}, "areas.1.unit='mile': invalid enum value 'mile'"),
        ({"name": "x", "labels": {"a": "b", "c": 3, "d": 4}}, "labels.c=3: must be a text"),
        ({"name": "x", "nmae": 1}, "nmae: unknown field; available: name, count, rate, areas, labels"),
        ({"name": "x", "a - at `$.b`": 1}, "a - at `$.b`: unknown field; available: name, count, rate, areas, labels"),
        ({"name": 3, "n" * 99: 1}, f"{'n' * 80}: unknown field; available: name, count, rate, areas, labels"),
        ([], "body=[]: must be an object"),
    ],
)
def test_a_document_that_is_wrong_is_refused_with_field_value_and_rule(document: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_document(document, Plan)
    assert caught.value.message == says


class Colour(enum.Enum):
    RED = "red"


class StrictModel(pydantic.BaseModel):
    """What JSON has other types for."""

    model_config = pydantic.ConfigDict(strict=True)

    id: uuid.UUID
    day: datetime.date
    at: datetime.datetime
    colour: Colour
    price: decimal.Decimal
    pair: tuple[int, int]
    tags: set[str]
    raw: bytes = b""


DOCUMENT: dict[str, Any] = {
    "id": "00000000-0000-0000-0000-000000000003", "day": "2026-01-02", "at": "2026-01-02T03:04:05Z", "colour": "red", "price": "1.50",
    "pair": [1, 2], "tags": ["a"], "raw": "text",
}  # fmt: skip
READ = StrictModel(
    id=uuid.UUID(int=3), day=datetime.date(2026, 1, 2), at=datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    colour=Colour.RED, price=decimal.Decimal("1.50"), pair=(1, 2), tags={"a"}, raw=b"text",
)  # fmt: skip


def each_form(schema: Any, document: Any) -> list[Callable[[], Any]]:
    """Return what reads `document` as JSON, as msgpack, and given in this process."""
    return [
        lambda: schema.reader(JSON)(msgspec.json.encode(document)),
        lambda: schema.reader(MSGPACK)(msgspec.msgpack.encode(document)),
        lambda: schema.item(document),
    ]


def test_a_strict_type_takes_the_same_item_in_each_form() -> None:
    schema = schema_of(StrictModel, "Input")
    assert [read() for read in each_form(schema, DOCUMENT)] == [READ] * 3
    assert schema.item(dict(READ)) == READ
    assert schema.item(DOCUMENT | {each: getattr(READ, each) for each in ("day", "pair", "tags", "price")}) == READ
    assert schema.reader(MSGPACK)(msgspec.msgpack.encode({**DOCUMENT, "raw": b"text", "at": READ.at})) == READ
    assert schema_of(list[StrictModel], "Input").item([DOCUMENT, dict(READ)]) == [READ, READ]


@subcases("change", [{"pair": ["1", 2]}, {"pair": 3}, {"id": "no"}, {"colour": "green"}, {"raw": 3}, {"day": None}])
def test_and_refuses_the_same_item_in_each_form(change: dict[str, Any]) -> None:
    for read in each_form(schema_of(StrictModel, "Input"), DOCUMENT | change):
        with pytest.raises(ValidationFailed) as caught:
            read()
        assert {each["loc"][0] for each in caught.value.details} == set(change)


def test_bytes_that_are_no_text_are_not_made_one() -> None:
    with pytest.raises(ValidationFailed):
        schema_of(StrictModel, "Input").item({**DOCUMENT, "raw": b"\xff"})

    class InBase64(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(strict=True, val_json_bytes="base64")

        id: uuid.UUID
        raw: bytes

    schema = schema_of(InBase64, "Input")
    with pytest.raises(ValidationFailed):  # "QUJD" would be read as "ABC"
        schema.item({"id": DOCUMENT["id"], "raw": b"QUJD"})
    assert schema.item({"id": uuid.UUID(int=3), "raw": b"QUJD"}).raw == b"QUJD"


@subcases("value", [object(), float("nan"), {"id": float("nan")}, {1: object()}])
def test_what_json_cannot_say_is_judged_as_pythons(value: Any) -> None:
    with pytest.raises(ValidationFailed):
        schema_of(StrictModel, "Input").item(value)
