"""Stands in for the package `torchserve` where it is not installed: the modules `ts...` that handlers import, as far as its examples need them.

TorchServe's handlers for texts, explanations and torch.compile need the package itself. torch is imported in workers only.
"""

import base64
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from importlib import import_module
from inspect import getmembers, isclass
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def list_classes_from_module(module: ModuleType, parent_class: type | None = None) -> list[type]:
    """Return the classes that `module` itself defines, those derived from `parent_class` if it is given."""
    own = [each for _, each in getmembers(module, isclass) if each.__module__ == module.__name__]
    return [each for each in own if parent_class is None or issubclass(each, parent_class)]


def load_label_mapping(mapping_file_path: str) -> dict[str, str] | None:
    """Return the names of classes by number, as text; None without the file."""
    if not os.path.isfile(mapping_file_path):
        return None
    with open(mapping_file_path) as file:
        mapping = json.load(file)
    if isinstance(mapping, dict) and isinstance(mapping.get("object_type_names"), list):
        mapping = dict(enumerate(mapping["object_type_names"]))
    if not isinstance(mapping, dict):
        raise ValueError(f"{mapping_file_path}: must map numbers of classes to names")
    named = {str(number): name[-1] if isinstance(name, list) else name for number, name in mapping.items()}
    if not all(isinstance(name, str) for name in named.values()):
        raise ValueError(f"{mapping_file_path}: the name of a class must be a text, or a list of texts")
    return named


def map_class_to_label(
    probs: list[Any], mapping: dict[str, str] | None = None, lbl_classes: Iterable[Any] | None = None
) -> list[dict[str, Any]]:
    """Return the values of each row by the name of their class; by its number, without a `mapping`."""
    classes = itertools.repeat(range(len(probs[0])) if probs else ()) if lbl_classes is None else lbl_classes
    return [
        {
            str(number) if mapping is None else mapping[str(number)]: value
            for number, value in zip(numbers, row, strict=False)
        }
        for numbers, row in zip(classes, probs, strict=False)
    ]


class PredictionException(Exception):
    """Ends the requests of a batch with a status of the handler's choice."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code


def timed(function: F) -> F:
    """Return `function`: Weir measures batches itself."""
    return function


class Dimension(NamedTuple):
    """A label of a metric."""

    name: str
    value: str


class Context:
    """What a handler is told of its model, and of the requests of the present batch: `requests` are their ids and headers."""

    def __init__(
        self, model_name: str, system_properties: dict[str, Any], manifest: Any, metrics: Any, config: Any
    ) -> None:
        self.model_name = model_name
        self.system_properties = system_properties
        self.manifest = manifest
        self.metrics = metrics
        self.model_yaml_config = config
        self.begin(())

    def begin(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Begin a batch of these requests."""
        self.request_ids = {index: name for index, (name, _) in enumerate(requests)}
        self._headers = [headers for _, headers in requests]
        self._responses: list[dict[str, str]] = [{} for _ in requests]
        self._statuses: list[tuple[int, str]] = [(200, "") for _ in requests]

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return the id of a request."""
        return self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> Any:
        """Return a header of a request."""
        return self._headers[idx].get(key)

    def get_all_request_header(self, idx: int) -> dict[str, Any]:
        """Return all headers of a request."""
        return self._headers[idx]

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Set a header of a response."""
        self._responses[idx][key.lower()] = value

    def get_response_headers(self, idx: int) -> dict[str, str]:
        """Return the headers of a response."""
        return self._responses[idx]

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the content type of a response."""
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        """Return the content type of a response."""
        return self._responses[idx].get("content-type")

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status of a response."""
        self._statuses[idx] = code, phrase

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Set the status of all responses."""
        self._statuses = [(code, phrase) for _ in self._statuses]

    def get_response_status(self, idx: int) -> tuple[int, str]:
        """Return the status of a response, and its phrase."""
        return self._statuses[idx]


class BaseHandler:
    """Loads a network of torch (its class and weights, or TorchScript) or an ONNX file, and passes batches through it."""

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.initialized = False
        self.context: Any = None
        self.manifest: Any = None
        self.model_pt_path: str | None = None
        self.map_location: str | None = None
        self.model_yaml_config: Any = None

    def initialize(self, context: Any) -> None:
        """Load the network that the manifest names. Raises RuntimeError if it names none."""
        import torch

        properties, self.manifest, self.model_yaml_config = (
            context.system_properties,
            context.manifest,
            context.model_yaml_config,
        )
        gpu = properties.get("gpu_id") if torch.cuda.is_available() else None
        self.map_location = "cpu" if gpu is None else "cuda"
        self.device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        folder, described = properties["model_dir"], self.manifest["model"]
        if described.get("serializedFile"):
            self.model_pt_path = os.path.join(folder, described["serializedFile"])
        path = self.model_pt_path or ""
        if described.get("modelFile"):
            self.model = self._load_pickled_model(folder, described["modelFile"], self.model_pt_path)
            self.model.to(self.device)
            self.model.eval()
        elif path.endswith(".pt"):
            self.model = self._load_torchscript_model(path)
            self.model.eval()
        elif path.endswith(".onnx"):
            import onnxruntime

            self.model = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        else:
            raise RuntimeError(f"serializedFile={path!r}: must be a .pt or .onnx file, or there must be a modelFile")
        self.mapping = load_label_mapping(os.path.join(folder, "index_to_name.json"))
        self.initialized = True

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        import torch

        return torch.jit.load(model_pt_path, map_location=self.device)

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        import torch

        classes = list_classes_from_module(import_module(model_file.partition(".")[0]))
        if len(classes) != 1:
            raise ValueError(
                f"{model_file}: must define one class, the network; has {[each.__name__ for each in classes]}"
            )
        network: Any = classes[0]()
        if model_pt_path:
            network.load_state_dict(torch.load(model_pt_path, map_location=self.device))
        return network

    def preprocess(self, data: Any) -> Any:
        """Return the requests as one tensor."""
        import torch

        return torch.as_tensor(data, device=self.device)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the network makes of a batch."""
        import torch

        with torch.inference_mode():
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

    for_imagenet = True

    @cached_property
    def image_processing(self) -> Any:
        """Make a tensor of an image; networks for ImageNet get the middle of it, in normal colours."""
        transforms: Any = import_module("torchvision.transforms")
        if not self.for_imagenet:
            return transforms.Compose([transforms.ToTensor()])
        normal = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        return transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normal])

    def preprocess(self, data: list[dict[str, Any]]) -> Any:
        """Return the images as one tensor: files, also in base64, or nested lists."""
        import torch
        from PIL import Image

        images = []
        for row in data:
            image = row.get("data") or row.get("body")
            if isinstance(image, str):
                image = base64.b64decode(image)
            if isinstance(image, (bytes, bytearray)):
                images.append(self.image_processing(Image.open(io.BytesIO(image))))
            else:
                images.append(torch.FloatTensor(image))
        return torch.stack(images).to(self.device)


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
        import torch

        values, classes = torch.topk(torch.nn.functional.softmax(data, dim=1), self.topk, dim=1)
        return map_class_to_label(values.tolist(), self.mapping, classes.tolist())


