"""Stands in for the package `torchserve` where it is not installed: the modules `ts...` that handlers import, as far as its examples need them.

TorchServe's handlers for texts, explanations and torch.compile need the package itself. torch is imported in workers only.
"""

import base64
import io
import json
import os
import sys
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from inspect import getmembers, isclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast


def list_classes_from_module(module: ModuleType, parent_class: type = object) -> list[type]:
    """Return the classes that `module` itself defines and that are derived from `parent_class`."""
    own = [each for _, each in getmembers(module, isclass) if each.__module__ == module.__name__]
    return [each for each in own if issubclass(each, parent_class or object)]


def load_label_mapping(mapping_file_path: str) -> dict[str, Any] | None:
    """Return the names of classes by number, as text; None without the file."""
    if not os.path.isfile(mapping_file_path):
        return None
    mapping = json.loads(Path(mapping_file_path).read_bytes())
    if "object_type_names" in mapping:
        mapping = dict(enumerate(mapping["object_type_names"]))
    return {str(number): name[-1] if isinstance(name, list) else name for number, name in mapping.items()}


def map_class_to_label(probs: list[Any], mapping: Any = None, lbl_classes: Any = None) -> list[dict[str, Any]]:
    """Return the values of each row by the name of their class; by its number, without a `mapping`."""
    classes = (range(len(row)) for row in probs) if lbl_classes is None else lbl_classes
    pairs = (zip(numbers, row, strict=False) for numbers, row in zip(classes, probs, strict=False))
    return [{(mapping or {}).get(str(number), str(number)): value for number, value in each} for each in pairs]


class PredictionException(Exception):
    """Ends the requests of a batch with a status of the handler's choice."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message, self.error_code = message, error_code


def timed(function: Any) -> Any:
    """Return `function`: Weir measures batches itself."""
    return function


class Dimension(NamedTuple):
    """A label of a metric."""

    name: str
    value: str


class Row(NamedTuple):
    """A request as a handler gets it: an id, headers, and a value for each part of the body."""

    id: str
    headers: dict[str, Any]
    values: dict[str, Any]


class Context:
    """What a handler is told of its model, and of the requests of the present batch."""

    def __init__(self, model_name: str, properties: dict[str, Any], manifest: Any, metrics: Any, config: Any) -> None:
        self.model_name, self.system_properties, self.manifest = model_name, properties, manifest
        self.metrics, self.model_yaml_config = metrics, config
        self.begin(())

    def begin(self, rows: Sequence[Row]) -> None:
        """Begin a batch of these requests."""
        self._rows = rows
        self.request_ids = {index: row.id for index, row in enumerate(rows)}
        self._responses: list[dict[str, str]] = [{} for _ in rows]
        self.set_all_response_status()

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return the id of a request."""
        return self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> Any:
        """Return a header of a request."""
        return self._rows[idx].headers.get(key)

    def get_all_request_header(self, idx: int) -> dict[str, Any]:
        """Return all headers of a request."""
        return self._rows[idx].headers

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Set a header of a response."""
        self._responses[idx][key.lower()] = value

    def get_response_headers(self, idx: int) -> dict[str, str]:
        """Return the headers of a response."""
        return self._responses[idx]

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the content type of a response."""
        self.set_response_header(idx, "content-type", value)

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status of a response."""
        self._statuses[idx] = code, phrase

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Set the status of all responses."""
        self._statuses = [(code, phrase)] * len(self._rows)

    def get_response_status(self, idx: int) -> tuple[int, str]:
        """Return the status of a response, and its phrase."""
        return self._statuses[idx]


