"""Calls that are not inference, as every channel makes them, and the documents of their responses."""

from typing import Any

import pytest
from examples.tensors import Affine
from tests.workers.models import Echo

from weir._version import __version__
from weir.catalog.registry import Registry
from weir.errors import ModelNotFound, Unsupported
from weir.model import Model, Tensor
from weir.protocols import HttpSettings, KserveSettings
from weir.protocols.data_plane import EXTENSIONS, DataPlane, config, metadata
from weir.protocols.kserve import KserveContext
from weir.serving.service import Service
from weir.wire.data_plane import DATA_PLANE
from weir.wire.kserve_grpc import methods
from weir.workers.cpus import cpu_count


class Words(Model):
    """Tensors that are not numbers."""

    inputs = (Tensor("words", "BYTES", (-1, -1)),)
    outputs = (Tensor("count", "UINT16", (-1,)),)

    def predict(self, batch: object) -> object:
        return batch


class Asked:
    """The data plane of a server with these models."""

    def __init__(self, *services: Service) -> None:
        self.registry = Registry(list(services))
        settings = KserveSettings(server_name="mine")
        self._plane = DataPlane(KserveContext(self.registry, HttpSettings(), settings=settings))

    async def __call__(self, name: str, body: Any = None, **path: Any) -> Any:
        return await self._plane.respond(DATA_PLANE[name], path, body)


def test_every_call_has_one_method_one_name_in_grpc_and_routes_of_its_own() -> None:
    services = ("GRPCInferenceService", "model_repository.ModelRepositoryService")
    named = {method.name for service in services for method in methods(f"inference.{service}")}
    found = [name for call in DATA_PLANE.values() for name in call.grpc]
    assert sorted(found) == sorted(named - {"ModelInfer", "ModelStreamInfer"})
    routes = [route for call in DATA_PLANE.values() for route in call.routes()]
    assert len(set(routes)) == len(routes)
    assert all(hasattr(DataPlane, name) for name in DATA_PLANE)


async def test_a_server() -> None:
    ask = Asked(Service(Affine))
    offered = [each for each in EXTENSIONS if not each.startswith("model_repository")]
    assert await ask("server_metadata") == {"name": "mine", "version": __version__, "extensions": offered}


async def test_a_question_is_true_or_false() -> None:
    ask = Asked(Service(Affine, version="1", executor="inline"))

    async def ready() -> list[bool]:
        models = [("affine", ""), ("affine", "1"), ("affine", "3"), ("nope", "")]
        answers = [await ask("model_ready", model=name, version=version) for name, version in models]
        return [each["ready"] for each in (await ask("server_ready"), *answers)]

    assert await ready() == [False] * 5
    await ask.registry.start()
    assert await ready() == [True, True, True, False, False]
    await ask.registry.stop()
    assert await ready() == [False] * 5
    cpus = cpu_count()
    for name, count, found in (("cpu", 0, True), ("CPU", cpus, True), ("cpu", cpus + 1, False), ("xrt", None, False)):
        assert await ask("has_hardware", {"name": name, "num": count}) == {"found": found}


async def test_models_are_described_by_version() -> None:
    ask = Asked(*[Service(Affine, name="m", version=version) for version in ("1", "2")], Service(Echo))
    assert (await ask("model_metadata", model="m"))["versions"] == ["1", "2"]
    assert (await ask("model_config", model="m", version="1"))["name"] == "m"
    for path, versions in (({}, ["1", "2", ""]), ({"model": "m"}, ["1", "2"]), ({"model": "m", "version": "2"}, ["2"])):
        assert [each["version"] for each in (await ask("statistics", **path))["model_stats"]] == versions
    for name in ("model_metadata", "model_config", "statistics"):
        with pytest.raises(ModelNotFound, match=r"^Request for unknown model: 'nope'"):
            await ask(name, model="nope")


async def test_what_is_not_offered() -> None:
    """Changes of models, where no manager is, included; of GPU memory there are no regions."""
    ask = Asked(Service(Affine))
    changes = ("index", "load_model", "unload_model", "load_worker", "unload_worker")
    for name in ("trace_settings", "log_settings", "share_cuda_memory", *changes):
        subject = DATA_PLANE[name].subject
        with pytest.raises(Unsupported):
            await ask(name, {}, **({subject: "affine"} if subject else {}))
    assert (await ask("cuda_memory_status"), await ask("unregister_cuda_memory")) == ([], {})


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
