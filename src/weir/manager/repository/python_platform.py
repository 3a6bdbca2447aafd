"""Models that are Python classes, in a file of their version's folder or in an installed module."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from weir.errors import SettingsError
from weir.manager.repository.paths import file_within
from weir.manager.repository.tensors import with_attributes
from weir.manager.service import Service
from weir.manager.spec import ModelToServe
from weir.manager.targets import class_in, load_target, read_anew
from weir.model import Model, overrides

FILE = "model.py"


class PythonPlatform:
    """See Platform."""

    def load(self, model: ModelToServe) -> type[Model] | type[Service]:
        """Return the class that the target names, or the only model of the file."""
        assert model.folder is not None, "a model of a repository has a folder: this is a bug"
        place, _, name = model.target.rpartition(":") if ":" in model.target else (model.target, "", "")
        if name and not place.endswith(".py"):
            found = load_target(model.target, fresh=True)
        else:
            path = file_within(model.folder, place or FILE, model.label)
            module = _read(model, path)
            found = class_in(module, name, model.target) if name else _only_model(module, model.label)
        return found if issubclass(found, Service) else with_attributes(found, model)


def _read(model: ModelToServe, path: Path) -> ModuleType:
    name = "weir_model_" + re.sub(r"\W", "_", f"{model.name}_{model.version}")
    with _neighbours(path.parent):
        return read_anew(f"{model.label}/{path.name}", name, path, str(path.parent))


@contextmanager
def _neighbours(folder: Path) -> Iterator[None]:
    """Let what is imported in the block find the modules of `folder`, and forget them afterwards: those of another version
    may have the same names."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            file: Any = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).is_relative_to(folder) and not name.startswith("weir_model_"):
                del sys.modules[name]


def _only_model(module: ModuleType, source: str) -> type[Model]:
    models = [
        each for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Model) and each.__module__ == module.__name__
        and overrides(each, "predict")
    ]  # fmt: skip
    if len(models) != 1:
        names = ", ".join(model.__name__ for model in models) or "none"
        raise SettingsError(f"{source}: {module.__file__} defines the models {names}: name one of them (target)")
    return models[0]
