"""What the graphs need that may not be installed."""

from importlib.util import find_spec
from types import ModuleType

from weir.errors import SettingsError


def require(package: str) -> None:
    """Raise SettingsError naming the extra if a package is not installed, without loading it."""
    if find_spec(package) is None:
        raise SettingsError(f"{package} is missing: pip install 'weir-serving[embed]'")


def onnx() -> ModuleType:
    """Return the package onnx. Raises SettingsError naming the extra where it is missing."""
    require("onnx")
    import onnx as package

    return package
