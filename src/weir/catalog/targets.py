"""What a TARGET names: a class or a function in Python code, a file of a model, or a model of Hugging Face and its task. And the platforms, which
make a class of it."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from weir.catalog.sources import ModelToServe, Trust
from weir.errors import SettingsError
from weir.model import Model
from weir.plugins import Plugins

if TYPE_CHECKING:
    from weir.serving.service import Service  # loads much more than what names a model needs

FORMS = "module:Class or path/file.py:Class"
ALL_FORMS = (
    f"{FORMS}, a function in their place, a file .onnx, .skops, .joblib or .pkl, hf:TASK=MODEL, or a folder of models"
)
HUGGING_FACE = "hf:"

# The platforms of models that are one file, by the end of the file's name.
PLATFORMS: Mapping[str, str] = MappingProxyType(
    {".onnx": "onnx", ".skops": "sklearn", ".joblib": "sklearn", ".pkl": "sklearn", ".pickle": "sklearn"}
)


def platform_of_target(target: str) -> str:
    """Return the name of the platform that reads what `target` names; see platforms.py."""
    if target.startswith(HUGGING_FACE):
        return "transformers"
    return PLATFORMS.get(Path(target).suffix.lower(), "python")


def target_of(model: Any) -> str:
    """Return `model` if it is a target, else a target that names this class or function."""
    if isinstance(model, str):
        return model
    name = getattr(model, "__qualname__", type(model).__qualname__)
    return f"{getattr(model, '__module__', None)}:{name.replace('<lambda>', 'function')}"


def default_name(target: str) -> str:
    """Return the default name of a model: that of its class in lower case, of its file without the ending, or of its task.

    Raises SettingsError for an empty `target`, and for a task without a model.
    """
    if not target.strip():
        raise SettingsError(f"TARGET {target!r}: must be {ALL_FORMS}")
    platform = platform_of_target(target)
    if platform == "transformers":
        return task_and_model(target)[0]
    return Path(target).stem if platform != "python" else target.rpartition(":")[2].rpartition(".")[2].lower()


def task_and_model(target: str) -> tuple[str, str]:
    """Return the task and the model of `hf:TASK=MODEL`. Raises SettingsError."""
    task, _, model = target.removeprefix(HUGGING_FACE).partition("=")
    if not (task and model):
        raise SettingsError(
            f"TARGET {target!r}: must be hf:TASK=MODEL, such as "
            "hf:text-classification=distilbert/distilbert-base-uncased-finetuned-sst-2-english"
        )
    return task, model


def located(model: ModelToServe) -> ModelToServe:
    """Return `model` with the folder and the name of its file, if its target is a file. Raises SettingsError if there is no such
    file."""
    if model.folder is not None or model.platform not in PLATFORMS.values() or not model.target:
        return model
    path = Path(model.target).absolute()
    if not path.is_file():
        raise SettingsError(f"TARGET {model.target!r}: no file {path}")
    return model._replace(target=path.name, folder=path.parent)


def model_to_load(target: str, trust: Trust | None = None) -> ModelToServe | None:
    """Return the description of the model that `target` names if it is not Python code. Raises SettingsError."""
    platform = platform_of_target(target)
    if platform == "python":
        return None
    return located(ModelToServe(target, default_name(target), {}, [], {}, platform=platform, trust=trust or Trust()))


class Platform(Protocol):
    """Reads the files of one kind of model. It is called in a thread; what it imports stays in the server's process."""

    def load(self, model: ModelToServe) -> "type[Model] | type[Service]":
        """Return the class that serves `model`.

        `model.folder` holds the version's files; `model.attributes` are the attributes that its configuration gives the class.
        Each call reads the files again. Raises SettingsError that says what is wrong with them.
        """


_PLUGINS = Plugins(
    "platform",
    "weir.platforms",
    {
        "python": "weir.catalog.repository.platforms:PythonPlatform",
        "onnx": "weir.catalog.repository.onnx:OnnxPlatform",
        "sklearn": "weir.catalog.repository.platforms:SklearnPlatform",
        "transformers": "weir.catalog.repository.platforms:TransformersPlatform",
        "triton_python": "weir.catalog.adapters.triton_python:TritonPythonPlatform",
        "mlserver": "weir.catalog.adapters.mlserver:MlserverPlatform",
        "ensemble": "weir.catalog.repository.platforms:EnsemblePlatform",
    },
)


def platform_of(name: str) -> Platform:
    """Return the platform of that name. Raises SettingsError, which names the known platforms."""
    platform: Platform = _PLUGINS.make(name)
    return platform
