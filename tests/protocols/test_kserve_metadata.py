"""What the Open Inference Protocol shows of a server and its models."""

from typing import Any

from examples.tensors import Affine

from weir._version import __version__
from weir.model import Model, Tensor
from weir.protocols.kserve_metadata import EXTENSIONS, config, metadata, server_metadata
from weir.serving.service import Service


class Echo(Model):
    """Items."""

    def predict(self, batch: list[object]) -> list[object]:
        return batch


class Words(Model):
    """Tensors that are not numbers."""

    inputs = (Tensor("words", "BYTES", (-1, -1)),)
    outputs = (Tensor("count", "UINT16", (-1,)),)

    def predict(self, batch: object) -> object:
        return batch


def test_a_server() -> None:
    described = server_metadata("mine")
    assert described == {"name": "mine", "version": __version__, "extensions": list(EXTENSIONS)}
    assert server_metadata("mine", ["one"])["extensions"] == ["one"]


def test_a_tensor_model() -> None:
    assert metadata(Service(Affine, version="2", platform="onnx"), ["1", "2"]) == {
        "name": "affine", "versions": ["1", "2"], "platform": "onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
    }  # fmt: skip


def test_a_model_of_items_is_one_tensor_of_documents() -> None:
    assert metadata(Service(Echo)) == {
        "name": "echo", "versions": [], "platform": "python",
        "inputs": [{"name": "input", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [{"name": "output", "datatype": "BYTES", "shape": [-1]}],
    }  # fmt: skip


def test_a_configuration_says_what_is_ragged_and_which_sizes_are_filled_up() -> None:
    class Compiled(Model):
        inputs = (Tensor("x", "INT8", [-1, -1], varying="ragged"),)
        outputs = (Tensor("y", "INT8", [-1]),)
        allowed_batch_sizes = (8, 2)

        def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
            return batch

    found: Any = config(Service(Compiled, max_batch_size=8))
    assert found["input"] == [{"name": "x", "data_type": "TYPE_INT8", "dims": [-1], "allow_ragged_batch": True}]
    assert found["parameters"]["allowed_batch_sizes"] == {"string_value": "2, 8"}


def test_a_configuration_says_dimensions_without_the_batch() -> None:
    found: Any = config(Service(Words, max_batch_size=8, max_queue_delay=0.25, workers=2))
    assert found["max_batch_size"] == 8
    assert found["input"] == [{"name": "words", "data_type": "TYPE_STRING", "dims": [-1]}]
    assert found["output"] == [{"name": "count", "data_type": "TYPE_UINT16", "dims": []}]
    assert found["instance_group"] == [{"name": "words", "kind": "KIND_CPU", "count": 2}]
    assert found["dynamic_batching"] == {}  # greedy does not wait
    assert found["parameters"]["max_queue_delay"] == {"string_value": "0.25"}
    waiting = config(Service(Words, policy="size-or-delay:size=4,delay=2ms"))["dynamic_batching"]
    assert waiting == {"preferred_batch_size": [4], "max_queue_delay_microseconds": 2000}
    assert found["parameters"]["policy"] == {"string_value": "greedy"}
