import json
import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import pytest
from tests.rings import subcases
from tests.workers.runs import run, started

from weir.errors import InvalidRequest, ModelError, SettingsError
from weir.messages import JSON, KSERVE, OBJECT
from weir.model import NONE, PAD, RAGGED, REQUIRED, Model, Tensor
from weir.wire.inference import ResponseHead
from weir.wire.tensors import Arrays
from weir.workers.run.tensors import BodyWriter, Splitter, Stacker, adjoined, allocator, readers

Y = (Tensor("y", "INT32", [-1]),)


def joiner(*tensors: Tensor, sizes: list[int] | None = None, owns: bool = False) -> Stacker:
    class Declared(Model):
        inputs = tensors
        outputs = Y
        allowed_batch_sizes = sizes
        owns_inputs = owns

    return Stacker(Declared)


def entries(*values: Any, name: str = "x", dtype: Any = numpy.int32) -> list[Arrays]:
    return [{name: numpy.array(value, dtype)} for value in values]


X = Tensor("x", "INT32", [-1, -1])


def test_what_is_alone_is_not_copied() -> None:
    for tensor in (X, X._replace(varying=PAD)):
        (entry,) = entries([[1, 2]])
        batch = joiner(tensor)([entry])
        assert batch["x"].ctypes.data == entry["x"].ctypes.data
        assert not batch["x"].flags.writeable
        assert entry["x"].flags.writeable


@pytest.mark.parametrize("varying", ["group", PAD, RAGGED])
@pytest.mark.parametrize("count", [1, 2])
def test_all_inputs_or_none_can_be_written_to(varying: str, count: int) -> None:
    given = entries([[1, 2]], [[3, 4]])[:count]
    assert not joiner(X._replace(varying=varying))(given)["x"].flags.writeable
    owned = joiner(X._replace(varying=varying), owns=True)(given)["x"]
    assert owned.flags.writeable
    owned[:] = 0
    assert given[0]["x"].tolist() == [[1, 2]]


def test_padding_fills_up_to_the_longest_and_tells_the_true_lengths() -> None:
    tensor = Tensor("x", "INT32", [-1, -1], varying=PAD, pad_value=-7, lengths="n")
    batch = joiner(tensor)(entries([[1]], [[2, 3, 4], [5, 6, 7]], [[8, 9]]))
    assert batch["x"].tolist() == [[1, -7, -7], [2, 3, 4], [5, 6, 7], [8, 9, -7]]
    assert batch["n"].tolist() == [1, 3, 3, 2]
    assert batch["n"].dtype == numpy.int64


def test_several_dimensions_are_padded_at_once() -> None:
    tensor = Tensor("x", "FP32", [-1, -1, 2, -1], varying=PAD, pad_value=0.5)
    small, large = numpy.ones((1, 1, 2, 3), numpy.float32), numpy.ones((1, 2, 2, 1), numpy.float32)
    batch = joiner(tensor)([{"x": small}, {"x": large}])
    assert batch["x"].shape == (2, 2, 2, 3)
    assert batch["x_lengths"].tolist() == [[1, 3], [2, 1]]
    assert (batch["x"][0, :1] == 1).all()
    assert (batch["x"][0, 1] == 0.5).all()
    assert (batch["x"][1, :, :, :1] == 1).all()
    assert (batch["x"][1, :, :, 1:] == 0.5).all()


@subcases(
    ("datatype", "pad_value", "padded"),
    [("BYTES", 0, b""), ("BYTES", b"-", b"-"), ("BF16", 1.0, 0x3F80), ("FP16", 1.5, 1.5), ("BOOL", True, True)],
)
def test_every_datatype_has_something_to_pad_with(datatype: str, pad_value: Any, padded: Any) -> None:
    tensor = Tensor("x", datatype, [-1, -1], varying=PAD, pad_value=pad_value)
    dtype = {"BYTES": object, "BF16": "<u2", "FP16": numpy.float16, "BOOL": bool}[datatype]
    short, long = ([[b"a"]], [[b"b", b"c"]]) if datatype == "BYTES" else ([[0]], [[0, 0]])
    batch = joiner(tensor)(entries(short, long, dtype=dtype))
    assert batch["x"][0, 1] == padded


@subcases(("datatype", "pad_value"), [("UINT8", -1), ("UINT8", 256), ("INT8", float("nan")), ("FP16", 1e9)])
def test_a_pad_value_that_cannot_be(datatype: str, pad_value: Any) -> None:
    with pytest.raises(
        SettingsError, match=f"Declared: tensor 'x' has pad_value={pad_value!r}, which is not a {datatype}"
    ):
        joiner(Tensor("x", datatype, [-1, -1], varying=PAD, pad_value=pad_value))


