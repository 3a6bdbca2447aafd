"""Models of MLServer: a folder with `model-settings.json`, whose `implementation` is a class of one of MLServer's runtimes or of the
user's own. The class runs in Weir's workers; the server reads only the settings.
"""

import json
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy

from weir.catalog.adapters.mlserver_huggingface import (
    PACKAGE,
    RUNTIMES,
    HuggingFacePipeline,
    is_served_here,
    runtime_settings,
)
from weir.catalog.repository.model_files import as_tensor, batch_dimension_of, with_attributes
from weir.catalog.sources import ModelReading, ModelToServe, Trust
from weir.catalog.targets import PLATFORMS
from weir.errors import InvalidRequest, ModelError, SettingsError
from weir.model import DATATYPES, REQUIRED, Model
from weir.wire.inference import Parameters
from weir.workers.source import declared

PLATFORM, FILE = "mlserver", "model-settings.json"
_PICKLED = tuple(ending for ending, platform in PLATFORMS.items() if platform == "sklearn" and ending != ".skops")
_MAX_BYTES = 1 << 20  # of the settings

NamedArray = tuple[str, str, Any, Parameters]  # name, datatype, array and parameters of a tensor


class MlserverModel(Model):
    """Runs the runtime that the settings in the file `path` name, for settings that declare its tensors; its `predict` gets one
    request for each batch."""

    path: ClassVar[str] = ""

    def load(self) -> None:
        """Make the runtime and await its `load`. Raises what it raises."""
        import asyncio  # MLServer's runtimes are asynchronous

        from mlserver.settings import ModelSettings

        settings = ModelSettings.parse_file(self.path)
        if settings.parameters is not None and settings.parameters.uri:
            uri = Path(self.path).parent / settings.parameters.uri
            settings.parameters.uri = str(uri) if uri.exists() else settings.parameters.uri
        self._loop = asyncio.new_event_loop()
        self._runtime = settings.implementation(settings)
        self._loop.run_until_complete(self._runtime.load())
        self._shapes = {tensor.name: tensor.shape for tensor in self.outputs}

    def predict(self, batch: Any) -> Any:
        """Return the runtime's outputs for a batch."""
        datatypes = {tensor.name: tensor.datatype for tensor in self.inputs}
        response = self._infer([(name, datatypes[name], array, {}) for name, array in batch.items()])
        rows = next(tensor.name for tensor in self.inputs if not tensor.optional)
        found = {output.name: self._array(output, len(batch[rows])) for output in response.outputs}
        return {name: array for name, array in found.items() if name in self._shapes}

    def unload(self) -> None:
        """Await the runtime's `unload`."""
        self._loop.run_until_complete(self._runtime.unload())
        self._loop.close()

    def _infer(self, inputs: Sequence[NamedArray], **more: Any) -> Any:
        """Return the runtime's response. Raises InvalidRequest for an error that is the caller's."""
        from mlserver.types import InferenceRequest, Parameters, RequestInput

        given = [
            RequestInput(
                name=name,
                datatype=datatype,
                shape=list(array.shape),
                data=array.ravel().tolist(),
                parameters=Parameters(**parameters) if parameters else None,
            )
            for name, datatype, array, parameters in inputs
        ]
        try:
            return self._loop.run_until_complete(self._runtime.predict(InferenceRequest(inputs=given, **more)))
        except Exception as error:
            status = getattr(error, "status_code", 0)
            if isinstance(status, int) and 400 <= status < 500:
                raise InvalidRequest(str(error)) from error
            raise

    def _array(self, output: Any, rows: int) -> Any:
        array = _array_of(output)
        shape = self._shapes.get(output.name, ())
        # MLServer gives a vector of answers the shape (rows, 1), whatever its settings say.
        is_column = list(output.shape) == [rows, 1] and len(shape) == 1
        return array.reshape((rows,) if is_column else output.shape)


class MlserverAny(MlserverModel):
    """Runs a runtime whose settings declare no tensors: an item is a whole request, an answer a whole response."""

    takes_requests = True

    def predict(self, batch: list[dict[str, Any]]) -> list[Any]:
        """Return the response to each request. The requests of a batch are alike and have rows, so they are joined for the runtime."""
        if len(batch) == 1:
            return [self._respond(batch[0])]
        counts = [len(item["inputs"][0][2]) for item in batch]
        columns = zip(*[item["inputs"] for item in batch], strict=True)
        inputs = [(*column[0][:2], numpy.concatenate([each[2] for each in column]), column[0][3]) for column in columns]
        whole = self._respond({**batch[0], "inputs": inputs})
        ends = list(accumulate(counts))
        for name, _, array, _ in whole["outputs"]:
            if len(array) != ends[-1]:
                raise ModelError(f"output {name!r}: has {len(array)} rows for {ends[-1]} of {len(batch)} requests")
        return [
            {**whole, "outputs": [(*head, array[end - count : end], more) for *head, array, more in whole["outputs"]]}
            for count, end in zip(counts, ends, strict=True)
        ]

    def _respond(self, item: dict[str, Any]) -> dict[str, Any]:
        from mlserver.types import Parameters, RequestOutput

        more: dict[str, Any] = {"id": item["id"] or None}
        if item["parameters"]:
            more["parameters"] = Parameters(**item["parameters"])
        if item["outputs"]:
            more["outputs"] = [
                RequestOutput(name=name, parameters=Parameters(**parameters) if parameters else None)
                for name, parameters in item["outputs"]
            ]
        response = self._infer(item["inputs"], **more)
        outputs = [(each.name, each.datatype, _shaped(each), _plain(each.parameters)) for each in response.outputs]
        return {"outputs": outputs, "parameters": _plain(response.parameters)}


