"""Regions of shared memory that clients have registered."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tests.rings import subcases
from tritonclient.utils import shared_memory

from weir.errors import Conflict, Forbidden, InvalidRequest, TooLarge
from weir.protocols.kserve import Memory, Regions
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters, RequestedOutput, TensorValue

SIZE = 4096


@pytest.fixture
def regions(tmp_path: Path) -> Regions:
    """Regions in a folder with one object, `mine`, that counts up."""
    (tmp_path / "mine").write_bytes(bytes(range(256)) * 16)
    return Regions(allowed=True, max_read=1000, folder=tmp_path)


def test_a_region_is_read_and_written_where_it_lies(regions: Regions, tmp_path: Path) -> None:
    regions.register("r", "/mine", 256, 512)
    assert bytes(regions.read("r", 2, 3)) == b"\2\3\4"
    regions.find("r", 10, 4).write(10, 4, b"abc")
    assert (tmp_path / "mine").read_bytes()[266:270] == b"abc\x0d"
    assert regions.status() == regions.status("r") == [{"name": "r", "key": "/mine", "offset": 256, "byte_size": 512}]
    regions.unregister("r")
    regions.unregister("r")  # once more harms nothing
    assert regions.status() == []


def test_all_are_unregistered_at_once(regions: Regions) -> None:
    before = len(os.listdir("/proc/self/fd"))
    regions.register("a", "mine", 0, 1)
    regions.register("b", "mine", 0, 2)
    regions.unregister()
    assert regions.status() == [] and len(os.listdir("/proc/self/fd")) == before
    regions.register("c", "mine", 0, 1)
    regions.close()
    assert len(os.listdir("/proc/self/fd")) == before


@subcases(
    ("key", "offset", "size"),
    [
        *[(key, 0, 1) for key in ("", "/", ".", "..", "/..", "../mine", "/../mine", "a/b", "//mine", "mi\0ne", "mine\n", "x" * 300, "ü")],
        *[("mine", *place) for place in ((-1, 4), (0, 0), (0, -4), (0, SIZE + 1), (SIZE, 1), (1 << 62, 1 << 62))],
    ],
)  # fmt: skip
def test_a_key_cannot_leave_the_folder_nor_a_region_its_object(
    regions: Regions, key: str, offset: int, size: int
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidRequest, match="'r'" if key == "mine" else r"'r'.*must be of letters, digits"):
        regions.register("r", key, offset, size)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_no_shared_memory_is_refused(regions: Regions, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/hostname")
    for key in ("folder", "pipe", "link", "absent"):
        with pytest.raises(InvalidRequest, match=f"'r'.*{key}"):
            regions.register("r", key, 0, 1)
    assert regions.status() == []


def test_a_name_is_given_once_and_there_are_only_so_many(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.protocols.kserve._MAX_REGIONS", 1)
    regions.register("r", "mine", 0, 1)
    for name, text in (("r", "'r' is already registered"), ("s", "the limit")):
        with pytest.raises(Conflict, match=text):
            regions.register(name, "mine", 0, 2)


def test_what_lies_outside_of_a_region_is_not_read(regions: Regions) -> None:
    regions.register("r", "mine", 256, 512)
    regions.register("big", "mine", 0, SIZE)
    for name, offset, size, error in (
        ("s", 0, 1, InvalidRequest),
        ("r", 0, 513, InvalidRequest),
        ("r", -1, 1, InvalidRequest),
        ("r", 512, 1, InvalidRequest),
        ("big", 0, 1001, TooLarge),
    ):
        with pytest.raises(error, match=f"{name!r}"):
            regions.read(name, offset, size)


def test_a_client_that_shrinks_its_object_harms_nobody_else(regions: Regions, tmp_path: Path) -> None:
    regions.register("r", "mine", 0, 512)
    os.truncate(tmp_path / "mine", 100)
    assert len(regions.read("r", 0, 100)) == 100
    with pytest.raises(InvalidRequest, match="its client shrank 'mine'"):
        regions.read("r", 0, 101)
    with pytest.raises(InvalidRequest, match="its client shrank 'mine'"):
        regions.find("r", 90, 20).write(90, 20, bytes(20))
    assert (tmp_path / "mine").stat().st_size == 100


def test_an_output_must_fit(regions: Regions) -> None:
    regions.register("r", "mine", 0, 512)
    with pytest.raises(InvalidRequest, match="4 bytes for an output that has 5"):
        regions.find("r", 0, 4).write(0, 4, b"12345")


def test_nothing_works_unless_it_is_allowed(tmp_path: Path) -> None:
    regions = Regions(folder=tmp_path)
    calls: list[tuple[Any, ...]] = [
        (regions.register, "r", "mine", 0, 1), (regions.unregister,), (regions.status,), (regions.read, "r", 0, 1),
        (regions.find, "r", 0, 1),
    ]  # fmt: skip
    for call, *arguments in calls:
        with pytest.raises(Forbidden, match="allow-shared-memory"):
            call(*arguments)


def test_the_parameters_of_a_tensor_say_where_it_is(regions: Regions) -> None:
    regions.register("r", "mine", 0, 512)
    memory = Memory(regions, lambda: None)
    assert memory.find("x", {"other": 1}) is None
    found = memory.find("x", {"shared_memory_region": "r", "shared_memory_offset": 1, "shared_memory_byte_size": 2})
    assert found is not None and bytes(found) == b"\1\2"
    for wrong in ({}, *({"shared_memory_byte_size": size} for size in ("2", True, -1))):
        with pytest.raises(InvalidRequest, match="tensor 'x': shared_memory_byte_size"):
            memory.find("x", {"shared_memory_region": "r", **wrong})
    with pytest.raises(InvalidRequest, match="tensor 'x': shared_memory_region=3"):
        memory.find("x", {"shared_memory_region": 3})


def test_outputs_go_where_they_are_wanted(regions: Regions, tmp_path: Path) -> None:
    regions.register("r", "mine", 0, 512)
    place: Parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 4}
    values = [TensorValue(name, "INT32", np.array([7, 8], np.int32)) for name in ("a", "b")]
    request = InferenceRequest("m", [], outputs=[RequestedOutput("a", {}), RequestedOutput("b", dict(place))])
    memory = Memory(regions, lambda: None)
    memory.hold(request)
    regions.unregister()  # while it is computed
    memory.take_outputs(InferenceResponse("m", values))
    assert (values[0].parameters, values[1].parameters) == ({}, place)
    assert np.frombuffer((tmp_path / "mine").read_bytes()[4:12], np.int32).tolist() == [7, 8]


def test_who_may_not_does_not(regions: Regions) -> None:
    def refuse() -> None:
        raise Forbidden("not you")

    memory = Memory(regions, refuse)
    memory.hold(InferenceRequest("m", []))  # nothing is wanted
    with pytest.raises(Forbidden):
        memory.find("x", {"shared_memory_region": "r", "shared_memory_byte_size": 1})
    with pytest.raises(Forbidden):
        request = InferenceRequest("m", [], outputs=[RequestedOutput("a", {"shared_memory_region": "r"})])
        memory.hold(request)


def test_an_unregistered_region_is_closed_when_its_last_request_ends(regions: Regions) -> None:
    before = len(os.listdir("/proc/self/fd"))
    regions.register("r", "mine", 0, 512)
    request = InferenceRequest(
        "m", [], outputs=[RequestedOutput("a", {"shared_memory_region": "r", "shared_memory_byte_size": 8})]
    )
    memory = Memory(regions, lambda: None)
    memory.hold(request)
    regions.unregister("r")
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert regions.status() == regions.status("r") == [{"name": "r", "key": "mine", "offset": 0, "byte_size": 512}]
    with pytest.raises(InvalidRequest, match="Unable to find shared memory region"):
        Memory(regions, lambda: None).hold(request)  # who comes later does not find it
    del memory
    assert len(os.listdir("/proc/self/fd")) == before
    assert regions.status() == []


def test_a_place_outside_of_a_region_is_refused_before_the_computation(regions: Regions) -> None:
    regions.register("r", "mine", 0, 16)
    place: Parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 17}
    with pytest.raises(InvalidRequest, match="bytes 0 to 17 lie outside of its 16"):
        Memory(regions, lambda: None).hold(InferenceRequest("m", [], outputs=[RequestedOutput("a", place)]))


FIRST = np.arange(16, dtype=np.int32).reshape(1, 16)
SECOND = np.full((1, 16), 3, np.int32)


@pytest.fixture
def stock(address: str) -> Iterator[triton.InferenceServerClient]:
    """Triton's client; no region is left behind."""
    with triton.InferenceServerClient(address) as client:
        yield client
        client.unregister_system_shared_memory()