def test_ragged_rows_lose_the_dimension_in_which_they_differ() -> None:
    given = entries([[[1, 2]]], [[[3, 4], [5, 6]], [[7, 8], [9, 10]]], numpy.empty((1, 0, 2)), [[[11, 12]]])
    batch = joiner(Tensor("x", "INT32", [-1, -1, 2], varying=RAGGED))(given)
    assert batch["x"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]]
    assert batch["x_lengths"].tolist() == [1, 2, 2, 0, 1]


def test_batches_are_filled_up_to_an_allowed_size_with_the_last_row() -> None:
    join = joiner(X, sizes=[8, 2, 4])
    assert join(entries([[1], [2], [3]]))["x"].tolist() == [[1], [2], [3], [3]]
    assert join(entries([[1]], [[2]]))["x"].tolist() == [[1], [2]]
    assert len(join(entries(*[[[1]]] * 5))["x"]) == 8
    with pytest.raises(InvalidRequest, match="a batch of 9 rows: the model takes 8 at most"):
        join(entries(*[[[1]]] * 9))


Array = numpy.ndarray[Any, Any]
STEP = 64


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """A page with the numbers 0, 1, 2 and so on."""
    mapped = mmap.mmap(-1, 4096)
    numpy.frombuffer(mapped, numpy.int32)[:] = numpy.arange(1024)
    yield mapped


def row(memory: Any, offset: int, shape: tuple[int, ...] = (1, 2, 4)) -> Array:
    size = 4 * int(numpy.prod(shape))
    return numpy.frombuffer(memoryview(memory)[offset : offset + size], numpy.int32).reshape(shape)


