"""How much memory the values of a body take is known before they are decoded, for each format, and a body of ordinary numbers is not refused."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.rings import subcases

from weir.messages import JSON, MSGPACK, OCTETS
from weir.model import Tensor
from weir.wire.kserve_grpc import ModelInferRequest, parse_request, read_request, typed_bytes
from weir.wire.tensors import DTYPES, elements_bytes, pack_elements, read_elements, to_arrays, unpack_elements
from weir.wire.values import decode, values_bytes

COUNT = 8_000


def peak(read: Callable[[], Any]) -> int:
    """Return how many bytes `read` takes at its peak, what it returns included."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = read()
        assert kept is not None
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


SLACK = 16384  # bytes: of what does not grow with the body

LISTS: dict[str, Any] = {
    "small numbers": [1] * COUNT, "numbers": [70_000 + n for n in range(COUNT)], "floats": [n + 0.5 for n in range(COUNT)],
    "long floats": [1 / (n + 3) for n in range(COUNT)], "truths": [True] * COUNT, "texts": [f"{n:x}" for n in range(COUNT)], "sentences": ["x" * 40] * COUNT,
    "wide texts": ["\u6c34"] * COUNT, "emoji": ["\U0001f600"] * COUNT, "lists": [[]] * COUNT, "lists of lists": [[[]]] * COUNT, "rows": [[1.5, 2.5]] * COUNT,
    "objects": [{}] * COUNT, "named": [{"a": 1}] * COUNT, "other names": [{f"{n:x}": 1} for n in range(COUNT)], "objects in objects": [{"a": {}}] * COUNT,
    "one object": {f"{n:x}": 1 for n in range(COUNT)}, "nothing": [None] * COUNT,
}  # fmt: skip


ENCODE = {JSON: msgspec.json.encode, MSGPACK: msgspec.msgpack.encode}


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@subcases("kind", LISTS)
def test_of_json_and_msgpack(kind: str, content_type: str) -> None:
    body = ENCODE[content_type](LISTS[kind])
    characters = 2 * len(body) if "text" in kind or "sentence" in kind or "name" in kind or kind == "emoji" else 0
    taken, counted = peak(lambda: decode(body, content_type)), values_bytes(body, content_type)
    assert taken <= counted + characters + SLACK
    assert counted <= (5 if kind == "rows" else 3) * taken + 25 * len(body) / 2 or content_type == JSON
    assert values_bytes(body, OCTETS) == 0 < values_bytes(body[:-5], content_type)


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@subcases("kind", ["small numbers", "numbers", "floats", "long floats"])
def test_of_arrays(kind: str, content_type: str) -> None:
    body = ENCODE[content_type]({"x": LISTS[kind]})
    taken = peak(lambda: to_arrays(decode(body, content_type), [Tensor("x", "FP32", [-1])]))
    assert taken <= values_bytes(body, content_type) + SLACK


@subcases("kind", ["small numbers", "numbers", "long floats", "texts", "sentences", "wide texts", "emoji"])
def test_of_tensors_in_json(kind: str) -> None:
    data = msgspec.json.encode(LISTS[kind])
    datatype = "FP64" if kind in ("small numbers", "numbers", "long floats") else "BYTES"
    characters = 0 if datatype == "FP64" else 2 * len(data)
    taken = peak(lambda: read_elements("x", datatype, [COUNT], COUNT, data))
    assert taken <= values_bytes(data, JSON) + characters + SLACK


@subcases("text", [b"", b"ab", b"x" * 300])
def test_of_packed_texts(text: bytes) -> None:
    array = np.empty(COUNT, object)
    array[:] = [text + b"%d" % (n % 7) if text else b"" for n in range(COUNT)]
    raw = pack_elements(array)
    taken = peak(lambda: unpack_elements(raw, COUNT, "x"))
    assert taken <= elements_bytes(raw) + len(raw) + SLACK


MANY, PIECES = 200_000, 700_000  # elements are taken from the message in pieces
CONTENTS: dict[str, tuple[str, list[Any]]] = {
    "bool_contents": ("BOOL", [True] * MANY), "int_contents": ("INT8", [1] * MANY), "int64_contents": ("INT64", [1] * MANY),
    "uint_contents": ("UINT16", [1] * MANY), "uint64_contents": ("UINT64", [1] * MANY), "fp32_contents": ("FP32", [1.5] * MANY),
    "fp64_contents": ("FP64", [1.5] * MANY), "bytes_contents": ("BYTES", [b"%d" % (n % 97) for n in range(MANY)]),
}  # fmt: skip


@subcases("field", CONTENTS)
def test_of_typed_contents_over_grpc(field: str) -> None:
    datatype, elements = CONTENTS[field]
    tensor = {"name": "x", "datatype": datatype, "shape": [MANY], "contents": {field: elements}}
    body = ModelInferRequest(model_name="m", inputs=[tensor]).SerializeToString()
    taken = peak(lambda: read_request(parse_request(body)))
    native = 16 if datatype == "BYTES" else 2 * DTYPES[datatype].itemsize
    assert taken + native * MANY <= typed_bytes(body) + PIECES
    assert typed_bytes(body) <= 50 * len(body)


def test_raw_contents_over_grpc_take_nothing_unless_they_are_texts() -> None:
    for datatype, raw in (("FP32", bytes(4 * COUNT)), ("BYTES", bytes(4 * COUNT))):
        tensor = {"name": "x", "datatype": datatype, "shape": [COUNT]}
        body = ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[raw]).SerializeToString()
        assert (typed_bytes(body) > 0) == (datatype == "BYTES")
    assert typed_bytes(b"\x2b" * 100) == 3600


@subcases(("digits", "megabytes"), [(8, 20), (17, 30)])
def test_ordinary_numbers_of_many_megabytes_have_room(digits: int, megabytes: int) -> None:
    """30 MB of random numbers with 17 digits, and 16 MB with 8, fit into 64 MB together with their body."""
    row = msgspec.json.encode([float(f"{number:.{digits}g}") for number in np.random.default_rng(1).random(1000)])
    assert megabytes + megabytes * values_bytes(row, JSON) / len(row) / 4 < 64
