import gc
import json
import math
import re
import tracemalloc
from collections import deque
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
from weir.wire import values as surrogates
from weir.wire.kserve_json import read_request
from weir.wire.values import (
    ANY_CONTAINERS,
    ANY_NAMES,
    DECODE,
    MAX_HALVES,
    MAX_TOKENS,
    UNWRITABLE,
    Half,
    decode,
    encode,
    find_half,
    find_nonfinite,
    msgpack_bytes,
    split,
    without_halves,
    without_nul,
    words_without_nul,
)


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return lists and objects of these, of themselves, and these alone."""
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


simple = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
anything = nested(simple)


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@settings(max_examples=50)
@given(value=anything)
def test_comes_back(content_type: str, value: Any) -> None:
    assert decode(encode(value, content_type), content_type) == value


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@settings(max_examples=30)  # they are large
@given(items=st.lists(anything))
def test_a_list_is_split_into_what_its_items_are_encoded_as(content_type: str, items: list[Any]) -> None:
    assert [decode(item, content_type) for item in split(encode(items, content_type), content_type) or ()] == items


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@given(body=st.binary())
def test_garbage_is_refused_or_read(content_type: str, body: bytes) -> None:
    for read in (decode, split):
        try:
            read(body, content_type)
        except InvalidRequest as error:
            assert content_type in str(error)


@subcases(
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


@subcases("body", [b"", b"\xc1", b"\x01\x01", b"\xdd\xff\xff\xff\xff", b"\x92\x01"])
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
    ],
)
def test_what_is_written_as_json(value: Any, text: bytes) -> None:
    assert encode(value, JSON) == text


def test_msgpack_carries_what_is_not_finite() -> None:
    assert msgspec.msgpack.decode(encode([math.inf, numpy.float64(-math.inf)], MSGPACK)) == [math.inf, -math.inf]


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@subcases("value", [object(), {1j: 2}, "\ud800", test_bad_json_is_refused])
def test_what_cannot_be_written(value: Any, content_type: str) -> None:
    with pytest.raises(UNWRITABLE):
        encode(value, content_type)


def test_a_list_that_contains_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(RecursionError):
        encode(value, JSON)


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize("fields", [1, 2, 3, 4096])
def test_a_list_is_split_if_it_is_no_longer_than_allowed(
    content_type: str, fields: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "_FIELDS", fields)
    items = [1, "a, b", [2, [3, 4]], {"c": 5, "d": '\\",['}, None, "]", 1.5, []]
    for count in range(len(items) + 1):
        body = encode(items[:count], content_type)
        for most in range(1, len(items) + 2):
            parts = split(body, content_type, most)
            assert parts == ([encode(each, content_type) for each in items[:count]] if count <= most else None)
    if content_type == JSON:
        assert split(b" [ 1 , [2 , 3] ,  4 ] ", JSON, 3) == [b"1", b"[2 , 3]", b"4"]
        assert split(b" [ 1 , [2 , 3] ,  4 ] ", JSON, 2) is None
    else:
        long = encode([0] * 70_000, MSGPACK)
        assert split(long, MSGPACK, 69_999) is None
        assert split(long, MSGPACK, 70_000) is not None


@pytest.mark.parametrize("most", [1024, 10_000])
def test_the_elements_of_a_list_that_is_too_long_are_not_made(most: int) -> None:
    bodies = [(b"[" + b"1," * 500_000 + b"1]", JSON), (b"\xdd" + (10**6).to_bytes(4, "big") + b"\x01" * 10**6, MSGPACK)]
    split(bodies[0][0], JSON, most)  # what decodes the first elements has been made
    tracemalloc.start()
    try:
        for body, content_type in bodies:
            assert split(body, content_type, most) is None
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_what_is_no_list_is_refused_whatever_is_allowed() -> None:
    for body in (b'{"a": 1, "b": 2, "c": 3}', b"[1, 2, 3", b"[1, 2 3, 4]", b"3", b""):
        with pytest.raises(InvalidRequest, match=r"^body: must be"):
            split(body, JSON, 2)
        with pytest.raises(InvalidRequest, match=r"^body: must be"):
            split(body, MSGPACK, 2)


def test_large_bodies_are_decoded_without_the_garbage_collector() -> None:
    began: list[str] = []
    gc.callbacks.append(note := lambda phase, info: began.append(phase))
    try:
        body = b"[" + b"[]," * 50_000 + b"[]]"
        with values.uncollected(len(body)):
            assert not gc.isenabled()
            values.DECODE[JSON](body)
        assert gc.isenabled() and not began
        with values.uncollected(100):
            assert gc.isenabled()
        gc.disable()
        with values.uncollected(len(body)):
            pass
        assert not gc.isenabled()
    finally:
        gc.callbacks.remove(note)
        gc.enable()


SLOW = ["-1e308", "1.7976931348623157e308", "4.9e-324", "2.2250738585072014e-308", "1e23", "1E23"]


@subcases("text", [*SLOW, "1.5", "1E+22", "-0.0", "1e5"])
def test_floats_are_read_alike_in_small_bodies_and_in_large_ones(text: str) -> None:
    for count in (1, 5000):
        assert decode(b"[" + b",".join([text.encode()] * count) + b"]", JSON) == [float(text)] * count


def test_floats_that_msgspec_is_slow_at_are_not_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten microseconds each: a megabyte of them kept the interpreter for more than a second.
    monkeypatch.setattr(values, "_decode_json", lambda body: pytest.fail("it was given to msgspec"))
    for text in SLOW:
        assert decode(b"[" + b",".join([text.encode()] * 5000) + b"]", JSON) == [float(text)] * 5000


@pytest.mark.parametrize("text", ["1e309", "-1e400"])
def test_floats_beyond_all_floats_are_refused(text: str) -> None:
    for count in (1, 5000):
        with pytest.raises(InvalidRequest, match="out of range"):
            decode(b"[" + b",".join([text.encode()] * count) + b"]", JSON)


def containers(count: int, content_type: str, filled: int = 0) -> bytes:
    """Return a list of so many lists and objects in all, in more bytes than it takes to have as many as it may."""
    if content_type == JSON:
        return b"[" + b",".join([b"{}"] * (count - 1)) + b' ,"' + b"[{" * filled + b'"]'
    some = b"\x80" * (count - 1) + b"\xc6" + (2 * filled).to_bytes(4, "big") + b"\x90\xdc" * filled
    return b"\xdd" + count.to_bytes(4, "big") + some


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_more_lists_and_objects_than_a_body_may_have_are_refused_before_they_are_made(content_type: str) -> None:
    size = 1 << 19  # of the filling, which looks like lists and is none
    most = ANY_CONTAINERS + len(containers(ANY_CONTAINERS, content_type, size)) // 16
    few, many = (containers(count, content_type, size) for count in (most, most + 40_000))
    assert len(decode(few, content_type)) == most
    tracemalloc.start()
    with pytest.raises(TooLarge, match="lists and objects, which a body of"):
        decode(many, content_type)
    assert tracemalloc.get_traced_memory()[1] < 4 * len(many)
    tracemalloc.stop()


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
def test_more_names_than_a_body_may_have_are_refused_before_they_are_made(content_type: str) -> None:
    size = 1 << 19  # of a text that looks like names and is none
    most = ANY_NAMES + len(names(ANY_NAMES, content_type, size)) // 64
    few, many = (names(count, content_type, size) for count in (most, most + 20_000))
    assert len(decode(few, content_type)[0]) == most
    tracemalloc.start()
    with pytest.raises(TooLarge, match="different names in its objects, which a body of"):
        decode(many, content_type)
    assert tracemalloc.get_traced_memory()[1] < 4 * len(many)
    tracemalloc.stop()


def test_names_that_come_again_nearby_are_none() -> None:
    items = [{"age": place, "sex": "m", "name": f"number {place}"} for place in range(ANY_NAMES)]
    for content_type in (JSON, MSGPACK):
        assert decode(encode(items, content_type), content_type) == items
    again = b"{" + b",".join([b'"%d":1' % (place % ANY_NAMES) for place in range(5 * ANY_NAMES)]) + b"}"
    with pytest.raises(TooLarge):  # which are as slow as others where they come again much later
        decode(again, JSON)
    assert len(DECODE[JSON](again)) == ANY_NAMES  # workers have the time


@given(value=nested(simple | st.text('":{\\')))
def test_names_are_counted_as_they_are_decoded(value: Any) -> None:
    def found(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(map(json.dumps, value)).union(*map(found, value.values()))
        return set().union(*map(found, value)) if isinstance(value, list) else set()

    body = json.dumps([":" * 400, value]).encode()
    assert values._json_names(body, 300) == len(found(value) - {'""'})


X = {"name": "x", "datatype": "INT32", "shape": [2], "data": [1, 2]}


@subcases(
    ("data", "word"),
    [
        ([1.0, float("nan")], "NaN"),
        ([[1.0], [float("inf")]], "Infinity"),
        ([[[float("-inf")]]], "-Infinity"),
        (float("nan"), "NaN"),
    ],
)
def test_the_tensor_and_the_number_are_named(data: object, word: str) -> None:
    body = json.dumps({"inputs": [X, {**X, "name": "y", "datatype": "FP32", "data": data}]}).encode()
    assert find_nonfinite(body) == f"tensor 'y': has the element {word}, which is none of FP32 in JSON"


@subcases(
    "body",
    [
        b"",
        b"NaN",
        b"[NaN]",
        b'{"inputs": NaN}',
        b'{"inputs": [NaN]}',
        b'{"inputs": [{"data": [NaN]}',
        b'{"inputs": [{"data": ["NaN"]}]}',
        b'{"id": NaN, "inputs": []}',
        b'{"inputs": [], "id": "\xffNaN"}',
        b'{"inputs": [{"data": ' + b"[" * 100_000 + b"NaN",
        json.dumps({"inputs": [X]}).encode(),
        json.dumps({"inputs": [{**X, "data": [float("nan")]}], "more": "." * (1 << 20)}).encode(),
    ],
)
def test_what_is_wrong_in_another_way_is_left_to_others(body: bytes) -> None:
    assert find_nonfinite(body) is None


RULE = "is not valid Unicode: character 2 is half of a surrogate pair"
CUT = rb'"ab\ud83d"'


@subcases(
    ("body", "where"),
    [
        (CUT, ""), (b"[1, " + CUT + b"]", "[1]"), (b'{"texts": [["x", ' + CUT + b"]]}", "texts[0][1]"),
        (b"{" + CUT + b": 1}", ""), (b'{"a": {"b": ' + CUT + b"}}", "a.b"),
    ],
)  # fmt: skip
def test_the_place_of_a_text_that_is_cut_in_a_character(body: bytes, where: str) -> None:
    assert find_half(body) == Half(where, RULE)


@subcases("body", [b"", b'"fine"', rb'"\ud83d\ude00"', rb'["\ud83d', b"[" * 100_000 + rb'"\ud83d"'])
def test_other_errors_are_left_as_they_are(body: bytes) -> None:
    assert find_half(body) is None


def test_the_errors_name_it() -> None:
    for read, body, where in (
        (decode, CUT, "body"), (decode, b"[" + CUT + b"]", r"body\[0\]"), (split, b"[1, " + CUT + b"," + CUT * 10_001 + b"]", r"body\[1\]"),
        (decode, b'{"text": ' + CUT + b"}", "text"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=f"^{where}: {RULE}$"):
            read(body, JSON)


def test_the_open_inference_protocols_too() -> None:
    tensor = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": [' + CUT + b"]}]}"
    with pytest.raises(InvalidRequest, match=rf"inputs\[0\].data\[0\]: {RULE}$"):
        read_request(tensor, "m")


def test_a_long_key_beside_many_values_costs_no_memory() -> None:
    # The path of each value was made: 10^5 paths of 10^5 characters.
    body = b'{"' + b"k" * 100_000 + b'": [' + b"1, " * 49_000 + CUT + b"]}"
    tracemalloc.start()
    try:
        found = find_half(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == Half("k" * 80 + "[49000]", RULE)
    assert peak < 3 * len(body)


def test_a_long_path_is_cut() -> None:
    found = find_half(b'{"' + b"k" * 79 + b'":[' + b"[" * 500 + CUT + b"]" * 501 + b"}")
    assert found is not None
    assert found.where == ("k" * 79 + "[0]" * 41)[:200] + "..."


def test_so_many_tokens_are_read_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    real = surrogates._read

    def counted(token: bytes, levels: list[list[int | str]], is_key: bool) -> bool:
        read.append(token)
        return real(token, levels, is_key)

    monkeypatch.setattr(surrogates, "_read", counted)
    body = b"[" + b"1," * (MAX_TOKENS + 10) + CUT + b"]"
    assert find_half(body) == Half(
        "", f"is not valid Unicode: byte {body.index(CUT) + 3} begins half of a surrogate pair"
    )
    assert len(read) == MAX_TOKENS


def test_nothing_is_found_in_long_texts_of_escapes() -> None:
    assert find_half(b'"' + rb"\\ud83d" * 200_000 + b'"') is None
    assert find_half(b'"' + rb"\ud83d\ude00" * 100_000 + b'"') is None


@pytest.mark.parametrize(
    ("body", "where"),
    [(rb'["\\", {"\u0061": "ab\ud83d"}]', "[1].a"), (rb'{"a": [{}, [], "ab\uDE00"]}', "a[2]")],
)
def test_escapes_are_read(body: bytes, where: str) -> None:
    assert find_half(body) == Half(where, RULE)


def test_a_list_is_split_around_the_elements_that_are_cut() -> None:
    whole = b'[ 1,"a\\n" , ' + CUT + b',\t{"x": [' + CUT + b"]}, [] ]"
    assert split(whole, JSON) == [b"1", b'"a\\n"', CUT, b'{"x": [' + CUT + b"]}", b"[]"]
    assert split(memoryview(whole), JSON) == split(whole, JSON)
    with pytest.raises(InvalidRequest, match=RULE):
        decode(CUT, JSON)
    assert split(whole, JSON, 4) is None
    with pytest.raises(InvalidRequest, match="body"):
        split(b"[" + CUT, JSON)


def test_a_nul_stands_where_a_half_stood() -> None:
    assert without_halves(rb'["\ud83d", "\\ud83d", "\ud83d\ude00\udE00", "\n\uDBFFx"]') == (
        rb'["\u0000", "\\ud83d", "\ud83d\ude00\u0000", "\n\u0000x"]'
    )
    assert without_halves(rb'["\ud83d\ude00"]') is None
    assert without_halves(b'"' + rb"\ud83d" * MAX_HALVES + b'"') is None  # another would be looked for
    assert without_halves(b'"' + rb"\ud83d" * (MAX_HALVES - 1) + b'"') is not None


def test_a_text_without_nul_is_what_it_was() -> None:
    assert [without_nul(text) for text in ("a", "a\0b", "\0", "")] == ["a", "ab", " ", ""]
    assert words_without_nul(["a", "\0", "b\0", 3]) == ["a", "\ufffd", "\ufffd", 3]


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
        (numpy.array([NS, numpy.datetime64("NaT")]), ["2026-01-02T03:04:05.000000006", None]),
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


def test_containers_and_patterns_have_forms() -> None:
    assert encode([deque([1, 2]), re.compile("a+")], JSON) == b'[[1,2],"a+"]'


@pytest.mark.parametrize(
    "value",
    [
        [1] * 100_000, [70_000] * 100_000, [1.5] * 50_000, ["ab"] * 50_000, ["x" * 40] * 10_000, [[1]] * 20_000, [{"a": 1}] * 5_000, [b"xy"] * 30_000,
        "\u6c34" * 100_000, None,
    ],
    ids=["ones", "numbers", "floats", "short texts", "texts", "lists", "objects", "bytes", "a long text", "nothing"],
)  # fmt: skip
def test_what_msgpack_takes_in_memory_is_known_before_it_is_decoded(value: Any) -> None:
    body = msgspec.msgpack.encode(value)
    tracemalloc.start()
    decoded = DECODE[MSGPACK](body)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert decoded == value
    assert taken - 1000 <= msgpack_bytes(body) <= 3 * taken + 25 * len(body) / 2 + 1000
    if isinstance(value, str):
        assert msgpack_bytes(body) < 1.1 * len(body)


def test_the_memory_of_msgpack_that_is_cut_short_is_that_of_its_beginning() -> None:
    body = msgspec.msgpack.encode(["x" * 1000] * 10)
    assert msgpack_bytes(body[:-5]) > 0