@pytest.mark.parametrize("offsets", [(0, STEP, 2 * STEP), (STEP, 0x180), (128, 160)])
def test_equal_distances_are_a_view(memory: mmap.mmap, offsets: tuple[int, ...]) -> None:
    parts = [row(memory, offset) for offset in offsets]
    whole = adjoined(parts)
    assert whole is not None
    assert whole.__array_interface__["data"][0] == parts[0].__array_interface__["data"][0]
    assert not whole.flags.writeable
    numpy.testing.assert_array_equal(whole, numpy.concatenate(parts))
    numpy.testing.assert_array_equal(whole.reshape(len(parts), -1)[:, 0], [offset // 4 for offset in offsets])


def test_the_view_keeps_the_memory(memory: mmap.mmap) -> None:
    whole = adjoined([row(memory, 0), row(memory, STEP)])
    with pytest.raises(BufferError):
        memory.close()
    assert whole is not None and whole[1, 0, 0] == STEP // 4


def others(memory: mmap.mmap) -> dict[str, list[Array]]:
    return {
        "different distances": [row(memory, 0), row(memory, STEP), row(memory, 3 * STEP)],
        "backwards": [row(memory, STEP), row(memory, 0)],
        "the same twice": [row(memory, 0), row(memory, 0)],
        "overlapping": [row(memory, 0), row(memory, 16)],
        "distances that are no whole number of elements": [row(memory, 0), row(memory, 66)],
        "unaligned": [row(memory, 2), row(memory, 66)],
        "several rows": [row(memory, 0, (2, 4)), row(memory, STEP, (2, 4))],
        "other shapes": [row(memory, 0), row(memory, STEP, (1, 8))],
        "not contiguous": [row(memory, 0), row(memory, STEP, (1, 4, 2)).transpose(0, 2, 1)],
        "ordinary memory": [numpy.zeros((1, 2, 4), numpy.int32), numpy.zeros((1, 2, 4), numpy.int32)],
        "a second one elsewhere": [row(memory, 0), numpy.zeros((1, 2, 4), numpy.int32)],
    }


@pytest.mark.parametrize("name", others(mmap.mmap(-1, 4096)))
def test_anything_else_is_none(memory: mmap.mmap, name: str) -> None:
    assert adjoined(others(memory)[name]) is None


def test_rows_of_two_mappings_are_none_even_where_distances_agree(memory: mmap.mmap) -> None:
    other = mmap.mmap(-1, 4096)
    first, second = sorted([row(memory, 0), row(other, 0)], key=lambda part: part.__array_interface__["data"][0])
    assert adjoined([first, second]) is None


class Bound(Model):
    """Gets its batches in arrays of its own."""

    inputs = (Tensor("x", "FP32", [-1, 2]), Tensor("t", "INT64", [-1, -1], varying=PAD, pad_value=-1))
    outputs = (Tensor("y", "FP32", [-1, 2]), Tensor("bound", "BOOL", [-1, 2]))

    def __init__(self) -> None:
        self.mine: dict[str, Any] = {}

    def input_buffers(self, rows: int) -> Mapping[str, Any]:
        self.mine = {"x": numpy.zeros((rows, 2), numpy.float32), "t": numpy.zeros((rows + 1, 4), numpy.int64)}
        return self.mine

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        bound = [batch[name].ctypes.data == self.mine[name].ctypes.data for name in ("x", "t")]
        return {"y": batch["x"] + batch["t"].sum(axis=1, keepdims=True), "bound": [bound] * len(batch["x"])}


def entry(rows: int, length: int) -> dict[str, Any]:
    return {"x": numpy.ones((rows, 2), numpy.float32), "t": numpy.ones((rows, length), numpy.int64)}


def test_batches_are_gathered_into_the_models_own_arrays() -> None:
    runner = started(Bound, max_batch_size=4)
    for entries in ([entry(1, 4)], [entry(2, 1), entry(1, 3)], [entry(4, 4)]):
        for given, answer in zip(entries, run(runner, entries), strict=True):
            length = given["t"].shape[1]
            assert answer["y"].tolist() == [[1 + length - (4 - length)] * 2] * len(given["x"])
            assert answer["bound"].all()


def test_what_does_not_fit_comes_as_if_there_were_none() -> None:
    (answer,) = run(Bound, [entry(1, 5)], max_batch_size=4)
    assert answer["bound"].tolist() == [[True, False]]
    assert answer["y"].tolist() == [[6, 6]]
    one, two = run(Bound, [entry(3, 1), entry(3, 2)], max_batch_size=4)
    assert not one["bound"].any()
    assert two["y"].tolist() == [[3, 3]] * 3


@subcases(
    ("given", "words"),
    [
        ({"z": numpy.zeros((4, 2), numpy.float32)}, "'z' is no input"),
        ({"x": numpy.zeros((4, 2))}, "'x' is of float64, must be of float32"),
        ({"x": numpy.zeros((3, 2), numpy.float32)}, "'x' has shape [3, 2], must be writable and of shape [4, 2]"),
        ({"x": numpy.zeros((4, 3), numpy.float32)}, "'x' has shape [4, 3]"),
        ({"x": numpy.zeros(4, numpy.float32)}, "'x' has shape [4]"),
        ({"x": numpy.broadcast_to(numpy.float32(0), (4, 2))}, "must be writable"),
    ],
)
def test_arrays_that_cannot_be(given: dict[str, Any], words: str) -> None:
    class Wrong(Bound):
        def input_buffers(self, rows: int) -> Mapping[str, Any]:
            return given

    with pytest.raises(SettingsError) as caught:
        started(Wrong, max_batch_size=4)
    assert caught.value.message.startswith("Wrong.input_buffers: ")
    assert words in caught.value.message


def test_outputs_are_of_the_declared_datatype_wherever_the_model_runs() -> None:
    class Anywhere(Model):
        outputs = (Tensor("y", "BF16", [-1]), Tensor("s", "BYTES", [-1, 2]))

    model = Anywhere()
    assert model.output("y", 3).dtype == numpy.uint16
    assert model.output("s", 3, 2).shape == (3, 2)
    with pytest.raises(KeyError):
        model.output("z", 1)


def test_only_large_arrays_without_objects_come_from_the_arena() -> None:
    asked: list[int] = []
    memory = bytearray(1 << 20)

    def open_place(size_bytes: int) -> memoryview | None:
        asked.append(size_bytes)
        return memoryview(memory)[:size_bytes] if size_bytes <= len(memory) else None

    allocate = allocator(open_place)
    assert allocate((10,), numpy.dtype("f4")).shape == (10,)
    assert allocate((1 << 16,), numpy.dtype(object)).dtype == object
    assert asked == []
    array = allocate((100, 1000), numpy.dtype("f4"))
    array[:] = 1
    assert memory[:4] == numpy.float32(1).tobytes()
    assert allocate((1000, 1000), numpy.dtype("f4")).shape == (1000, 1000)
    assert asked == [400_000, 4_000_000]


def parter(*returned: Tensor, given: tuple[Tensor, ...] = (Tensor("x", "INT32", [-1]),), sizes: Any = None) -> Splitter:
    class Declared(Model):
        inputs = given
        outputs = returned
        allowed_batch_sizes = sizes

    return Splitter(Declared)


def zeros(*shape: int) -> Arrays:
    return {"x": numpy.zeros(shape, numpy.int32)}


OUT_Y, OUT_Z = Tensor("y", "INT32", [-1]), Tensor("z", "FP32", [-1, 2])


def test_each_entry_gets_its_rows_in_the_order_declared() -> None:
    returned = {"z": [[1, 2]] * 3, "y": [1, 2, 3]}
    first, second = parter(OUT_Y, OUT_Z)(returned, [zeros(1), zeros(2)])
    assert [list(first), list(second)] == [["y", "z"]] * 2
    assert first["y"].tolist() == [1]
    assert second["y"].tolist() == [2, 3]
    assert second["z"].shape == (2, 2)


@subcases(
    ("returned", "words"),
    [
        ([1], "predict returned wrong tensors: tensors: a list, must be an object with 'y', 'z'"),
        ({"y": [1] * 3}, "tensor 'z': is missing"),
        ({"y": [1] * 3, "z": [[1, 2]] * 3, "w": [1]}, "tensor 'w': not one of 'y', 'z'"),
        ({"y": [1.5] * 3, "z": [[1, 2]] * 3}, "tensor 'y': has elements of float64, must be INT32"),
        ({"y": [1] * 3, "z": [[1]] * 3}, "tensor 'z': has shape [3, 1], must be [-1, 2]"),
        ({"y": [1] * 2, "z": [[1, 2]] * 3}, "predict returned 2 rows for a batch of 3 (tensor 'y')"),
        ({"y": [1] * 3, "z": [[1, 2]] * 4}, "predict returned 4 rows for a batch of 3 (tensor 'z')"),
    ],
)
def test_what_is_not_as_declared(returned: Any, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        parter(OUT_Y, OUT_Z)(returned, [zeros(1), zeros(2)])
    assert words in caught.value.message


def test_what_filled_the_batch_up_is_dropped() -> None:
    part = parter(OUT_Y, sizes=[4])
    assert [answer["y"].tolist() for answer in part({"y": [1, 2, 3, 3]}, [zeros(1), zeros(2)])] == [[1], [2, 3]]
    assert [answer["y"].tolist() for answer in part({"y": [1, 2, 2, 2]}, [zeros(2)])] == [[1, 2]]
    with pytest.raises(ModelError, match="predict returned 3 rows for a batch of 4"):
        part({"y": [1, 2, 3]}, [zeros(3)])


TOKENS = Tensor("x", "INT32", [-1, -1])


def test_padded_answers_are_cut_to_the_true_lengths() -> None:
    part = parter(Tensor("y", "FP32", [-1, 2, -1], like="x"), given=(TOKENS._replace(varying=PAD),))
    returned = numpy.arange(3 * 2 * 4, dtype=numpy.float32).reshape(3, 2, 4)
    first, second = part({"y": returned}, [zeros(1, 4), zeros(2, 1)])
    assert first["y"].tolist() == returned[:1].tolist()
    assert second["y"].tolist() == returned[1:, :, :1].tolist()
    with pytest.raises(ModelError, match=r"tensor 'y': has shape \[1, 2, 3\], must be as long as 'x' \[1, 4\]"):
        part({"y": returned[:, :, :3]}, [zeros(1, 4), zeros(2, 1)])


def test_ragged_answers_are_divided_by_the_true_lengths() -> None:
    part = parter(Tensor("y", "FP32", [-1, -1, 2], like="x"), given=(TOKENS._replace(varying=RAGGED),), sizes=[4])
    returned = numpy.arange(18, dtype=numpy.float32).reshape(9, 2)
    first, second = part({"y": returned}, [zeros(1, 3), zeros(2, 2)])
    assert first["y"].tolist() == [returned[:3].tolist()]
    assert second["y"].tolist() == [returned[3:5].tolist(), returned[5:7].tolist()]
    with pytest.raises(ModelError, match=r"predict returned 8 values for a batch of 9 \(tensor 'y'\)"):
        part({"y": returned[:8]}, [zeros(1, 3), zeros(2, 2)])


class Reverse(Model):
    """Gives back each row reversed, whatever its length, and how long it was."""

    inputs = (TOKENS._replace(varying=PAD, pad_value=-1),)
    outputs = (Tensor("y", "INT32", [-1, -1], like="x"), Tensor("n", "INT64", [-1]))

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        reversed_rows = numpy.full_like(batch["x"], -1)
        for row, length in enumerate(batch["x_lengths"]):
            reversed_rows[row, :length] = batch["x"][row, :length][::-1]
        return {"y": reversed_rows, "n": batch["x_lengths"]}


class RaggedReverse(Reverse):
    inputs = (TOKENS._replace(varying=RAGGED),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = numpy.split(batch["x"], numpy.cumsum(batch["x_lengths"])[:-1])
        return {"y": numpy.concatenate([row[::-1] for row in rows]), "n": batch["x_lengths"]}


@pytest.mark.parametrize("model", [Reverse, RaggedReverse])
@pytest.mark.parametrize("sizes", [None, [1, 4, 16]])
def test_an_answer_is_the_same_in_every_company(model: type[Model], sizes: Any) -> None:
    chosen = type("Chosen", (model,), {"allowed_batch_sizes": sizes})
    entries = [
        {"x": numpy.arange(rows * length).reshape(rows, length)} for rows, length in ((1, 3), (2, 1), (3, 7), (1, 0))
    ]
    together = run(chosen, entries)
    for entry, answer in zip(entries, together, strict=True):
        (alone,) = run(chosen, [entry])
        assert answer["y"].tolist() == alone["y"].tolist() == [row[::-1] for row in entry["x"].tolist()]
        assert answer["n"].tolist() == alone["n"].tolist()


@subcases("kind", ["joined", "separate", "streaming", "unbatched"])
def test_only_requests_that_are_joined_need_a_tensor_with_rows(kind: str) -> None:
    batch = NONE if kind == "unbatched" else REQUIRED
    model_class = type(
        "AllOptional", (Model,),
        {"inputs": (Tensor("x", "INT32", (-1,), batch=batch, optional=True),), "outputs": (Tensor("y", "INT32", (-1,), batch=batch),),
         "separate": kind == "separate", "streaming": kind == "streaming"},
    )  # fmt: skip
    found = readers(model_class())
    assert found[OBJECT]({"x": [1]})["x"].tolist() == [1]
    for content_type, empty in ((OBJECT, {}), (JSON, b"{}"), (KSERVE, b'{"inputs": []}')):
        if kind == "joined":
            with pytest.raises(InvalidRequest, match="tensors: there are none, must be at least one of 'x'"):
                found[content_type](empty)
        else:
            assert found[content_type](empty) == {}


FLAT = list(range(4))


class Both(Model):
    inputs = (Tensor("a", "INT32", [-1, 2]), Tensor("b", "FP32", [-1, -1]))
    outputs = (Tensor("sum", "FP32", [-1, 2]), Tensor("text", "BYTES", [-1]))

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"sum": batch["a"] + batch["b"], "text": [b"row"] * len(batch["a"])}


class Half(Model):
    inputs = (Tensor("x", "FP32", [-1]),)
    outputs = (Tensor("y", "FP16", [-1]), Tensor("z", "FP32", [-1]))

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"].astype(numpy.float16), "z": batch["x"]}


def tensor(name: str, datatype: str, shape: list[int], data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


A, B = tensor("a", "INT32", [2, 2], FLAT), tensor("b", "FP32", [2, 2], [1, 0.5, 2, 2])


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


def answers(*bodies: bytes, model: type[Model] = Both, **settings: Any) -> list[Any]:
    outputs = run(model, list(bodies), KSERVE, KSERVE, **settings)
    return [json.loads(output) if isinstance(output, bytes) else output for output in outputs]


def refused(data: bytes) -> str:
    (output,) = answers(data)
    assert isinstance(output, InvalidRequest)
    return output.message


def test_every_way_of_saying_it_is_answered_alike() -> None:
    nested = tensor("a", "INT32", [2, 2], [[0, 1], [2, 3]]), tensor("b", "FP32", [2, 2], [[1, 0.5], [2, 2]])
    for answer in answers(body(A, B), body(B, A), body(*nested), label="both"):
        assert answer == {
            "model_name": "both",
            "outputs": [
                {"name": "sum", "datatype": "FP32", "shape": [2, 2], "data": [1.0, 1.5, 4.0, 5.0]},
                {"name": "text", "datatype": "BYTES", "shape": [2], "data": ["row", "row"]},
            ],
        }


def test_the_answer_has_id_version_and_only_the_requested_outputs() -> None:
    first, second, third = answers(
        body(A, B, id="7", outputs=[{"name": "text"}]),
        body(B, A, id="8", outputs=[{"name": "text", "parameters": {"classification": 1}}, {"name": "sum"}]),
        body(A, B, outputs=[], id=None),
        label="both/3",
    )
    assert (first["model_name"], first["model_version"], first["id"]) == ("both", "3", "7")
    assert [output["name"] for output in first["outputs"]] == ["text"]
    assert second["id"] == "8"
    assert [output["name"] for output in second["outputs"]] == ["sum", "text"]
    assert "id" not in third
    assert len(third["outputs"]) == 2


def test_bodies_share_a_batch_with_arrays_and_with_other_json() -> None:
    arrays = {"a": numpy.ones((1, 2), numpy.int32), "b": numpy.ones((1, 2), numpy.float32)}
    plain = b'{"a": [[1, 1]], "b": [[1, 1]]}'
    outputs = run(Both, [body(A, B, id="1"), arrays, plain], [KSERVE, OBJECT, JSON], [KSERVE, OBJECT, JSON])
    assert json.loads(outputs[0])["id"] == "1"
    assert outputs[1]["sum"].tolist() == [[2, 2]]
    assert json.loads(outputs[2])["sum"] == [[2, 2]]


@subcases(
    ("data", "words"),
    [
        (b"{", "body: must be an inference request as JSON"),
        (body(A), "tensor 'b': is missing"),
        (body({**A, "data": [0, 1, 2, 2**31]}, B), "out of the range of INT32"),
        (body(A, {**B, "shape": [4, 1]}), "tensor 'b': has 4 rows, tensor 'a' has 2"),
        (body(A, B, outputs=[{"name": "z"}]), "output 'z': not one of 'sum', 'text'"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, words: str) -> None:
    assert words in refused(data)


def test_an_output_without_a_json_form_fails_only_those_who_ask_for_it() -> None:
    x = tensor("x", "FP32", [1], [1])
    everything, one = answers(body(x), body(x, outputs=[{"name": "z"}]), model=Half)
    assert isinstance(everything, InvalidRequest)
    assert "tensor 'y': FP16 has no JSON form" in everything.message
    assert one["outputs"][0]["data"] == [1.0]


def test_a_model_whose_inputs_have_no_json_form_gets_none() -> None:
    class Raw(Half):
        inputs = (Tensor("x", "FP16", [-1]),)

    (output,) = answers(body(tensor("x", "FP16", [1], [1])), model=Raw)
    assert "FP16 has no JSON form" in output.message


def test_the_id_survives_a_model_that_changes_its_entries() -> None:
    class Changing(Both):
        def preprocess(self, item: Any) -> Any:
            return {"a": item["a"] * 2, "b": item["b"]}

    (output,) = answers(body(A, B, id="9"), model=Changing)
    assert output["id"] == "9"
    assert output["outputs"][0]["data"] == [1.0, 2.5, 6.0, 8.0]


def test_nan_is_written_as_null() -> None:
    arrays = {"sum": numpy.array([[numpy.nan, numpy.inf]], numpy.float32), "text": numpy.array([b""], object)}
    written = BodyWriter(Both, "both", "")(arrays, ResponseHead("", ["sum"]))
    assert json.loads(written)["outputs"][0]["data"] == [None, None]


class Wide(Both):
    """Takes rows of any width."""

    inputs = (Tensor("a", "INT32", [-1, -1]), Tensor("b", "FP32", [-1, -1]))


def test_rows_of_other_lengths_are_never_taken_for_rows_of_this_batch() -> None:
    """The line gathers equal shapes only; this is the second check."""
    bodies = [body(tensor("a", "INT32", [1, n], list(range(n))), tensor("b", "FP32", [1, 1], [0])) for n in (2, 1, 3)]
    first, second, third = answers(*bodies, model=Wide)
    assert first["outputs"][0]["data"] == [0.0, 1.0]
    assert isinstance(second, ModelError)  # the model declares two columns
    assert isinstance(third, ModelError)


def test_an_integer_beyond_64_bits_fails_alone() -> None:
    class Huge(Half):
        inputs = (Tensor("x", "UINT64", [-1]),)

        def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
            return super().predict({"x": batch["x"].astype(numpy.float32)})

    asked = {"outputs": [{"name": "z"}]}
    good, bad = answers(
        body(tensor("x", "UINT64", [1], [7]), **asked), body(tensor("x", "UINT64", [1], [2**64]), **asked), model=Huge,
        retry_in_halves=False,
    )  # fmt: skip
    assert good["outputs"][0]["data"] == [7.0]
    assert "18446744073709551616, out of the range of UINT64" in bad.message
