"""Lets the code of each model see the modules of its own folder first, whatever else the process serves.

Two models often have a module of the same name (utils.py). The first keeps the name; that of the other is imported under a name apart. The
`import` statements of a model's code, wherever it is and whenever they run, find the right one: Python looks `__import__` up among the builtins of
the module in which the statement is, and the modules of a model have their own.
"""

import builtins
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import invalidate_caches
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

# Modules whose names no folder takes: the process has loaded many of them already.
_SHARED = sys.stdlib_module_names | {"weir"}

FOLDER = "__weir_folder__"  # the attribute of a module of a model: its ModelFolder

_lock = threading.RLock()
_folders: dict[str, "ModelFolder"] = {}
_claimed: dict[str, "ModelFolder"] = {}  # by the name of a module in sys.modules
_promised: set[str] = set()  # names of claimed modules that have not been in sys.modules yet
_loads = count(1)


class ModelFolder:
    """A folder with a model's code.

    Arguments:
        path: the folder.
        prefix: begins the names of all its modules, which are then apart in any case.
    """

    def __init__(self, path: str, prefix: str = "") -> None:
        self.path = path
        self._prefix = prefix
        self._names: dict[str, str] = {}  # by the name that the code uses: that in sys.modules
        self._tops: dict[str, str] = {}  # the other way round
        self._foreign: set[str] = set()  # names that are not of this folder
        self.given: dict[str, ModuleType] = {}  # modules that only this folder's code sees, by name
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)

    def name_of(self, top: str, *, is_own: bool = False) -> str:
        """Return the name in sys.modules of what this folder's code calls `top`. `is_own` says that it lies in this folder, whatever its name."""
        if (name := self._names.get(top)) is not None and _claimed.get(name) is self:
            return name
        if not is_own and (top in self._foreign or top in _SHARED):
            return top
        found = PathFinder.find_spec(top, [self.path])
        if found is None or not (_is_source(found) or _is_only_here(found)):
            if top in sys.modules:  # found elsewhere: this will not change
                self._foreign.add(top)
            return top
        with _lock:
            name = self._names[top] = self._chosen(top, found)
            self._tops[name] = top
            _claimed[name] = self
            if name not in sys.modules:
                _promised.add(name)
        return name

    def _chosen(self, top: str, found: ModuleSpec) -> str:
        places = [found.origin] if found.origin else list(found.submodule_search_locations or ())
        if not self._prefix:
            present = sys.modules.get(top)
            if present is None and (top not in _promised or _claimed[top] is self):
                return top
            if present is not None and _place_of(present) in places:
                return top
        return f"{self._prefix}{top}_{crc32(places[0].encode()):08x}"

    def adopt(self, module: ModuleType) -> None:
        """Have the code that is going to run as `module` import from this folder first."""
        vars(module).update({"__builtins__": self.builtins, FOLDER: self})

    def find(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        """Return the spec of a module of this folder, whose name in sys.modules is `name`."""
        if path is None:
            found = PathFinder.find_spec(self._tops[name], [self.path])
        else:
            found = PathFinder.find_spec(name, path)
        if found is None or not (path is None or _is_source(found)):
            return found
        _promised.discard(name)
        places = found.submodule_search_locations
        if places is not None:
            places = list(places)  # that of a package without an __init__.py would grow with sys.path
        if found.origin is None:  # a package without an __init__.py
            spec = ModuleSpec(name, None, is_package=True)
        else:
            spec = ModuleSpec(
                name, _Loader(name, found.origin, self), origin=found.origin, is_package=places is not None
            )
            spec.has_location = True
        spec.submodule_search_locations = places
        return spec

    def _import(
        self, name: str, globals: Mapping[str, object] | None = None, locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (), level: int = 0,
    ) -> ModuleType:  # fmt: skip
        if level:
            return builtins.__import__(name, globals, locals, fromlist, level)
        if name in self.given:
            return self.given[name]
        top, dot, rest = name.partition(".")
        return builtins.__import__(self.name_of(top) + dot + rest, globals, locals, fromlist, 0)


def folder_of(path: str) -> ModelFolder:
    """Return the one ModelFolder of `path` whose modules have no prefix."""
    with _lock:
        return _folders.get(path) or _folders.setdefault(path, ModelFolder(path))


def loaded_apart(path: str, name: str) -> ModelFolder:
    """Return a new ModelFolder of `path`, for the module `name`: its modules are read again, and are no others' in any case."""
    invalidate_caches()
    return ModelFolder(path, f"{name}_{next(_loads)}_")


def forget(folder: ModelFolder) -> None:
    """Remove the modules of `folder` from the process, as far as nobody uses them."""
    with _lock:
        for name in folder._names.values():
            _claimed.pop(name, None)
            for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                del sys.modules[each]


class _Loader(SourceFileLoader):
    """Gives a module the builtins of its folder."""

    def __init__(self, name: str, path: str, folder: ModelFolder) -> None:
        super().__init__(name, path)
        self._folder = folder

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        self._folder.adopt(module)
        super().exec_module(module)


class _Finder:
    """Finds the modules that folders have claimed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the module, if its folder has claimed it."""
        folder = _claimed.get(name.partition(".")[0])
        return None if folder is None else folder.find(name, path)


_finder: Any = _Finder


def _is_source(spec: ModuleSpec) -> bool:
    return isinstance(spec.loader, SourceFileLoader)


def _is_only_here(spec: ModuleSpec) -> bool:
    """Tell whether a folder without an __init__.py, which any module precedes, is what its name means."""
    if spec.origin is not None or not spec.submodule_search_locations:
        return False
    with suppress(ImportError, ValueError):
        elsewhere = find_spec(spec.name)
        return elsewhere is None or elsewhere.origin is None
    return True


def _place_of(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    if file is None:
        return next(iter(getattr(module, "__path__", ())), None)
    return str(Path(file))
