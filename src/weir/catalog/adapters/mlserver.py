"""Models of MLServer: a folder with `model-settings.json`, whose `implementation` is a class of one of MLServer's runtimes or of the
user's own. The class runs in Weir's workers; the server reads only the settings.

MLServer's runtime of Hugging Face runs without its package, for tasks of texts: its settings and its codecs, around a pipeline of
transformers. The package needs TensorFlow and, as of 1.7.1, a version of transformers from before 4.42.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy

from weir.catalog.repository.model_files import (
    as_tensor,
    batch_dimension_of,
    config_bytes,
    json_object,
    need,
    with_attributes,
)
from weir.catalog.repository.transformers_model import FILL_MASK, GENERATION, LOADING, pad_left, plain
from weir.catalog.sources import PLATFORMS, ModelReading, ModelToServe, Trust
from weir.errors import InvalidRequest, ModelError, SettingsError, brief
from weir.model import DATATYPES, REQUIRED, Model
from weir.wire.inference import Parameters
from weir.workers.source import declared

PACKAGE = "mlserver_huggingface"
RUNTIMES = (f"{PACKAGE}.HuggingFaceRuntime", f"{PACKAGE}.runtime.HuggingFaceRuntime")
_VARIABLE = "MLSERVER_MODEL_HUGGINGFACE_"  # environment variables begin so
# Only tasks of texts: a text that a caller sends to another one would be a path or an address for the server to open.
TASKS = (
    "text-classification", "sentiment-analysis", "token-classification", "ner", FILL_MASK, GENERATION, "feature-extraction",
    "zero-shot-classification", "question-answering", "summarization", "translation", "text2text-generation",
)  # fmt: skip

# Inputs with the texts themselves; "args" are in their order what the pipeline is called with.
_TEXTS = ("array_inputs", "inputs", "text_inputs", "sequences")
# What else a caller may say to a pipeline. It is a list because pipelines pass on what they do not know, and some of that downloads code.
_OPTIONS = frozenset((
    "question", "context", "candidate_labels", "hypothesis_template", "multi_label", "top_k", "function_to_apply", "targets",
    "aggregation_strategy", "ignore_labels", "stride", "doc_stride", "max_answer_len", "max_seq_len", "max_question_len",
    "handle_impossible_answer", "align_to_words", "src_lang", "tgt_lang", "prefix", "return_full_text", "handle_long_generation",
    "clean_up_tokenization_spaces", "stop_sequence", "truncation", "padding", "max_length", "max_new_tokens", "min_length",
    "min_new_tokens", "do_sample", "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "early_stopping", "num_beams", "num_return_sequences",
))  # fmt: skip
# The largest value of those that multiply the memory of a request, or are a length that texts may be filled up to.
_MOST = MappingProxyType({"num_beams": 64, "num_return_sequences": 64, "max_length": 1 << 17, "max_seq_len": 1 << 17})


class _PipelineCall(NamedTuple):
    """The arguments with which one request calls the pipeline."""

    args: list[Any]
    options: dict[str, Any]

    @property
    def texts(self) -> list[str] | None:
        """The texts, if they are all that the pipeline gets besides options."""
        if len(self.args) != 1 or not self.args[0]:
            return None
        texts: list[str] = self.args[0] if isinstance(self.args[0], list) else self.args
        return texts if all(isinstance(text, str) for text in texts) else None


class HuggingFacePipeline(Model):
    """Responds as MLServer's HuggingFaceRuntime does; an item is a whole request, as MlserverAny gets it. `settings` are those that
    `runtime_settings` returns."""

    takes_requests = True
    settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def load(self) -> None:
        """Make the pipeline; a model of the hub is downloaded once."""
        import torch

        found = self.settings
        for key, apply in (
            ("inter_op_threads", torch.set_num_interop_threads),
            ("intra_op_threads", torch.set_num_threads),
        ):
            if found[key] is not None:
                apply(int(found[key]))
        more: dict[str, Any] = {}
        if found["optimum_model"]:
            from optimum.pipelines import pipeline

            more["accelerator"] = "ort"
        else:
            from transformers import pipeline
        more["device"] = self.torch_device(found["device"])
        more["model_kwargs"] = dict(found["model_kwargs"] or {})
        with LOADING:
            self._pipeline = pipeline(found["task"], model=found["model"], tokenizer=found["tokenizer"], **more)
        self._batch_size = found["batch_size"]
        if found["task"] == GENERATION:
            pad_left(self._pipeline.tokenizer)
        if self._pipeline.tokenizer.pad_token_id is None:  # then texts of different lengths fit into no batch
            self._batch_size = 1

    def preprocess(self, item: dict[str, Any]) -> _PipelineCall:
        """Return what the pipeline is called with. Raises InvalidRequest for what it may not be called with."""
        given = {name: _decoded(name, array, parameters) for name, _, array, parameters in item["inputs"]}
        args = given.pop("args", [])
        args = args if isinstance(args, list) else [args]
        for name in _TEXTS:
            if name in given and (name == "array_inputs" or not args):
                args = [given.pop(name), *args]
        for name, value in given.items():
            if name not in _OPTIONS:
                rule = f"input {name!r}: must be args, {', '.join(_TEXTS)}, or one of {', '.join(sorted(_OPTIONS))}"
                raise InvalidRequest(rule)
            most = _MOST.get(name)
            if most is not None and not (isinstance(value, int) and 0 < value <= most):
                raise InvalidRequest(
                    f"input {name!r}: {brief(value, 60)}: must be a whole number from 1 to {most}, of content_type raw"
                )
        return _PipelineCall(args, given)

    def predict(self, batch: list[_PipelineCall]) -> list[Any]:
        """Return the response to each request. Requests of texts with the same options are answered together."""
        texts = [call.texts for call in batch]
        joined = [text for each in texts for text in each or ()]
        if len(batch) > 1 and all(texts) and all(call.options == batch[0].options for call in batch):
            results = self._pipeline(joined, batch_size=self._batch_size, **batch[0].options)
            ends = numpy.cumsum([len(each or ()) for each in texts]).tolist()
            return [
                _response(self._as_alone(call, results[end - len(each or ()) : end]))
                for call, each, end in zip(batch, texts, ends, strict=True)
            ]
        return [_response(self._pipeline(*call.args, batch_size=self._batch_size, **call.options)) for call in batch]

    def _as_alone(self, call: _PipelineCall, results: list[Any]) -> Any:
        """Return what the pipeline returns for `call`, whose texts have these `results` in a list of texts."""
        takes_out = self.settings["task"] == FILL_MASK and len(results) == 1
        return results[0] if takes_out or isinstance(call.args[0], str) else results


def _decoded(name: str, array: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the value of an input by its content type. Raises InvalidRequest."""
    kind = parameters.get("content_type") or "str"
    try:
        values = [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]
        if kind == "str":
            return values
        if kind == "raw":
            return values[0]
        if kind == "hg_json":
            return json.loads(values[0])
        if kind == "hg_jsonlist":
            return [json.loads(each) for each in values]
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise InvalidRequest(f"input {name!r}: is not of content_type {kind}: {error}") from error
    raise InvalidRequest(f"input {name!r}: content_type={brief(kind, 60)}: must be str, raw, hg_json or hg_jsonlist")


