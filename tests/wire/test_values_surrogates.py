"""Texts in JSON that are no Unicode: named with their place."""

import tracemalloc

import pytest

from weir.errors import InvalidRequest
from weir.messages import JSON
from weir.wire import values as surrogates
from weir.wire.kserve_json import read_request
from weir.wire.values import (
    MAX_HALVES,
    MAX_TOKENS,
    Half,
    decode,
    find_half,
    split,
    without_halves,
    without_nul,
    words_without_nul,
)

RULE = "is not valid Unicode: character 2 is half of a surrogate pair"
CUT = rb'"ab\ud83d"'


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (CUT, ""), (b"[1, " + CUT + b"]", "[1]"), (b'{"texts": [["x", ' + CUT + b"]]}", "texts[0][1]"),
        (b"{" + CUT + b": 1}", ""), (b'{"a": {"b": ' + CUT + b"}}", "a.b"),
    ],
)  # fmt: skip
def test_the_place_of_a_text_that_is_cut_in_a_character(body: bytes, where: str) -> None:
    assert find_half(body) == Half(where, RULE)


@pytest.mark.parametrize("body", [b"", b'"fine"', rb'"\ud83d\ude00"', rb'["\ud83d', b"[" * 100_000 + rb'"\ud83d"'])
def test_nothing_is_said_of_what_is_wrong_in_other_ways(body: bytes) -> None:
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