@contextmanager
def region(name: str, size: int) -> Iterator[tuple[str, Any]]:
    """Give the key of shared memory and what Triton's client calls it by."""
    key = f"region_test_{uuid4().hex}"
    handle = shared_memory.create_shared_memory_region(name, key, size)
    try:
        yield key, handle
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def tensors() -> list[triton.InferInput]:
    """Return the inputs of `simple`, their values elsewhere."""
    return [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]


def test_inputs_and_outputs_in_regions(stock: triton.InferenceServerClient) -> None:
    with region("region", 256) as (key, handle):
        shared_memory.set_shared_memory_region(handle, [FIRST, SECOND])
        stock.register_system_shared_memory("region", key, 256)
        assert stock.get_system_shared_memory_status("region") == stock.get_system_shared_memory_status()
        assert stock.get_system_shared_memory_status()[0]["byte_size"] == 256
        inputs = tensors()
        inputs[0].set_shared_memory("region", 64)
        inputs[1].set_shared_memory("region", 64, offset=64)
        output = triton.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("region", 64, offset=128)
        result = stock.infer("simple", inputs, outputs=[output, triton.InferRequestedOutput("OUTPUT1")])
        there = shared_memory.get_contents_as_numpy(handle, np.int32, [1, 16], offset=128)
        np.testing.assert_array_equal(there, FIRST + SECOND)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), FIRST - SECOND)
        stock.unregister_system_shared_memory("region")
        assert stock.get_system_shared_memory_status() == []