def _response(prediction: Any) -> dict[str, Any]:
    found = prediction if isinstance(prediction, list) else [prediction]
    array = numpy.empty((len(found), 1), object)
    array[:, 0] = [json.dumps(plain(each)).encode() for each in found]
    return {"outputs": [("output", "BYTES", array, {"content_type": "hg_jsonlist"})], "parameters": {}}


def is_served_here(document: Mapping[str, Any]) -> bool:
    """Return whether `document`, the content of model-settings.json, describes what HuggingFacePipeline does."""
    extra = (document.get("parameters") or {}).get("extra")
    return (
        isinstance(extra, Mapping) and _setting(extra, "task") in TASKS and _setting(extra, "framework") in (None, "pt")
    )


def runtime_settings(model: ModelToServe, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the runtime that `document` describes. Raises SettingsError, also if this is not served here."""
    parameters = document.get("parameters") or {}
    extra = parameters.get("extra") or {}
    label = f"{model.label}: parameters.extra"
    if not isinstance(extra, Mapping):
        raise SettingsError(f"{label}={brief(extra)}: must be an object")

    setting = partial(_setting, extra)
    task = setting("task")
    if task not in TASKS:
        raise SettingsError(
            f"{label}: task={brief(task)}: must be one of {', '.join(TASKS)}; for others, install the package mlserver-huggingface"
        )
    if (framework := setting("framework")) not in (None, "pt"):
        rule = f"{label}: framework={brief(framework)}: must be pt; for tf, install the package mlserver-huggingface"
        raise SettingsError(rule)
    optimum = str(setting("optimum_model")).lower() in ("true", "1")
    if optimum and find_spec("optimum") is None:
        raise SettingsError(f"{label}: optimum_model: optimum is not installed (pip install 'optimum[onnxruntime]')")
    for library in ("torch", "transformers"):
        need(library, "transformers", model)
    source = setting("pretrained_model") or parameters.get("uri")
    return {
        "task": task + (setting("task_suffix") or "" if task == "translation" else ""),
        "model": _located(source, model),
        "tokenizer": _located(setting("pretrained_tokenizer") or source, model),
        "model_kwargs": setting("model_kwargs"),
        "optimum_model": optimum,
        "device": _device(setting("device")),
        "batch_size": max(1, document.get("max_batch_size") or 1),
        **{key: setting(key) for key in ("inter_op_threads", "intra_op_threads")},
    }


def _setting(extra: Mapping[str, Any], key: str) -> Any:
    return extra[key] if key in extra else os.environ.get(_VARIABLE + key.upper())


def _located(source: str | None, model: ModelToServe) -> str | None:
    """Return the path of `source` if it is a folder of the model, else `source`: the hub's name of a model, or another path."""
    if source is None or model.folder is None:
        return source
    path = model.folder / Path(source).expanduser()
    return str(path) if path.is_dir() else source


def _device(wanted: Any) -> str:
    """Return the name of a device that MLServer's settings give as a name, or as the number of a GPU: -1 and none are the CPU."""
    if wanted is None or str(wanted) == "-1":
        return "cpu"
    return f"cuda:{wanted}" if str(wanted).isdigit() else str(wanted)


PLATFORM, FILE = "mlserver", "model-settings.json"
_PICKLED = tuple(ending for ending, platform in PLATFORMS.items() if platform == "sklearn" and ending != ".skops")

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
        # MLServer gives a vector of results the shape (rows, 1), whatever its settings say.
        is_column = list(output.shape) == [rows, 1] and len(shape) == 1
        return array.reshape((rows,) if is_column else output.shape)


class MlserverAny(MlserverModel):
    """Runs a runtime whose settings declare no tensors: an item is a whole request, a response a whole response."""

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
    settings = json_object(config_bytes(file, source), source)
    if not isinstance(settings.get("implementation"), str):
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
