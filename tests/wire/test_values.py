import math
from typing import Any

import msgspec
import numpy
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.errors import InvalidRequest
from weir.messages import JSON, MSGPACK
from weir.wire.values import UNWRITABLE, decode, encode, split

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@settings(max_examples=50)
@given(value=values)
def test_comes_back(content_type: str, value: Any) -> None:
    assert decode(encode(value, content_type), content_type) == value


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@settings(max_examples=30)  # they are large
@given(items=st.lists(values))
def test_a_list_is_split_into_what_its_items_are_encoded_as(content_type: str, items: list[Any]) -> None:
    assert [decode(item, content_type) for item in split(encode(items, content_type), content_type)] == items


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@given(body=st.binary())
def test_garbage_is_refused_or_read(content_type: str, body: bytes) -> None:
    for read in (decode, split):
        try:
            read(body, content_type)
        except InvalidRequest as error:
            assert content_type in str(error)


@pytest.mark.parametrize(
    "body",
    [b"", b"NaN", b"Infinity", b"1e999", b"[-1e999]", b"{", b"[1,]", b"1 2", b'"\xff"', b"9" * 10_000],
)
def test_bad_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="body: must be application/json"):
        decode(body, JSON)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [(b"[" * 100_000 + b"]" * 100_000, JSON), (b'{"a":' * 100_000, JSON), (b"\x91" * 100_000 + b"\x01", MSGPACK)],
)
def test_deep_nesting_is_refused(body: bytes, content_type: str) -> None:
    with pytest.raises(InvalidRequest, match="nested less deeply"):
        decode(body, content_type)
    with pytest.raises(InvalidRequest, match="nested less deeply"):
        split(body if content_type == MSGPACK else b"[" + body, content_type)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x01\x01", b"\xdd\xff\xff\xff\xff", b"\x92\x01"])
def test_bad_msgpack_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="body: must be application/msgpack"):
        decode(body, MSGPACK)


def test_split_wants_a_list() -> None:
    with pytest.raises(InvalidRequest, match="Expected `array`"):
        split(b"3", JSON)
    assert split(b'[1, {"a": [2]}]', JSON) == [b"1", b'{"a": [2]}']
    assert split(memoryview(b"[]"), JSON) == []


class Point(pydantic.BaseModel):
    x: float = pydantic.Field(alias="X")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (numpy.float32(0.5), b"0.5"),
        (numpy.int64(3), b"3"),
        (numpy.bool_(True), b"true"),
        (numpy.array([[1, 2], [3, 4]]), b"[[1,2],[3,4]]"),
        ({"a": numpy.array([0.5])}, b'{"a":[0.5]}'),
        ([math.nan, math.inf, numpy.array([-math.inf])], b"[null,null,[null]]"),
        (Point(X=0.5), b'{"X":0.5}'),
        (10**30, b"1" + b"0" * 30),
    ],
)
def test_what_is_written_as_json(value: Any, text: bytes) -> None:
    assert encode(value, JSON) == text


def test_msgpack_carries_what_is_not_finite() -> None:
    assert msgspec.msgpack.decode(encode([math.inf, numpy.float64(-math.inf)], MSGPACK)) == [math.inf, -math.inf]


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize("value", [object(), {1j: 2}, "\ud800", test_bad_json_is_refused])
def test_what_cannot_be_written(value: Any, content_type: str) -> None:
    with pytest.raises(UNWRITABLE):
        encode(value, content_type)


def test_a_list_that_contains_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(RecursionError):
        encode(value, JSON)
