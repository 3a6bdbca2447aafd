"""Texts in JSON that are no Unicode: named with their place."""

import pytest

from weir.errors import InvalidRequest
from weir.messages import JSON
from weir.wire.kserve_json import read_request
from weir.wire.surrogates import Half, find_half
from weir.wire.values import decode, split

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
        (decode, CUT, "body"), (decode, b"[" + CUT + b"]", r"body\[0\]"), (split, b"[1, " + CUT + b"]", r"body\[1\]"),
        (decode, b'{"text": ' + CUT + b"}", "text"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=f"^{where}: {RULE}$"):
            read(body, JSON)


def test_the_open_inference_protocols_too() -> None:
    tensor = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": [' + CUT + b"]}]}"
    with pytest.raises(InvalidRequest, match=rf"inputs\[0\].data\[0\]: {RULE}$"):
        read_request(tensor, "m")
