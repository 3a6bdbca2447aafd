"""Runs models of Triton's Python backend as they are: `model.py` with the class TritonPythonModel, and `config.pbtxt` next to it.

The server reads the file but does not run it: the model runs in its workers, and its `auto_complete_config` in a process of its own.
What a model imports as `pb_utils` is in triton_utils.py.
"""

import json
import os
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Generator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from weir.catalog.adapters.triton_utils import PbRequest, PbResponse, PbSender, TritonModelException, load_class
from weir.catalog.repository.model_files import (
    PYTHON_FILE,
    as_tensor,
    batch_dimension_of,
    file_within,
    read_apart,
    with_attributes,
)
from weir.catalog.repository.triton import in_snakes, read_pbtxt, translated, triton_class_in
from weir.catalog.sources import ModelToServe
from weir.errors import SettingsError, WeirError
from weir.model import NONE, RAGGED, REQUIRED, Last, Model, Tensor
from weir.wire.tensors import rows_of, shape_key
from weir.workers.cpus import gpu_count
from weir.workers.process.launch import python_path
from weir.workers.run.steps import responses_of
from weir.workers.source import declared

_FILE = "config.pbtxt"
_ENVIRONMENT = "EXECUTION_ENV_PATH"
_TABLES = ("input", "output")
# Batches of a decoupled model that a worker process has at once. Each takes a thread, which waits for responses.
_CONCURRENCY = 64
# Keys of the configuration that are settings of ours; the class has them as defaults.
_SETTINGS = ("env", "max_batch_size", "max_queue_delay", "max_queue_size", "policy", "timeout", "workers")


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
        self._loop: _EventLoop | None = None
        if hasattr(self._model, "initialize"):
            self._model.initialize(self._arguments())

    def predict(self, batch: Any) -> Any:
        """Return the response to each request."""
        requests = [self._request(arrays) for arrays in batch]
        responses = self._execute(requests)
        return [self._output(response) for response in responses_of(responses, len(requests), "execute")]

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
        result, error = self._event_loop().begin(returned).result()
        if error is not None:
            raise error
        return result

    def _event_loop(self) -> "_EventLoop":
        if self._loop is None:
            self._loop = _EventLoop()
        return self._loop

    def _request(self, arrays: Mapping[str, Any]) -> PbRequest:
        return PbRequest.received(arrays, getattr(arrays, "head", None), self._wanted)

    def _output(self, response: Any) -> Any:
        if not isinstance(response, PbResponse):
            raise TritonModelException(f"execute returned a {type(response).__name__}, must be an InferenceResponse")
        return response.output(self._wanted)

    def _arguments(self) -> dict[str, str]:
        config = json.loads(self.config)
        kinds = [group.get("kind") for group in config.get("instance_group", ())]
        gpus = gpu_count() if "KIND_GPU" in kinds else 0
        return {
            "model_config": self.config,
            "model_name": config["name"],
            "model_instance_name": f"{config['name']}_0_{self.worker_index}",  # the group of instances, and the instance
            "model_version": Path(self.path).parent.name,
            "model_repository": str(Path(self.path).parents[1]),
            "model_instance_kind": "GPU" if gpus else "CPU",
            "model_instance_device_id": str(self.worker_index % gpus) if gpus else "0",
        }


class _Call:
    """Requests of one form that `execute` gets at once."""

    def __init__(self, form: tuple[Any, ...], sent: "queue.SimpleQueue[_Sent]") -> None:
        self.requests: list[PbRequest] = []
        self.rows = 0
        self.form = form
        self.sent = sent


# What a model sends to a request: its index, a response or None, and whether it was the final one; or an error of `execute`.
_Sent = tuple[int, PbResponse | None, bool] | BaseException


class TritonDecoupled(TritonPython):
    """Runs a TritonPythonModel whose `execute` sends any number of responses to each request, also from threads of its own after it
    has returned.

    Batches come in several threads at the same time (worker_concurrency), and one thread calls `execute`. While it is busy, batches wait
    for it, and as many as fit into one go on together. The next call begins when `execute` has returned, whether it has sent all responses
    or not; an asynchronous one only needs to have begun to wait.
    """

    streaming = True
    owns_inputs = True  # its threads may read them when nobody waits for the responses any more

    def load(self) -> None:
        """Make the model, call its `initialize`, and start the thread that calls `execute`."""
        super().load()
        self._waiting: deque[_Call] = deque()
        self._ended = False
        self._changed = threading.Condition()
        self._executing = threading.Thread(target=self._execute_each, name="weir-execute", daemon=True)
        self._executing.start()

    def predict(self, batch: list[Any]) -> Generator[dict[int, Any], frozenset[int], None]:
        """Yield the responses to each request as they are sent."""
        left: frozenset[int] = frozenset()
        sent: queue.SimpleQueue[_Sent] = queue.SimpleQueue()
        calls: dict[tuple[Any, ...], _Call] = {}
        for index, arrays in enumerate(batch):
            form = shape_key(arrays, self.inputs)
            call = calls.setdefault(form, _Call(form, sent))
            call.requests.append(request := self._request(arrays))
            call.rows += 1 if self.unbatched else rows_of(arrays)
            request.sender = PbSender(index, lambda *each: sent.put(each), lambda index: index in left)
        with self._changed:
            self._waiting.extend(calls.values())
            self._changed.notify()
        open_requests = set(range(len(batch)))
        while open_requests:
            given = sent.get()
            if isinstance(given, BaseException):
                raise given
            index, response, final = given
            if final:
                open_requests.discard(index)
            if response is not None:
                output = self._output(response)
                left = yield {index: Last(output) if final and not isinstance(output, WeirError) else output}

    def unload(self) -> None:
        """End the thread that calls `execute`, and call the model's `finalize`."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._executing.join()
        super().unload()

    def _execute_each(self) -> None:
        while calls := self._next():
            self._begin([request for call in calls for request in call.requests], calls)

    def _next(self) -> list[_Call]:
        """Wait for calls, and return as many as fit into one batch; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            calls: list[_Call] = []
            rows = 0
            while self._waiting and (not calls or self._fits(self._waiting[0], calls[0], rows)):
                calls.append(self._waiting.popleft())
                rows += calls[-1].rows
            return calls

    def _fits(self, call: _Call, first: _Call, rows: int) -> bool:
        return call.form == first.form and rows + call.rows <= (self.max_batch_size or 1)

    def _begin(self, requests: list[PbRequest], calls: list[_Call]) -> None:
        """Call `execute`. If it raises, all requests that it got have failed."""

        def ended(error: BaseException | None) -> None:
            if error is not None:
                for call in calls:
                    call.sent.put(error)

        try:
            returned = self._model.execute(requests)
        except BaseException as error:
            ended(error)
        else:
            if hasattr(returned, "__await__"):
                self._event_loop().begin(returned).add_done_callback(lambda done: ended(done.result()[1]))


