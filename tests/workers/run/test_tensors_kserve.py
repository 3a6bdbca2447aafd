import json
from typing import Any

import numpy
import pytest
from tests.workers.runs import run

from weir.errors import InvalidRequest, ModelError
from weir.messages import JSON, KSERVE, OBJECT
from weir.model import Model, Tensor
from weir.wire.inference import ResponseHead
from weir.workers.run.tensors import BodyWriter

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


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "body: must be an inference request as JSON"),
        (body(A), "tensor 'b': is missing"),
        (body(A, A), "tensor 'a': is there twice"),
        (body(A, {**B, "name": "c"}), "tensor 'c': not one of 'a', 'b'"),
        (body({**A, "datatype": "INT64"}, B), "tensor 'a': has datatype 'INT64', must be INT32"),
        (body({**A, "data": [0, 1, 2]}, B), "tensor 'a': has 3 elements, its shape [2, 2] takes 4"),
        (body({**A, "data": [0, 1, 2, 2**31]}, B), "out of the range of INT32"),
        (body({**A, "data": [0, 1, 2, 1.5]}, B), "tensor 'a': has the element 1.5"),
        (body({**A, "shape": [1, 4]}, B), "tensor 'a': has shape [1, 4], must be [-1, 2]"),
        (body({**A, "shape": [-2, -2]}, B), "tensor 'a': has shape [-2, -2]"),
        (body({**A, "shape": [2**40, 2**40]}, B), "tensor 'a': shape"),
        (body(A, {**B, "shape": [4, 1]}), "tensor 'b': has 4 rows, tensor 'a' has 2"),
        (body(A, B, outputs=[{"name": "z"}]), "output 'z': not one of 'sum', 'text'"),
        (body(A, B, outputs=[{"name": "sum"}, {"name": "sum"}]), "output 'sum': is there twice"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, words: str) -> None:
    assert words in refused(data)


def test_a_wrong_body_fails_alone() -> None:
    good, bad = answers(body(A, B), body(A))
    assert good["outputs"][0]["data"] == [1.0, 1.5, 4.0, 5.0]
    assert isinstance(bad, InvalidRequest)


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


def test_a_model_that_owns_its_inputs_may_write_to_them() -> None:
    class Owning(Both):
        owns_inputs = True

        def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
            batch["a"] += 1
            return super().predict(batch)

    class Writing(Owning):
        owns_inputs = False

    first, second = answers(body(A, B), body(A, B), model=Owning)
    assert first["outputs"][0]["data"] == second["outputs"][0]["data"] == [2.0, 2.5, 5.0, 6.0]
    first, second = answers(body(A, B), body(A, B), model=Writing)
    assert "read-only" in first.message


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