def _array_of(output: Any) -> Any:
    data = output.data.root if hasattr(output.data, "root") else output.data
    if output.datatype != "BYTES":
        return numpy.asarray(data, DATATYPES[output.datatype])
    texts = [each.encode() if isinstance(each, str) else bytes(each) for each in data]
    array = numpy.empty(len(texts), object)
    array[:] = texts
    return array


def _shaped(output: Any) -> Any:
    """Return the array of an output. MLServer allows shapes that do not fit the data, as those that count the bytes of a text."""
    array = _array_of(output)
    return array.reshape(output.shape) if math.prod(output.shape) == array.size else array


def _plain(parameters: Any) -> dict[str, Any]:
    given = {} if parameters is None else parameters.model_dump(exclude_none=True)
    return {name: value for name, value in given.items() if isinstance(value, (str, int, float))}


class MlserverPlatform:
    """The platform `mlserver`."""

    def load(self, model: ModelToServe) -> type[Model]:
        """Return a class that runs the model's runtime. Raises SettingsError; see Platform."""
        assert model.folder is not None, "a model of a repository has a folder: this is a bug"
        if model.target in RUNTIMES:
            document = json.loads((model.folder / FILE).read_bytes())
            if is_served_here(document) or find_spec(PACKAGE) is None:
                return declared(HuggingFacePipeline, {"settings": runtime_settings(model, document)})
        if find_spec("mlserver") is None:
            raise SettingsError(
                f"{model.label}: {FILE}: MLServer is not installed (pip install mlserver, and the package of its runtime)"
            )
        attributes: dict[str, Any] = {"path": str(model.folder / FILE)}
        batch = batch_dimension_of(dict(model.attributes or {})) or REQUIRED
        for key in ("inputs", "outputs"):
            tables = (model.attributes or {}).get(key, ())
            attributes[key] = tuple(as_tensor(table, batch, f"{model.label}: {key}") for table in tables)
        if attributes["inputs"] and attributes["outputs"]:
            return with_attributes(declared(MlserverModel, attributes), model)
        return declared(MlserverAny, {"path": attributes["path"]})


def read_mlserver_model(folder: Path, name: str, complete: Any, trust: Trust) -> ModelReading:
    """Return the model that the settings in `folder` describe. `complete` adds the settings that hold for every model. Raises
    SettingsError."""
    file, source = folder / FILE, f"{name}/{FILE}"
    if file.stat().st_size > _MAX_BYTES:
        raise SettingsError(f"{source}: is larger than {_MAX_BYTES} bytes")
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{source}: must be JSON: {error}") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("implementation"), str):
        raise SettingsError(f"{source}: implementation: must name a class, such as mlserver_sklearn.SKLearnModel")
    if settings.get("name", name) != name:
        raise SettingsError(f"{source}: name={settings['name']!r}: must be unique and a valid model name")
    parameters = settings.get("parameters") or {}
    uri = str(parameters.get("uri") or "")
    if uri.endswith(_PICKLED) and not trust.pickles:
        raise SettingsError(
            f"{source}: uri={uri!r}: loading a pickle file can run arbitrary code; if you trust it, set --allow-pickle"
        )
    attributes = {
        key: tuple(_tensor(each, f"{source}: {key}") for each in settings.get(key) or ())
        for key in ("inputs", "outputs")
    }
    model = ModelToServe(
        settings["implementation"], name, {}, [], complete(_batching(settings, source)), version=str(parameters.get("version") or ""),
        platform=PLATFORM, folder=folder.resolve(), attributes=attributes, trust=trust,
    )  # fmt: skip
    return ModelReading([model])


def _tensor(table: Any, source: str) -> dict[str, Any]:
    known = ("name", "datatype", "shape", "parameters", "tags")
    if not (isinstance(table, dict) and all(key in table for key in known[:3]) and set(table) <= set(known)):
        raise SettingsError(f"{source}: {table!r:.80}: must have name, datatype and shape")
    if not (isinstance(table["shape"], list) and all(isinstance(length, int) for length in table["shape"])):
        raise SettingsError(f"{source}: shape={table['shape']!r:.80}: must be a list of whole numbers")
    return {key: table[key] for key in known[:3]}


def _batching(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return Weir's settings for adaptive batching; without it, requests run one by one, as with MLServer."""
    size, seconds = settings.get("max_batch_size", 0), settings.get("max_batch_time", 0.0)
    if not isinstance(size, int) or not isinstance(seconds, (int, float)) or size < 0 or seconds < 0:
        raise SettingsError(f"{source}: max_batch_size={size!r}, max_batch_time={seconds!r}: must be numbers from 0 on")
    if size <= 1 or not seconds:
        return {"max_batch_size": 1}
    return {
        "max_batch_size": size,
        "policy": f"size-or-delay:size={size},delay={float(seconds)}",
        "max_queue_delay": float(seconds),
    }
