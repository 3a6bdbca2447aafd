import gc
import json
import math
import re
import tracemalloc
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rings import subcases

from weir.errors import InvalidRequest, TooLarge
from weir.messages import JSON, MSGPACK
from weir.wire import values
from weir.wire.kserve_json import read_request
from weir.wire.values import decode, encode, half_in, split, without_halves


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return lists and objects of these, of themselves, and these alone."""
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)


simple = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
anything = nested(simple)


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@settings(max_examples=25)
@given(items=st.lists(anything, max_size=5))
def test_a_list_comes_back_whole_and_split_into_its_items(content_type: str, items: list[Any]) -> None:
    body = encode(items, content_type)
    assert decode(body, content_type) == items
    assert [decode(item, content_type) for item in split(body, content_type) or ()] == items


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@given(body=st.binary())
def test_garbage_is_refused_or_read(content_type: str, body: bytes) -> None:
    for read in (decode, split):
        try:
            read(body, content_type)
        except InvalidRequest as error:
            assert content_type in str(error)


NO_JSON = [
    b"", b" ", b"NaN", b"Infinity", b"-Infinity", b"1e999", b"[-1e999]", b"{", b"[1,]", b"1 2", b"9" * 10_000, b"3" * 5000 + b".", b"nul", b"{1: 2}",
    b"'a'", b'"abc', b'"\xff"', b"\xff\xfe", b"0x10", b"01", b"\x00", b"1\x00",
]  # fmt: skip
HUGE = b"\xff" * 4
NO_MSGPACK = [b"", b"\xc1", b"\x01\x01", b"\x92\x01", b"\xa5ab", b"\xa2\xff\xff", b"\xdd" + HUGE, b"\xdf" + HUGE]


@subcases(("body", "content_type"), [*((body, JSON) for body in NO_JSON), *((body, MSGPACK) for body in NO_MSGPACK)])
def test_a_bad_body_is_refused(body: bytes, content_type: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^body: must be {content_type}"):
        decode(body, content_type)


@subcases(("level", "content_type"), [(b"[", JSON), (b'[{"a":', JSON), (b"\x91", MSGPACK)])
def test_deep_nesting_is_refused(level: bytes, content_type: str) -> None:
    for read, depth in ((decode, 100_000), (split, 1_000_000)):  # what is only passed over takes less of the stack
        with pytest.raises(InvalidRequest, match="nested less deeply"):
            read(level * depth, content_type)


@subcases("body", [b'{"a": 1, "b": 2, "c": 3}', b"[1, 2, 3", b"[1, 2 3, 4]", b"3", b""])
def test_what_is_no_list_is_not_split_whatever_is_allowed(body: bytes) -> None:
    for content_type in (JSON, MSGPACK):
        for most in (None, 2):
            with pytest.raises(InvalidRequest, match=r"^body: must be"):
                split(body, content_type, most)


class Point(pydantic.BaseModel):
    x: float = pydantic.Field(alias="X")


@subcases(
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
        ([deque([1, 2]), re.compile("a+")], b'[[1,2],"a+"]'),
    ],
)
def test_what_is_written_as_json(value: Any, text: bytes) -> None:
    assert encode(value, JSON) == text


def test_msgpack_carries_what_is_not_finite() -> None:
    assert msgspec.msgpack.decode(encode([math.inf, numpy.float64(-math.inf)], MSGPACK)) == [math.inf, -math.inf]


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@subcases("value", [object(), {1j: 2}, "\ud800", nested, CIRCLE])
def test_what_cannot_be_written(value: Any, content_type: str) -> None:
    with pytest.raises(values.UNWRITABLE):
        encode(value, content_type)


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@subcases("piece", [1, 2, 3, 4096])
def test_a_list_is_split_if_it_is_no_longer_than_allowed(
    content_type: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "_PIECE", piece)
    items = [1, "a, b", [2, [3, 4]], {"c": 5, "d": '\\",['}, None, "]", 1.5, []]
    for count in range(len(items) + 1):
        body = encode(items[:count], content_type)
        for most in range(1, len(items) + 2):
            parts = split(body, content_type, most)
            assert parts == ([encode(each, content_type) for each in items[:count]] if count <= most else None)
    assert split(b" [ 1 , [2 , 3] ,  4 ] ", JSON, 3) == [b"1", b"[2 , 3]", b"4"]
    assert split(memoryview(b" [ 1 , [2 , 3] ,  4 ] "), JSON, 2) is None
    assert split(encode([0] * 70_000, MSGPACK), MSGPACK, 69_999) is None


@subcases("most", [1024, 10_000])
def test_the_elements_of_a_list_that_is_too_long_are_not_made(most: int) -> None:
    bodies = [(b"[" + b"1," * 500_000 + b"1]", JSON), (b"\xdd" + (10**6).to_bytes(4, "big") + b"\x01" * 10**6, MSGPACK)]
    split(bodies[0][0], JSON, most)  # numpy has been loaded
    tracemalloc.start()
    for body, content_type in bodies:
        assert split(body, content_type, most) is None
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_large_bodies_are_decoded_without_the_garbage_collector() -> None:
    try:
        with values.uncollected(1 << 17):
            assert not gc.isenabled()
        with values.uncollected(100):
            assert gc.isenabled()
        gc.disable()
        with values.uncollected(1 << 17):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


SLOW = ["-1e308", "1.7976931348623157e308", "4.9e-324", "2.2250738585072014e-308", "1e23", "1E23"]


@subcases("text", [*SLOW, "1.5", "1E+22", "-0.0", "1e5", "1e309", "-1e400"])
def test_floats_are_read_alike_in_small_bodies_and_in_large_ones(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 5000):
        if count > 1 and text in SLOW:
            # Ten microseconds each: a megabyte of them kept the interpreter for more than a second.
            monkeypatch.setattr(values, "_decode_json", lambda body: pytest.fail("it was given to msgspec"))
        body = b"[" + b",".join([text.encode()] * count) + b"]"
        if math.isfinite(float(text)):
            assert decode(body, JSON) == [float(text)] * count
        else:
            with pytest.raises(InvalidRequest, match="out of range"):
                decode(body, JSON)
    monkeypatch.undo()


def containers(count: int, content_type: str, filled: int = 0) -> bytes:
    """Return a list of so many lists and objects in all, in more bytes than it takes to have as many as it may."""
    if content_type == JSON:
        return b"[" + b",".join([b"{}"] * (count - 1)) + b' ,"' + b"[{" * filled + b'"]'
    some = b"\x80" * (count - 1) + b"\xc6" + (2 * filled).to_bytes(4, "big") + b"\x90\xdc" * filled
    return b"\xdd" + count.to_bytes(4, "big") + some


@settings(max_examples=40)
@given(value=nested(simple | st.binary(max_size=300) | st.text('["\\\\{')))
def test_lists_and_objects_are_counted_as_they_are_decoded(value: Any) -> None:
    def count(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + sum(map(count, inner))

    most = count(value) + 1  # what looks like more makes them be counted one by one
    assert values._msgpack_containers(msgspec.msgpack.encode([b"\x90" * 400, value]), most) == most
    assert values._json_containers(msgspec.json.encode(["[" * 400, value]), most) == most


def names(count: int, content_type: str, size: int) -> bytes:
    """Return an object of so many names, in a list with a text so that both have about `size` bytes."""
    if content_type == JSON:
        return b"[{" + b",".join([b'"%x":0' % name for name in range(count)]) + b'},"' + b'\\":' * (size // 3) + b'"]'
    made = b"".join([b"\xce" + name.to_bytes(4, "big") + b"\x00" for name in range(count)])
    return b"\x92\xdf" + count.to_bytes(4, "big") + made + b"\xc6" + size.to_bytes(4, "big") + b"\xdf" * size


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@subcases(
    ("made", "any_body", "per", "what"),
    [
        (containers, values.ANY_CONTAINERS, 16, "lists and objects, which a body of"),
        (names, values.ANY_NAMES, 64, "different names in its objects, which a body of"),
    ],
)
def test_more_than_a_body_may_have_is_refused_before_it_is_made(
    content_type: str, made: Callable[[int, str, int], bytes], any_body: int, per: int, what: str
) -> None:
    size = 1 << 19  # of a text that looks like more and is not
    most = any_body + len(made(any_body, content_type, size)) // per
    decode(made(most, content_type, size), content_type)
    many = made(most + 40_000, content_type, size)
    tracemalloc.start()
    with pytest.raises(TooLarge, match=what):
        decode(many, content_type)
    assert tracemalloc.get_traced_memory()[1] < 4 * len(many)
    tracemalloc.stop()


def test_names_that_come_again_nearby_are_none() -> None:
    items = [{"age": place, "sex": "m", "name": f"number {place}"} for place in range(values.ANY_NAMES)]
    for content_type in (JSON, MSGPACK):
        assert decode(encode(items, content_type), content_type) == items
    again = b"{" + b",".join([b'"%d":1' % (place % values.ANY_NAMES) for place in range(5 * values.ANY_NAMES)]) + b"}"
    with pytest.raises(TooLarge):  # which are as slow as others where they come again much later
        decode(again, JSON)
    assert len(values.DECODE[JSON](again)) == values.ANY_NAMES  # workers have the time


@settings(max_examples=40)
@given(value=nested(simple | st.text('":{\\')))
def test_names_are_counted_as_they_are_decoded(value: Any) -> None:
    def found(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(map(json.dumps, value)).union(*map(found, value.values()))
        return set().union(*map(found, value)) if isinstance(value, list) else set()

    body = json.dumps([":" * 400, value]).encode()
    assert values._json_names(body, 300) == len(found(value) - {'""'})


X = {"name": "x", "datatype": "INT32", "shape": [2], "data": [1, 2]}


def test_the_tensor_and_the_number_are_named() -> None:
    kinds: list[tuple[Any, str]] = [([1.0, math.nan], "NaN"), ([[math.inf]], "Infinity"), (-math.inf, "-Infinity")]
    for data, word in kinds:
        body = json.dumps({"inputs": [X, {**X, "name": "y", "datatype": "FP32", "data": data}]}).encode()
        assert values.find_nonfinite(body) == f"tensor 'y': has the element {word}, which is none of FP32 in JSON"


NONFINITE = json.dumps({"inputs": [{**X, "data": [math.nan]}], "more": "." * (1 << 20)}).encode()  # too long to search


@subcases(
    "body",
    [
        *[b"", b"NaN", b"[NaN]", b'{"inputs": NaN}', b'{"inputs": [NaN]}', b'{"inputs": [{"data": [NaN]}'],
        *[b'{"inputs": [{"data": ["NaN"]}]}', b'{"id": NaN, "inputs": []}', b'{"inputs": [], "id": "\xffNaN"}'],
        *[b'{"inputs": [{"data": ' + b"[" * 100_000 + b"NaN", json.dumps({"inputs": [X]}).encode(), NONFINITE],
    ],
)
def test_what_is_wrong_in_another_way_is_left_to_others(body: bytes) -> None:
    assert values.find_nonfinite(body) is None


CUT = rb'"ab\ud83d"'


@subcases(
    ("body", "byte"),
    [
        *[(CUT, 3), (b"[1, " + CUT + b"]", 7), (b"{" + CUT + b": 1}", 4), (rb'["\\", {"\u0061": "ab\uDE00"}]', 21)],
        *[(b"", None), (b'"fine"', None), (rb'"\ud83d\ude00"', None), (b'"' + rb"\\ud83d" * 200_000 + b'"', None)],
    ],
)
def test_the_byte_at_which_a_text_is_cut_in_a_character(body: bytes, byte: int | None) -> None:
    named = None if byte is None else f"is not valid Unicode: byte {byte} begins half of a surrogate pair"
    assert half_in(body) == named


def test_the_errors_name_it() -> None:
    tensor = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": [' + CUT + b"]}]}"
    long = b"[1, " + CUT + b"," + CUT * 10_001 + b"]"
    for read, body, byte in ((decode, CUT, 3), (split, long, 7), (read_request, tensor, 73)):
        with pytest.raises(InvalidRequest, match=f"body: is not valid Unicode: byte {byte} begins half"):
            read(body, JSON)


def test_a_list_is_split_around_the_elements_that_are_cut() -> None:
    whole = b'[ 1,"a\\n" , ' + CUT + b',\t{"x": [' + CUT + b"]}, [] ]"
    assert split(whole, JSON) == [b"1", b'"a\\n"', CUT, b'{"x": [' + CUT + b"]}", b"[]"]
    assert split(memoryview(whole), JSON) == split(whole, JSON)
    assert split(whole, JSON, 4) is None
    with pytest.raises(InvalidRequest, match="body"):
        split(b"[" + CUT, JSON)


def test_a_nul_stands_where_a_half_stood() -> None:
    assert without_halves(rb'["\ud83d", "\\ud83d", "\ud83d\ude00\udE00", "\n\uDBFFx"]') == (
        rb'["\u0000", "\\ud83d", "\ud83d\ude00\u0000", "\n\u0000x"]'
    )
    assert without_halves(rb'["\ud83d\ude00"]') is None
    assert without_halves(b'"' + rb"\ud83d" * values.MAX_HALVES + b'"') is None  # another would be looked for
    assert without_halves(b'"' + rb"\ud83d" * (values.MAX_HALVES - 1) + b'"') is not None


def test_a_text_without_nul_is_what_it_was() -> None:
    assert [values.without_nul(text) for text in ("a", "a\0b", "\0", "")] == ["a", "ab", " ", ""]
    assert values.words_without_nul(["a", "\0", "b\0", 3]) == ["a", "\ufffd", "\ufffd", 3]


NS = numpy.datetime64("2026-01-02T03:04:05.000000006", "ns")


@subcases(
    ("value", "written"),
    [
        (numpy.longdouble(1.5), 1.5),
        (numpy.array([1.5, 2], numpy.longdouble), [1.5, 2.0]),
        (NS, "2026-01-02T03:04:05.000000006"),
        (NS.astype("datetime64[s]"), "2026-01-02T03:04:05"),
        (NS.astype("datetime64[D]"), "2026-01-02"),
        (NS.astype("datetime64[Y]"), "2026"),
        (numpy.array([NS, numpy.datetime64("NaT", "ns")]), ["2026-01-02T03:04:05.000000006", None]),
        (numpy.array([[NS]], "datetime64[h]"), [["2026-01-02T03"]]),
        (numpy.datetime64("20260-01-01", "D"), "20260-01-01"),
        (numpy.timedelta64(1500, "ms"), "PT1.5S"),
        (numpy.timedelta64(3000, "ns"), "PT0.000003S"),
        (numpy.array([1, "NaT"], "timedelta64[D]"), ["P1D", None]),
    ],
)  # fmt: skip
def test_numpys_own_numbers_and_times_have_one_form_whatever_their_unit(value: Any, written: Any) -> None:
    assert decode(encode({"x": value}, JSON), JSON) == {"x": written}
    in_msgpack = msgspec.json.decode(msgspec.json.encode(decode(encode([value], MSGPACK), MSGPACK)))
    assert in_msgpack == [written]


@subcases("value", [numpy.clongdouble(1), numpy.complex64(1), numpy.timedelta64(1, "ns"), numpy.timedelta64(1, "M")])
def test_what_has_no_form_says_so(value: Any) -> None:
    for content_type in (JSON, MSGPACK):
        with pytest.raises(TypeError, match="form in JSON or msgpack"):
            encode(value, content_type)
