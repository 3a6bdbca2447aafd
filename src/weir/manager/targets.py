"""Finds the class or function that a TARGET names: `module:Name` or `path/file.py:Name`."""

import importlib
import importlib.util
import linecache
import os
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

from weir.errors import SettingsError
from weir.manager.service import Service
from weir.model import Model, check_model
from weir.workers.source import Text, import_text

_FORM = "must be module:Class or path/file.py:Class"


def load_target(target: str, *, fresh: bool = False) -> type[Model] | type[Service]:
    """Import and return the Model or Service class that `target` names; of a function, the model made of it. With `fresh` its module is read anew if it is loaded
    already; not so those that it imports.

    Modules are looked for as `python -m` does, the working directory first; of a file, the folder that it is in (or
    that its package is in) joins sys.path, so that worker processes find the class under the same name.
    Raises SettingsError, one line that says what was looked for and where.
    """
    place, _, name = target.rpartition(":")
    if not (place and name):
        raise SettingsError(f"TARGET {target!r}: {_FORM}")
    before = set(sys.modules)
    module = _load_file(target, Path(place)) if place.endswith(".py") else _load_module(target, place)
    if fresh and module.__name__ in before and str(module.__file__).endswith(".py"):
        module = read_anew(target, module.__name__, Path(str(module.__file__)))
    return class_in(module, name, target)


def _load_file(target: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise SettingsError(f"TARGET {target!r}: no file {path.absolute()}")
    folder, parts = path.absolute().parent, [path.stem]
    while (folder / "__init__.py").is_file():  # a file of a package: it may import its neighbours relatively
        parts.insert(0, folder.name)
        folder = folder.parent
    _add_to_path(folder)
    module = _import(target, ".".join(parts))
    loaded_from = getattr(module, "__file__", None)
    if loaded_from is not None and os.path.samefile(loaded_from, path):
        return module
    if len(parts) > 1:
        raise SettingsError(
            f"TARGET {target!r}: its name is taken by module {module.__name__!r} of "
            f"{loaded_from or 'the interpreter'}; the names of packages must differ"
        )
    return _import_apart(target, path.resolve())


def _import_apart(target: str, path: Path) -> ModuleType:
    """Import a file whose name another module has: in a model repository every file is called the same."""
    name = f"{path.stem}_{crc32(bytes(path)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SettingsError(f"TARGET {target!r}: {path} cannot be imported as a module")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise SettingsError(f"TARGET {target!r}: importing {path} raised {_describe(error)}") from error
    return module


def _load_module(target: str, name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    if not all(part.isidentifier() for part in name.split(".")):
        raise SettingsError(f"TARGET {target!r}: {_FORM}; {name!r} is neither a module's name nor a .py file")
    for depth, part in enumerate(parts := name.split(".")):
        if _is_missing(".".join(parts[: depth + 1]), target):
            where = f"package {'.'.join(parts[:depth])!r}" if depth else f"{Path.cwd()} or on sys.path"
            raise SettingsError(f"TARGET {target!r}: no module {part!r} in {where}{_similar_file(part, depth)}")
    return _import(target, name)


def read_anew(target: str, name: str, path: Path, folder: str | None = None) -> ModuleType:
    """Read the code at `path` and let it be the module `name`. Classes of the one before live on with whoever has them.

    `folder`: where workers look for the modules that it imports first. Raises SettingsError; the module before stays then.
    """
    try:
        text = Text(path.read_bytes(), folder)
    except OSError as error:
        raise SettingsError(f"TARGET {target!r}: {path} cannot be read: {error.strerror}") from error
    linecache.checkcache(str(path))
    try:
        return import_text(name, str(path), text)
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:
        raise SettingsError(f"TARGET {target!r}: importing {path} raised {_describe(error)}") from error


def _is_missing(name: str, target: str) -> bool:
    if name in sys.modules:
        return False
    parent = name.rpartition(".")[0]
    if parent:
        _import(target, parent)
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        return True


def _similar_file(name: str, depth: int) -> str:
    names = [path.stem for path in Path.cwd().glob("*.py")] if depth == 0 else []
    nearest = get_close_matches(name, names, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _import(target: str, name: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except SettingsError:
        raise
    except (Exception, SystemExit) as error:
        raise SettingsError(f"TARGET {target!r}: importing {name} raised {_describe(error)}") from error


def _describe(error: BaseException) -> str:
    """Return the error and the line of the user's code that raised it, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):
        return text
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    inside = [frame for frame in frames if frame.filename != __file__]
    return f"{text} ({inside[-1].filename}, line {inside[-1].lineno})" if inside else text


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def class_in(module: ModuleType, name: str, target: str) -> type[Model] | type[Service]:
    """Return the class `name` of `module`. Raises SettingsError naming those there are if it is no usable model."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            where = getattr(module, "__file__", None) or module.__name__
            raise SettingsError(f"TARGET {target!r}: {where} has no {name!r}{_candidates_text(module, name)}")
    if isinstance(found, type) and issubclass(found, Service):
        check_model(found.model)
        return found
    if not (callable(found) if not isinstance(found, type) else issubclass(found, Model)):
        what = f"a {type(found).__name__}" if not isinstance(found, type) else "a class"
        raise SettingsError(
            f"TARGET {target!r}: {name} is {what}, but must be a subclass of weir.Model or weir.Service, or a function"
            f"{_candidates_text(module, name)}"
        )
    return check_model(found)


def _candidates_text(module: ModuleType, name: str) -> str:
    """Say which models the module has, the one most like `name` first."""
    names = [
        own for own, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, (Model, Service)) and value.__module__ == module.__name__
    ]  # fmt: skip
    if not names:
        return "; it defines no model"
    nearest = get_close_matches(name, names, n=1)
    names.sort(key=lambda own: own not in nearest)
    return f"; its models: {', '.join(names)}"
