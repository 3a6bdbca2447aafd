"""Runs models of Triton's Python backend as they are: `model.py` with the class TritonPythonModel, and `config.pbtxt` beside it.

The server reads the file but does not run it: the model runs in its workers, and its `auto_complete_config` in a process of its own.
What a model imports as `pb_utils` is in triton_utils.py.
"""

import ast
import json
import os
import queue
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from weir.catalog.adapters.triton_utils import (
    PbRequest,
    PbResponse,
    PbSender,
    TritonModelException,
    load_class,
)
from weir.catalog.repository.platforms import as_tensor, batch_dimension_of, read_apart, with_attributes
from weir.catalog.repository.triton import read_pbtxt, translated
from weir.catalog.sources import ModelToServe
from weir.errors import SettingsError, WeirError
from weir.model import NONE, REQUIRED, Last, Model
from weir.workers.process.launch import python_path
from weir.workers.source import declared

CLASS = "TritonPythonModel"
_FILE = "config.pbtxt"
_ENVIRONMENT = "EXECUTION_ENV_PATH"
_TABLES = ("input", "output")
# Keys of the configuration that are settings of ours; the class has them as defaults.
_SETTINGS = ("max_batch_size", "workers", "policy", "max_queue_delay")


class TritonPython(Model):
    """Runs a TritonPythonModel, whose `execute` gets the requests of a batch and returns as many responses."""

    separate = keeps_head = True

    path: ClassVar[str] = ""
    code: ClassVar[bytes] = b""
    config: ClassVar[str] = "{}"  # as JSON

    def load(self) -> None:
        """Make the model and call its `initialize`."""
        self._wanted = [tensor.name for tensor in self.outputs]
        self._model = load_class(self.code, self.path, self.metrics)()
        self._loop: Any = None
        if hasattr(self._model, "initialize"):
            self._model.initialize(self._arguments())

    def predict(self, batch: Any) -> Any:
        """Return the answer to each request."""
        requests = [self._request(arrays) for arrays in batch]
        responses = self._execute(requests)
        if not isinstance(responses, list) or len(responses) != len(requests):
            what = f"{len(responses)} responses" if isinstance(responses, list) else f"a {type(responses).__name__}"
            raise TritonModelException(f"execute returned {what} for {len(requests)} requests")
        return [self._answer(response) for response in responses]

    def unload(self) -> None:
        """Call the model's `finalize`."""
        if hasattr(self._model, "finalize"):
            self._model.finalize()
        if self._loop is not None:
            self._loop.close()

    def _execute(self, requests: list[PbRequest]) -> Any:
        returned = self._model.execute(requests)
        if not hasattr(returned, "__await__"):
            return returned
        if self._loop is None:
            import asyncio  # only models that use it load it

            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(returned)

    def _request(self, arrays: Mapping[str, Any]) -> PbRequest:
        return PbRequest.received(arrays, getattr(arrays, "head", None), self._wanted)

    def _answer(self, response: Any) -> Any:
        if not isinstance(response, PbResponse):
            raise TritonModelException(f"execute returned a {type(response).__name__}, must be an InferenceResponse")
        return response.answer(self._wanted)

    def _arguments(self) -> dict[str, str]:
        config = json.loads(self.config)
        kinds = [group.get("kind") for group in config.get("instance_group", ())]
        gpus = _gpus() if "KIND_GPU" in kinds else 0
        return {
            "model_config": self.config, "model_name": config["name"],
            "model_instance_name": f"{config['name']}_0_{self.worker_index}",  # the group of instances, and the instance
            "model_version": Path(self.path).parent.name, "model_repository": str(Path(self.path).parents[1]),
            "model_instance_kind": "GPU" if gpus else "CPU",
            "model_instance_device_id": str(self.worker_index % gpus) if gpus else "0",
        }  # fmt: skip


