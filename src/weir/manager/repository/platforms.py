"""What makes a class of the files of a version: `python`, `onnx`, or a platform that a package brings."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from weir.errors import SettingsError, WeirError
from weir.manager.service import Service
from weir.manager.spec import ModelToServe
from weir.model import Model

ENTRY_POINTS = "weir.platforms"
BUILT_IN = ("python", "onnx", "ensemble")


class Platform(Protocol):
    """Reads the files of one kind of model. Called in a thread; what it imports stays in the server's process."""

    def load(self, model: ModelToServe) -> type[Model] | type[Service]:
        """Return the class that serves `model`: its `folder` holds the version's files, `attributes` are what was said of its class.

        Read anew whenever it is called. Raises SettingsError naming what is wrong with the files.
        """


def platform_of(name: str) -> Platform:
    """Return the platform of that name. Raises SettingsError naming those there are."""
    if name == "python":
        from weir.manager.repository.python_platform import PythonPlatform

        return PythonPlatform()
    if name == "onnx":
        from weir.manager.repository.onnx_platform import OnnxPlatform

        return OnnxPlatform()
    if name == "ensemble":
        from weir.manager.repository.ensemble import EnsemblePlatform

        return EnsemblePlatform()
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join([*BUILT_IN, *sorted(found)])
        raise SettingsError(
            f"platform={name!r}: there is none of this name; there are {known} (entry points {ENTRY_POINTS})"
        )
    try:
        make: Any = found[name].load()
        platform: Platform = make()
    except WeirError:
        raise
    except Exception as error:
        raise SettingsError(f"platform={name!r}: {found[name].value}: {type(error).__name__}: {error}") from error
    return platform


def guess(folder: Path, source: str) -> str:
    """Return the platform of the files in `folder`. Raises SettingsError if nothing says what they are."""
    if (folder / "model.py").is_file():
        return "python"
    if any(folder.glob("*.onnx")):
        return "onnx"
    raise SettingsError(f"{source}: {folder.name}/ has neither model.py nor an .onnx file: say `platform` and `file`")