class ImageSegmenter(VisionHandler):
    """Returns the most probable class of each pixel, and its probability."""

    def postprocess(self, data: Any) -> Any:
        """Return a class and a probability for each pixel."""
        import torch

        best = torch.max(torch.nn.functional.softmax(data["out"], dim=1), dim=1)
        return torch.stack([best.indices.type(best.values.dtype), best.values], dim=3).tolist()


class ObjectDetector(VisionHandler):
    """Returns the boxes of the objects in an image whose scores reach `threshold`."""

    threshold = 0.5
    for_imagenet = False

    def postprocess(self, data: Any) -> Any:
        """Return a list of boxes by class, with their scores, for each image."""
        found = []
        for row in data:
            kept = row["scores"] >= self.threshold
            columns = [row[key][kept].tolist() for key in ("labels", "boxes", "scores")]
            found.append(
                [
                    {**map_class_to_label([[box]], self.mapping, [[label]])[0], "score": score}
                    for label, box, score in zip(*columns, strict=True)
                ]
            )
        return found


HANDLERS = {
    "base_handler": BaseHandler,
    "vision_handler": VisionHandler,
    "image_classifier": ImageClassifier,
    "image_segmenter": ImageSegmenter,
    "object_detector": ObjectDetector,
}
_CONTENT: dict[str, tuple[Any, ...]] = {
    "ts": (),
    "ts.context": (Context,),
    "ts.handler_utils": (),
    "ts.handler_utils.timer": (timed,),
    "ts.metrics": (),
    "ts.metrics.dimension": (Dimension,),
    "ts.torch_handler": (),
    "ts.utils": (),
    "ts.utils.util": (PredictionException, list_classes_from_module, load_label_mapping, map_class_to_label),
    **{f"ts.torch_handler.{name}": (handler,) for name, handler in HANDLERS.items()},
}


def install() -> None:
    """Have `import ts...` find these modules in this process."""
    for name, content in _CONTENT.items():
        module = sys.modules[name] = ModuleType(name, __doc__)
        module.__path__ = []
        for each in content:
            each.__module__ = name  # so that a module of a handler has this class as its own
            setattr(module, each.__name__, each)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
