from typing import Any

import numpy as np
import pytest

from weir.errors import InvalidRequest
from weir.wire.kserve_grpc import FIELDS, message, read_typed, write_typed
from weir.wire.tensors import DTYPES

Contents = message("inference.InferTensorContents")

VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False], "UINT8": [0, 255], "UINT16": [0, 65535], "UINT32": [0, (1 << 32) - 1],
    "UINT64": [0, (1 << 64) - 1], "INT8": [-128, 127], "INT16": [-32768, 32767], "INT32": [-(1 << 31), (1 << 31) - 1],
    "INT64": [-(1 << 63), (1 << 63) - 1], "FP32": [0.5, -1e30], "FP64": [0.1, 1e300], "BYTES": [b"", b"\xff\x00"],
}  # fmt: skip


def test_what_has_a_typed_form() -> None:
    assert VALUES.keys() == FIELDS.keys() and FIELDS.keys() <= DTYPES.keys()
    assert set(DTYPES) - VALUES.keys() == {"FP16", "BF16"}


@pytest.mark.parametrize("datatype", VALUES)
def test_written_and_read_again(datatype: str) -> None:
    array = np.array(VALUES[datatype], DTYPES[datatype]).reshape(2, 1)
    contents = Contents()
    write_typed(datatype, array, contents)
    read = read_typed("x", datatype, [2, 1], 2, contents)
    assert read.dtype == DTYPES[datatype] and read.shape == (2, 1)
    assert read.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("datatype", "contents", "said"),
    [
        ("FP16", {}, r"tensor 'x': FP16 has no typed form, it must be sent in raw_input_contents"),
        ("INT32", {"fp32_contents": [1, 2]}, r"tensor 'x': has fp32_contents, INT32 takes int_contents only"),
        ("INT32", {"int_contents": [1, 2], "fp32_contents": [1]}, r"has int_contents, fp32_contents, INT32 takes"),
        ("INT32", {"int_contents": [1]}, r"has 1 elements in int_contents, its shape \[2\] takes 2"),
        ("INT8", {"int_contents": [1, 128]}, r"tensor 'x': has the element 128, out of the range of INT8"),
        ("INT8", {"int_contents": [-129, 1]}, r"tensor 'x': has the element -129, out of the range of INT8"),
        ("UINT16", {"uint_contents": [65536, 0]}, r"has the element 65536, out of the range of UINT16"),
    ],
)
def test_what_is_refused(datatype: str, contents: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read_typed("x", datatype, [2], 2, Contents(**contents))


def test_no_elements() -> None:
    assert read_typed("x", "INT8", (0, 3), 0, Contents()).shape == (0, 3)