def test_what_lies_in_a_region_has_no_bytes_in_the_body(
    client: httpx.Client, stock: triton.InferenceServerClient
) -> None:
    """Triton's C++ client reads how many from the parameters of every output that has any."""
    with region("sizes", 128) as (key, handle):
        stock.register_system_shared_memory("sizes", key, 128)
        given = [
            {"name": name, "shape": [1, 16], "datatype": "INT32", "data": array.tolist()}
            for name, array in (("INPUT0", FIRST), ("INPUT1", SECOND))
        ]
        place = {"shared_memory_region": "sizes", "shared_memory_byte_size": 64}
        outputs = [{"name": "OUTPUT0", "parameters": place}, {"name": "OUTPUT1", "parameters": {"binary_data": True}}]
        answer = client.post("/v2/models/simple/infer", json={"inputs": given, "outputs": outputs})
        length = int(answer.headers["inference-header-content-length"])
        first, second = json.loads(answer.content[:length])["outputs"]
        assert first["parameters"] == {**place, "shared_memory_offset": 0, "binary_data_size": 0}
        assert (second["parameters"], len(answer.content)) == ({"binary_data_size": 64}, length + 64)
        np.testing.assert_array_equal(np.frombuffer(answer.content[length:], np.int32), (FIRST - SECOND)[0])
        there = shared_memory.get_contents_as_numpy(handle, np.int32, [1, 16])
        np.testing.assert_array_equal(there, FIRST + SECOND)