class _EventLoop:
    """Runs what asynchronous models await, in a thread of its own."""

    def __init__(self) -> None:
        import asyncio  # only models that use it load it

        self._run = asyncio.run_coroutine_threadsafe
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weir-loop", daemon=True)
        self._thread.start()

    def begin(self, awaitable: Awaitable[Any]) -> "Future[tuple[Any, BaseException | None]]":
        """Have `awaitable` run. The future has its result and None, or None and what it raised."""

        async def run() -> tuple[Any, BaseException | None]:
            try:
                return await awaitable, None
            except BaseException as error:  # SystemExit too, which would end this thread only
                return None, error

        return self._run(run(), self._loop)

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class TritonPythonPlatform:
    """The platform of models of Triton's Python backend, which the platform `python` turns to when it finds one."""

    def load(self, model: ModelToServe) -> type[Model]:
        """Return the class that runs the TritonPythonModel in the file that the target names. Raises SettingsError; see Platform."""
        return load_triton_model(model)


def load_triton_model(model: ModelToServe) -> type[Model]:
    """Return the class that runs the TritonPythonModel in the file that the target names. Raises SettingsError."""
    assert model.folder is not None, "a model of a repository has a folder: this is a bug"
    path = file_within(model.folder, model.target or PYTHON_FILE, model.label)
    source = f"{model.label}/{path.name}"
    config = _completed(model, path, _config_of(model.folder.parent / _FILE, model.name, in_snakes(model.config or {})))
    if _ENVIRONMENT in config.get("parameters", {}):
        raise SettingsError(
            f"{source}: {_FILE}: parameters: {_ENVIRONMENT}: models run in the server's environment: install there what it has, and "
            "remove the parameter"
        )
    own = translated({key: value for key, value in config.items() if key != "parameters"}, source)
    decoupled = bool(own.get("decoupled"))
    attributes: dict[str, Any] = {
        "path": str(path),
        "code": path.read_bytes(),
        "config": json.dumps(config),
        "plain_texts": False,
        **{key: own[key] for key in _SETTINGS if key in own},
    }
    batch = batch_dimension_of({"batch_dimension": own["batch_dimension"], "inputs": own["inputs"]}) or REQUIRED
    for key in ("inputs", "outputs"):
        if not own[key]:
            raise SettingsError(f"{source}: {_FILE} or auto_complete_config must declare {key}")
        attributes[key] = tuple(_tensor(table, own["batch_dimension"], f"{source}: {key}") for table in own[key])
    if batch == NONE:
        attributes["unbatched"] = "max_batch_size is 0"
    if (
        decoupled
        and model.settings.get("executor", "process") == "process"
        and model.settings.get("pipeline_depth", 1) == 1
    ):
        attributes["worker_concurrency"] = _CONCURRENCY
    return with_attributes(declared(TritonDecoupled if decoupled else TritonPython, attributes), model)


def _tensor(table: Mapping[str, Any], batch: str, source: str) -> Tensor:
    tensor = as_tensor({**table, "ragged": False}, batch, source)
    return tensor._replace(varying=RAGGED) if table.get("ragged") else tensor


def _config_of(file: Path, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in Triton's JSON form, with the fields that models rely on. `given` overrides what the file says."""
    read = read_pbtxt(file.read_text("utf-8-sig"), f"{name}/{_FILE}") if file.is_file() else {}
    config: dict[str, Any] = {"name": name, "platform": "", "backend": "python", "max_batch_size": 0, **read, **given}
    for key in _TABLES:
        config[key] = [{"format": "FORMAT_NONE", "dims": [], **each} for each in config.get(key, [])]
    return {"instance_group": [], **config}


def _completed(model: ModelToServe, path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration as the model's `auto_complete_config` leaves it, if it has one."""
    found = triton_class_in(path)
    if not any(getattr(each, "name", "") == "auto_complete_config" for each in getattr(found, "body", ())):
        return config
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH", ""))}
    return read_apart(
        "weir.catalog.adapters.triton_utils", [str(path), json.dumps(config)], f"{model.label}/{path.name}", environment
    )
