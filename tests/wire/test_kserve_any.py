"""Whatever is sent: what was written is read again, and what is wrong is an InvalidRequest for which nothing was allocated."""

import contextlib
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.rings import subcases

from weir.errors import InvalidRequest, WeirError
from weir.model import Model, Tensor
from weir.wire import kserve_binary, kserve_json
from weir.wire.inference import InferenceRequest, RequestedOutput, TensorValue, bind
from weir.wire.kserve_json import BodyPeek
from weir.wire.tensors import BINARY_ONLY, DTYPES, Arrays, batch_key
from weir.workers.run.tensors import BodyReader, Listed

TEXTS = st.text(max_size=6)
PARAMETERS = st.dictionaries(
    TEXTS.filter(lambda name: not name.startswith(("binary", "shared"))),
    TEXTS | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False),
    max_size=2,
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)


@st.composite
def tensors(draw: st.DrawFn, name: str) -> TensorValue:
    datatype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(SHAPES)
    if datatype == "BYTES":
        elements = draw(st.lists(TEXTS.map(str.encode), min_size=(count := int(numpy.prod(shape))), max_size=count))
        array = numpy.empty(count, object)
        array[:] = elements
        return TensorValue(name, datatype, array.reshape(shape), draw(PARAMETERS))
    finite = st.floats(-1000, 1000, width=16) if DTYPES[datatype].kind == "f" else None
    return TensorValue(name, datatype, draw(hnp.arrays(DTYPES[datatype], shape, elements=finite)), draw(PARAMETERS))


@st.composite
def requests(draw: st.DrawFn) -> InferenceRequest:
    wanted = st.lists(st.builds(RequestedOutput, TEXTS, PARAMETERS), min_size=1, max_size=2, unique_by=lambda a: a.name)
    inputs = [draw(tensors(name)) for name in draw(st.lists(TEXTS, max_size=3, unique=True))]
    return InferenceRequest("m", inputs, id=draw(TEXTS), outputs=draw(st.none() | wanted), parameters=draw(PARAMETERS))


def assert_same(one: InferenceRequest, other: InferenceRequest) -> None:
    assert (one.id, one.outputs, one.parameters) == (other.id, other.outputs, other.parameters)
    for first, second in zip(one.inputs, other.inputs, strict=True):
        assert (first.name, first.datatype, first.parameters) == (second.name, second.datatype, second.parameters)
        assert (first.array.shape, first.array.dtype) == (second.array.shape, second.array.dtype)
        assert first.array.tolist() == second.array.tolist()


@settings(max_examples=50)
@given(requests(), st.sets(st.integers(0, 2)))
def test_a_request_in_any_mixture_of_binary_and_json_comes_back(request: InferenceRequest, chosen: set[int]) -> None:
    inputs = enumerate(request.inputs)
    binary = {value.name for place, value in inputs if place in chosen or value.datatype in BINARY_ONLY}
    written = kserve_binary.write_request(request, lambda name: name in binary)
    body = b"".join(written.parts)
    length = len(body) if written.header_length is None else written.header_length
    assert_same(request, kserve_binary.read_request(body, length, "m"))
    if not binary:
        assert_same(request, kserve_json.read_request(body, "m"))


class Two(Model):
    inputs = (Tensor("x", "INT8", [-1, -1]), Tensor("y", "FP32", [-1]))
    outputs = (Tensor("z", "FP32", [-1]),)

    def predict(self, batch: Any) -> Any:
        return batch


NEARLY_TENSOR: Any = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "y"]),
        "datatype": st.sampled_from(["INT8", "FP32"]),
        "shape": st.lists(st.sampled_from([1, 2, 0, -1, 2**40]), min_size=1, max_size=2),
        "data": st.lists(st.integers(-2, 2) | st.floats(-2, 2) | st.just(200), max_size=4)
        | st.lists(st.lists(st.integers(0, 2), max_size=2), max_size=2),
    }
)
NEARLY: Any = st.fixed_dictionaries({"inputs": st.lists(NEARLY_TENSOR, min_size=1, max_size=3)})


def in_the_worker(body: bytes) -> Arrays:
    entry = BodyReader(Two)(body)
    return entry.arrays(Two.inputs) if isinstance(entry, Listed) else entry


def outcome(read: Any) -> Any:
    try:
        return {name: (array.dtype.str, array.tolist()) for name, array in read().items()}
    except WeirError as error:
        assert isinstance(error, InvalidRequest)
        return InvalidRequest


@settings(max_examples=80)
@given(NEARLY)
def test_worker_and_server_agree_on_every_body(claimed: Any) -> None:
    body = json.dumps(claimed).encode()
    in_the_server = outcome(lambda: bind(kserve_json.read_request(body, "m").inputs, Two.inputs))
    assert outcome(lambda: in_the_worker(body)) == in_the_server
    if in_the_server is not InvalidRequest:
        arrays = in_the_worker(body)
        outline = BodyPeek(Two.inputs)(body)
        assert outline.rows == len(arrays["x"])
        assert outline.key == batch_key(Two.inputs, {name: array.shape for name, array in arrays.items()})


@pytest.mark.parametrize("datatype", ["FP64", "BYTES"])
@subcases("shape", [[2**40], [2**31, 2**31], [2**20, 2**20], [0, 2**40, 2**40]])
def test_nothing_is_allocated_for_what_is_only_claimed(shape: list[int], datatype: str) -> None:
    tensor: dict[str, Any] = {"name": "x", "datatype": datatype, "shape": shape}
    plain = json.dumps({"inputs": [{**tensor, "data": []}]}).encode()
    header = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 2**40}}]}).encode()
    declared = BodyPeek([Tensor("x", datatype, [-1] * len(shape))])
    reads: list[Callable[[], Any]] = [
        lambda: kserve_json.read_request(plain, "m"),
        lambda: kserve_binary.read_request(header, len(header), "m"),
        lambda: BodyReader(Two)(plain),
        lambda: declared(plain),
    ]
    for read in reads:
        with contextlib.suppress(InvalidRequest):
            read()
        tracemalloc.start()
        with contextlib.suppress(InvalidRequest):
            read()
        assert tracemalloc.get_traced_memory()[1] < 100_000
        tracemalloc.stop()