class TritonDecoupled(TritonPython):
    """Runs a TritonPythonModel whose `execute` sends any number of responses to each request, also from threads of its own after it
    has returned."""

    streaming = True
    separate = False  # a streaming model gets its requests one by one anyway

    def predict(self, batch: list[Any]) -> Generator[dict[int, Any], frozenset[int], None]:
        """Yield the answers to each request as they are sent."""
        sent: queue.SimpleQueue[tuple[int, PbResponse | None, bool] | BaseException] = queue.SimpleQueue()
        left: frozenset[int] = frozenset()
        requests = [self._request(arrays) for arrays in batch]
        for index, request in enumerate(requests):
            request.sender = PbSender(index, lambda *each: sent.put(each), lambda place: place in left)

        def execute() -> None:
            try:
                self._execute(requests)
            except BaseException as error:
                sent.put(error)

        threading.Thread(target=execute, name="weir-execute", daemon=True).start()
        open_requests = set(range(len(requests)))
        while open_requests:
            given = sent.get()
            if isinstance(given, BaseException):
                raise given
            index, response, final = given
            if final:
                open_requests.discard(index)
            if response is not None:
                answer = self._answer(response)
                left = yield {index: Last(answer) if final and not isinstance(answer, WeirError) else answer}


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip()])
    listed = Path("/proc/driver/nvidia/gpus")
    return len(list(listed.iterdir())) if listed.is_dir() else 0


def defines_triton_model(path: Path) -> bool:
    """Tell whether the file defines the class TritonPythonModel. It is read, not run."""
    return _class_in(path) is not None


def _class_in(path: Path) -> ast.ClassDef | None:
    try:
        module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    return next((each for each in module.body if isinstance(each, ast.ClassDef) and each.name == CLASS), None)


def load_triton_model(model: ModelToServe, path: Path) -> type[Model]:
    """Return the class that runs the TritonPythonModel in the file `path` of a repository. Raises SettingsError."""
    assert model.folder is not None, "a model of a repository has a folder: this is a bug"
    source = f"{model.label}/{path.name}"
    config = _completed(model, path, _config_of(model.folder.parent / _FILE, model.name))
    if _ENVIRONMENT in config.get("parameters", {}):
        raise SettingsError(
            f"{source}: {_FILE}: parameters: {_ENVIRONMENT}: models run in the server's environment: install there what it has, and "
            "remove the parameter"
        )
    own = translated({key: value for key, value in config.items() if key != "parameters"}, source)
    decoupled = bool(own.get("decoupled"))
    attributes: dict[str, Any] = {
        "path": str(path), "code": path.read_bytes(), "config": json.dumps(config), "plain_texts": False,
        **{key: own[key] for key in _SETTINGS if key in own},
    }  # fmt: skip
    batch = batch_dimension_of({"batch_dimension": own["batch_dimension"], "inputs": own["inputs"]}) or REQUIRED
    for key in ("inputs", "outputs"):
        if not own[key]:
            raise SettingsError(f"{source}: {_FILE} or auto_complete_config must declare {key}")
        attributes[key] = tuple(as_tensor(table, own["batch_dimension"], f"{source}: {key}") for table in own[key])
    if batch == NONE:
        attributes["unbatched"] = "max_batch_size is 0"
    return with_attributes(declared(TritonDecoupled if decoupled else TritonPython, attributes), model)


def _config_of(file: Path, name: str) -> dict[str, Any]:
    """Return a configuration in Triton's JSON form, with the fields that models rely on."""
    read = read_pbtxt(file.read_text("utf-8-sig"), f"{name}/{_FILE}") if file.is_file() else {}
    config: dict[str, Any] = {"name": name, "platform": "", "backend": "python", "max_batch_size": 0, **read}
    for key in (*_TABLES, "instance_group"):
        config[key] = _listed(config.get(key, []))
    for key in _TABLES:
        config[key] = [{"format": "FORMAT_NONE", **each, "dims": _listed(each.get("dims", []))} for each in config[key]]
    parameters = config.get("parameters", {})
    if isinstance(parameters, list) or set(parameters) == {"key", "value"}:
        config["parameters"] = {each["key"]: each.get("value", {}) for each in _listed(parameters)}
    return config


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _completed(model: ModelToServe, path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration as the model's `auto_complete_config` leaves it, if it has one."""
    found = _class_in(path)
    if not any(getattr(each, "name", "") == "auto_complete_config" for each in getattr(found, "body", ())):
        return config
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))}
    return read_apart(
        "weir.catalog.adapters.triton_utils", [str(path), json.dumps(config)], f"{model.label}/{path.name}", environment
    )