class BaseHandler:
    """Loads a network of torch (its class and weights, or TorchScript) or an ONNX file, and passes batches through it."""

    torch: Any = cached_property(lambda self: import_module("torch"))  # only handlers that use it load it

    model = mapping = device = context = manifest = model_pt_path = map_location = model_yaml_config = cast(Any, None)
    initialized = False

    def initialize(self, context: Any) -> None:
        """Load the network that the manifest names. Raises RuntimeError if it names none."""
        self.manifest, self.model_yaml_config = context.manifest, context.model_yaml_config
        gpu = context.system_properties.get("gpu_id") if self.torch.cuda.is_available() else None
        self.map_location = "cpu" if gpu is None else "cuda"
        self.device = self.torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        folder, described = context.system_properties["model_dir"], self.manifest["model"]
        if described.get("serializedFile"):
            self.model_pt_path = os.path.join(folder, described["serializedFile"])
        path = self.model_pt_path or ""
        if described.get("modelFile"):
            self.model = self._load_pickled_model(folder, described["modelFile"], self.model_pt_path).to(self.device)
        elif path.endswith(".pt"):
            self.model = self._load_torchscript_model(path)
        elif path.endswith(".onnx"):
            self.model = import_module("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
        else:
            raise RuntimeError(f"serializedFile={path!r}: must be a .pt or .onnx file, or there must be a modelFile")
        if hasattr(self.model, "eval"):
            self.model.eval()
        self.mapping = load_label_mapping(os.path.join(folder, "index_to_name.json"))
        self.initialized = True

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        return self.torch.jit.load(model_pt_path, map_location=self.device)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        classes = list_classes_from_module(import_module(model_file.partition(".")[0]))
        if len(classes) != 1:
            there = [each.__name__ for each in classes]
            raise ValueError(f"{model_file}: must define one class, the network; has {there}")
        network: Any = classes[0]()
        if model_pt_path:
            network.load_state_dict(self.torch.load(model_pt_path, map_location=self.device))
        return network

    def preprocess(self, data: Any) -> Any:
        """Return the requests as one tensor."""
        return self.torch.as_tensor(data, device=self.device)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the network makes of a batch."""
        with self.torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def postprocess(self, data: Any) -> Any:
        """Return a list with a result for each request."""
        return data.tolist()

    def handle(self, data: Any, context: Any) -> Any:
        """Return the results for the requests of a batch."""
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))

    def get_device(self) -> Any:
        """Return the device of the network."""
        return self.device


class VisionHandler(BaseHandler):
    """Passes images through a network. `image_processing` makes a tensor of an image; derived classes may have their own."""

    @cached_property
    def image_processing(self) -> Any:
        """Make a tensor of the middle of an image, in normal colours, as networks for ImageNet get it."""
        tv = import_module("torchvision.transforms")
        normal = tv.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        return tv.Compose([tv.Resize(256), tv.CenterCrop(224), tv.ToTensor(), normal])

    def preprocess(self, data: list[dict[str, Any]]) -> Any:
        """Return the images as one tensor: files, also in base64, or nested lists."""
        from PIL import Image

        images = []
        for row in data:
            image: Any = row.get("data") or row.get("body")
            if isinstance(image, str):
                image = base64.b64decode(image)
            is_file = isinstance(image, (bytes, bytearray))
            images.append(
                self.image_processing(Image.open(io.BytesIO(image))) if is_file else self.torch.FloatTensor(image)
            )
        return self.torch.stack(images).to(self.device)


class ImageClassifier(VisionHandler):
    """Returns the most probable classes of an image."""

    topk = 5

    def set_max_result_classes(self, topk: int) -> None:
        """Return so many classes from now on."""
        self.topk = topk

    def get_max_result_classes(self) -> int:
        """Return how many classes are returned."""
        return self.topk

    def postprocess(self, data: Any) -> Any:
        """Return the probabilities by class."""
        values, classes = self.torch.topk(self.torch.nn.functional.softmax(data, dim=1), self.topk, dim=1)
        return map_class_to_label(values.tolist(), self.mapping, classes.tolist())


class ImageSegmenter(VisionHandler):
    """Returns the most probable class of each pixel, and its probability."""

    def postprocess(self, data: Any) -> Any:
        """Return a class and a probability for each pixel."""
        best = self.torch.max(self.torch.nn.functional.softmax(data["out"], dim=1), dim=1)
        return self.torch.stack([best.indices.type(best.values.dtype), best.values], dim=3).tolist()


class ObjectDetector(VisionHandler):
    """Returns the boxes of the objects in an image whose scores reach `threshold`."""

    threshold = 0.5
    image_processing: Any = cached_property(lambda self: import_module("torchvision.transforms").ToTensor())

    def postprocess(self, data: Any) -> Any:
        """Return a list of boxes by class, with their scores, for each image."""
        found = []
        for row in data:
            kept = (row[key][row["scores"] >= self.threshold].tolist() for key in ("labels", "boxes", "scores"))
            objects = zip(*kept, strict=True)
            named = [(map_class_to_label([[box]], self.mapping, [[label]]), score) for label, box, score in objects]
            found.append([{**classes, "score": score} for (classes,), score in named])
        return found


CONTENT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("ts", "ts.handler_utils", "ts.metrics", "ts.torch_handler", "ts.utils"), ()),
    "ts.context": (Context,),
    "ts.handler_utils.timer": (timed,),
    "ts.metrics.dimension": (Dimension,),
    "ts.torch_handler.base_handler": (BaseHandler,),
    "ts.torch_handler.image_classifier": (ImageClassifier,),
    "ts.torch_handler.image_segmenter": (ImageSegmenter,),
    "ts.torch_handler.object_detector": (ObjectDetector,),
    "ts.torch_handler.vision_handler": (VisionHandler,),
    "ts.utils.util": (PredictionException, list_classes_from_module, load_label_mapping, map_class_to_label),
}


def install() -> None:
    """Have `import ts...` find these modules in this process."""
    for name, content in CONTENT.items():
        module = sys.modules[name] = ModuleType(name, __doc__)
        module.__path__ = []
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent or name], last, module)
        for each in content:
            each.__module__ = name  # so that a module of a handler has this class as its own
            setattr(module, each.__name__, each)
