"""Models of MLServer: a folder with `model-settings.json`, whose `implementation` is a class of one of MLServer's runtimes or of the
user's own. The class runs in Weir's workers; the server reads only the settings.
"""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy

from weir.catalog.repository.platforms import as_tensor, batch_dimension_of, with_attributes
from weir.catalog.sources import ModelReading, ModelToServe, Trust
from weir.catalog.targets import PLATFORMS
from weir.errors import InvalidRequest, SettingsError
from weir.model import DATATYPES, REQUIRED, Model
from weir.workers.source import declared

PLATFORM, FILE = "mlserver", "model-settings.json"
_PICKLED = tuple(ending for ending, platform in PLATFORMS.items() if platform == "sklearn" and ending != ".skops")
_MAX_BYTES = 1 << 20  # of the settings


class MlserverModel(Model):
    """Runs the runtime that the settings in the file `path` name; its `predict` gets one request for each batch."""

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
        self._rows = next(tensor.name for tensor in self.inputs if not tensor.optional)

    def predict(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the runtime's outputs for a batch."""
        from mlserver.types import InferenceRequest, RequestInput

        datatypes = {tensor.name: tensor.datatype for tensor in self.inputs}
        inputs = [
            RequestInput(name=name, datatype=datatypes[name], shape=list(array.shape), data=array.ravel().tolist())
            for name, array in batch.items()
        ]
        try:
            response = self._loop.run_until_complete(self._runtime.predict(InferenceRequest(inputs=inputs)))
        except Exception as error:
            status = getattr(error, "status_code", 0)
            if isinstance(status, int) and 400 <= status < 500:
                raise InvalidRequest(str(error)) from error
            raise
        found = {output.name: self._array(output, len(batch[self._rows])) for output in response.outputs}
        return {name: array for name, array in found.items() if name in self._shapes}

    def unload(self) -> None:
        """Await the runtime's `unload`."""
        self._loop.run_until_complete(self._runtime.unload())
        self._loop.close()

    def _array(self, output: Any, rows: int) -> Any:
        data = output.data.root if hasattr(output.data, "root") else output.data
        if output.datatype == "BYTES":
            texts = [each.encode() if isinstance(each, str) else bytes(each) for each in data]
            array = numpy.empty(len(texts), object)
            array[:] = texts
        else:
            array = numpy.asarray(data, DATATYPES[output.datatype])
        shape = self._shapes.get(output.name, ())
        # MLServer gives a vector of answers the shape (rows, 1), whatever its settings say.
        is_column = list(output.shape) == [rows, 1] and len(shape) == 1
        return array.reshape((rows,) if is_column else output.shape)


class MlserverPlatform:
    """The platform `mlserver`."""

    def load(self, model: ModelToServe) -> type[Model]:
        """Return a class that runs the model's runtime. Raises SettingsError; see Platform."""
        assert model.folder is not None, "a model of a repository has a folder: this is a bug"
        if find_spec("mlserver") is None:
            raise SettingsError(
                f"{model.label}: {FILE}: MLServer is not installed (pip install mlserver, and the package of its runtime)"
            )
        attributes: dict[str, Any] = {"path": str(model.folder / FILE)}
        batch = batch_dimension_of(dict(model.attributes or {})) or REQUIRED
        for key in ("inputs", "outputs"):
            tables = (model.attributes or {}).get(key, ())
            attributes[key] = tuple(as_tensor(table, batch, f"{model.label}: {key}") for table in tables)
        return with_attributes(declared(MlserverModel, attributes), model)


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
        raise SettingsError(f"{source}: name={settings['name']!r}: must be the name of the folder, {name!r}")
    parameters = settings.get("parameters") or {}
    uri = str(parameters.get("uri") or "")
    if uri.endswith(_PICKLED) and not trust.pickles:
        raise SettingsError(
            f"{source}: uri={uri!r}: loading a pickled file can run any code: --allow-pickle, if you trust its maker"
        )
    attributes = {
        key: tuple(_tensor(each, f"{source}: {key}") for each in settings.get(key) or ())
        for key in ("inputs", "outputs")
    }
    for key, tables in attributes.items():
        if not tables:
            raise SettingsError(
                f"{source}: {key}: must be declared, with name, datatype and shape: they are checked before a worker gets them"
            )
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
