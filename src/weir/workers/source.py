"""A model's code: how its class travels to a worker process, and which modules it sees there and in the server.

A class travels by name where it can be imported there, otherwise by value. Classes that only exist in this process, of a script or a notebook, are
pickled by cloudpickle, but for msgspec's structs, which cloudpickle takes apart without their fields.

The code of each model sees the modules of its own folder first, whatever else the process serves. Two models often have a module of the same name
(utils.py). The first keeps the name until the last model of its folder has ended; that of the other is imported under a name apart. The `import`
statements of a model's code, wherever it is and whenever they run, find the right one: Python looks `__import__` up among the builtins of the module in
which the statement is, and the modules of a model have their own.

So has `importlib.import_module`, as they see it. A library that finds modules by a text (joblib, say) gets in the server's process the module of the
model that has the name: the text does not say whose code asks. A pickle that would get another model's module is refused. In a worker process, which has
one model, all are right.
"""

import builtins
import fcntl
import gc
import importlib
import importlib.util
import inspect
import io
import os
import pickle
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from glob import glob
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import count
from tempfile import gettempdir, mkdtemp
from time import time
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize
from zlib import crc32

import msgspec

from weir.errors import SettingsError
from weir.model import ATTRIBUTES, Model, check_model, function_of

# Modules whose names no folder takes: the process has loaded many of them already.
_SHARED = sys.stdlib_module_names | {"weir"}

FOLDER = "__weir_folder__"  # the attribute of a module of a model: its ModelFolder

_PRIVATE = "weir-private-"  # private folders are called so
_AS_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

_NEW = 2.0  # seconds; compiled code knows its source by its size, and the second of its change

_lock = threading.RLock()
_folders: dict[str, "ModelFolder"] = {}
_claimed: dict[str, "ModelFolder"] = {}  # by the name of a module in sys.modules
_promised: set[str] = set()  # names of claimed modules that have not been in sys.modules yet
_loads = count(1)
_used: "WeakKeyDictionary[object, set[ModelFolder]]" = WeakKeyDictionary()  # by who uses them, as `hold` says


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
        self._added_path = False
        self.remove: Callable[[], object] = lambda: None  # its files
        # Modules that only this folder's code sees, by name.
        self.given: dict[str, types.ModuleType] = {"importlib": self._importlib()}
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
        paths = [found.origin] if found.origin else list(found.submodule_search_locations or ())
        if not self._prefix:
            present = sys.modules.get(top)
            if present is None and (top not in _promised or _claimed[top] is self):
                return top
            if present is not None and _path_of(present) in [os.path.normpath(path) for path in paths]:
                return top
        return f"{self._prefix}{top}_{crc32(paths[0].encode()):08x}"

    def put_on_path(self) -> None:
        """Have `sys.path` begin with this folder, until it is forgotten, for what loads modules by name, such as pickles."""
        if self.path not in sys.path:
            sys.path.insert(0, self.path)
            self._added_path = True

    def adopt(self, module: types.ModuleType) -> None:
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
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        if level:
            return builtins.__import__(name, globals, locals, fromlist, level)
        if name in self.given:
            return self.given[name]
        top, dot, rest = name.partition(".")
        if top in self.given and not fromlist:  # import importlib.util
            builtins.__import__(name, globals, locals, fromlist, 0)
            return self.given[top]
        own = self.name_of(top) + dot + rest
        found = builtins.__import__(own, globals, locals, fromlist, 0)
        # What is written in C (pickle) passes an empty list, ignores the result, and takes the module of that name.
        if (
            own != name
            and isinstance(fromlist, list)
            and not fromlist
            and sys.modules[own] is not sys.modules.get(name)
        ):
            raise ImportError(
                f"{name}: another model's module has this name in this process, so a pickle cannot name that of {self.path}: rename "
                "one, or read the pickle in the __init__ of a model with worker processes",
                name=name,
            )
        return found

    def _importlib(self) -> types.ModuleType:
        """Return `importlib` whose `import_module` finds what an import statement of this folder's code does."""
        seen = types.ModuleType("importlib", importlib.__doc__)
        vars(seen).update(vars(importlib), import_module=self._import_module, __getattr__=partial(getattr, importlib))
        return seen

    def _import_module(self, name: str, package: str | None = None) -> types.ModuleType:
        top, dot, rest = importlib.util.resolve_name(name, package).partition(".")
        return self.given.get(name) or importlib.import_module(self.name_of(top) + dot + rest)

    def lend_name(self, module: types.ModuleType) -> None:
        """Let what finds modules by name, such as a pickle, find `module` under the name that the code uses, unless a module
        of other files has that name."""
        top, dot, rest = module.__name__.partition(".")
        name = self._tops.get(top, top) + dot + rest
        with _lock:
            present = sys.modules.get(name)
            owner: ModelFolder | None = getattr(present, FOLDER, None)
            if present is None:
                owner = _claimed.get(name.partition(".")[0], self)  # it may be on its way
            elif owner is None or present.__name__ == name:
                return
            if owner.path == self.path:
                sys.modules[name] = module


def folder_of(path: str) -> ModelFolder:
    """Return the one ModelFolder of `path` whose modules have no prefix."""
    with _lock:
        return _folders.get(path) or _folders.setdefault(path, ModelFolder(path))


def loaded_apart(path: str, name: str) -> ModelFolder:
    """Return a new ModelFolder of `path`, for the module `name`: its modules are read again, and are no others' in any case."""
    importlib.invalidate_caches()
    return ModelFolder(path, f"{name}_{next(_loads)}_")


def folder_that_has(kind: type) -> ModelFolder | None:
    """Return the folder that a class was loaded from; None if that is not a model's."""
    folder: ModelFolder | None = getattr(kind, FOLDER, None) or getattr(sys.modules.get(kind.__module__), FOLDER, None)
    return folder


def private_folder() -> ModelFolder:
    """Return the ModelFolder of a new folder, which is removed when nobody holds it any more, or this process ends. Of a process that was killed, the next
    one removes it that makes another. A class that needs it has it as its FOLDER."""
    for path in glob(os.path.join(gettempdir(), f"{_PRIVATE}*")):
        with suppress(OSError):
            _remove_if_left(path)
    made = mkdtemp(prefix="weir-")
    lock = os.open(made, _AS_FOLDER)
    fcntl.flock(lock, fcntl.LOCK_SH)
    path = os.path.join(gettempdir(), f"{_PRIVATE}{os.path.basename(made)}")
    os.rename(made, path)  # not before it is locked: until then another process would take it for one that was left
    folder = ModelFolder(path)
    folder.remove = finalize(folder, _remove, path, lock, os.getpid())
    return folder


def _remove_if_left(path: str) -> None:
    """Remove a private folder of this user whose process has ended. Raises OSError if it is another's, or in use."""
    lock = os.open(path, _AS_FOLDER)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _remove(path: str, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process ends as well
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def hold(user: object, folders: Iterable[ModelFolder | None]) -> None:
    """Keep these folders until `user` releases them."""
    with _lock:
        _used[user] = {folder for folder in folders if folder is not None}


def release(user: object) -> None:
    """Forget the folders that `user` held and that nobody else does: the names of their modules are free again."""
    with _lock:
        for folder in _used.pop(user, ()):
            forget_unused(folder)


def forget_unused(folder: ModelFolder) -> None:
    """Forget `folder` unless somebody holds it."""
    with _lock:
        if not any(folder in folders for folders in _used.values()):
            forget(folder)


def forget(folder: ModelFolder) -> None:
    """Remove the modules of `folder` from the process, and let others have their names."""
    with _lock:
        folder.remove()
        if _folders.get(folder.path) is folder:
            del _folders[folder.path]
        if folder._added_path and folder.path in sys.path and folder.path != os.getcwd():
            sys.path.remove(folder.path)
        for name in [name for name, owner in _claimed.items() if owner is folder]:
            del _claimed[name]
            _promised.discard(name)
            for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                del sys.modules[each]
        for name, module in list(sys.modules.items()):  # what was read as another name
            if getattr(module, "__dict__", {}).get(FOLDER) is folder:
                del sys.modules[name]


@contextmanager
def reading(folder: ModelFolder | None) -> Iterator[None]:
    """Forget `folder` if what the block reads from it cannot be used, and nobody holds it."""
    try:
        yield
    except BaseException:
        if folder is not None:
            forget_unused(folder)
        raise


class _Loader(SourceFileLoader):
    """Gives a module the builtins of its folder, and the code that its file has now."""

    def __init__(self, name: str, path: str, folder: ModelFolder) -> None:
        super().__init__(name, path)
        self._folder = folder

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module's code."""
        _promised.discard(module.__name__)  # not before: until now another folder could have taken the name
        self._folder.adopt(module)
        super().exec_module(module)
        self._folder.lend_name(module)

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Return what tells whether compiled code is that of the file. Raises OSError, so that none is read or written, while the file is new:
        it may change once more within the second, at the same size, and nothing would tell."""
        stats = super().path_stats(path)
        if time() - stats["mtime"] < _NEW:
            raise OSError(f"{path}: too new to know its compiled code by its time")
        return stats


class _Finder:
    """Finds the modules that folders have claimed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of the module, if its folder has claimed it."""
        folder = _claimed.get(name.partition(".")[0])
        return None if folder is None else folder.find(name, path)


_finder: Any = _Finder


def _is_source(spec: ModuleSpec) -> bool:
    return isinstance(spec.loader, SourceFileLoader)


def _is_only_here(spec: ModuleSpec) -> bool:
    """Return whether a folder without an __init__.py, which any module precedes, is what its name means."""
    if spec.origin is not None or not spec.submodule_search_locations:
        return False
    with suppress(ImportError, ValueError):
        elsewhere = importlib.util.find_spec(spec.name)
        return elsewhere is None or elsewhere.origin is None
    return True


def _path_of(module: types.ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    if file is None:
        file = next(iter(getattr(module, "__path__", ())), None)
    return None if file is None else os.path.normpath(file)


# The attribute of a module that was loaded from a file: its code as it was then.
READ = "__weir_read__"
# The attribute of a class that `declared` has made: the class that it was given, and the attributes.
DECLARED = "__weir_declared__"
METHODS = (types.FunctionType, classmethod, staticmethod, property)
# The parts of a struct's configuration that `defstruct` takes under the same name.
OPTIONS = (
    "tag", "tag_field", "omit_defaults", "forbid_unknown_fields", "frozen", "eq", "order", "repr_omit_defaults",
    "array_like", "gc", "weakref", "dict", "cache_hash",
)  # fmt: skip


class Named(NamedTuple):
    """A class that can be imported: from `module` on the path, or else from `file` under that module's name.

    `text` is the module's code, whatever the file holds by now: a worker that replaces another runs the same code. `attributes`: see `declared`.
    `folder` is where it finds its other modules first.
    """

    module: str
    qualname: str
    file: str | None
    text: bytes | None = None
    attributes: dict[str, Any] | None = None
    folder: str | None = None


def declared(model: type[Model], attributes: dict[str, Any]) -> type[Model]:
    """Return a subclass of `model` with these attributes (inputs, examples, a path). It travels to a worker as `model` and the attributes."""
    names = {"__module__": model.__module__, "__qualname__": model.__qualname__, "__doc__": model.__doc__}
    return type(model.__name__, (model,), {**attributes, **names, DECLARED: (model, attributes)})


def parse_target(target: str) -> Named:
    """Parse `module:Class` or `path/file.py:Class`. Raises SettingsError for anything else."""
    where, colon, qualname = target.rpartition(":")
    if not (colon and where and qualname):
        raise SettingsError(f"{target!r}: a model is named as module:Class or path/file.py:Class")
    if where.endswith(".py"):
        return Named(os.path.basename(where).removesuffix(".py"), qualname, os.path.realpath(where))
    return Named(where, qualname, None)


def pack_source(model: type[Model] | str, params: dict[str, Any]) -> bytes:
    """Return model and parameters as bytes for `unpack_source` in another process. Raises what pickling them raises."""

    source = parse_target(model) if isinstance(model, str) else _named(model)
    packed = io.BytesIO()
    pickler(packed, lambda kind: _named(kind) is None).dump((source or model, params))
    return packed.getvalue()


def _named(model: type) -> Named | None:
    """Return how `model` can be imported; None if it only exists in this process, or its import would run a script again."""
    if DECLARED in vars(model):
        base, attributes = vars(model)[DECLARED]
        named = _named(base)
        return None if named is None else named._replace(attributes={**(named.attributes or {}), **attributes})
    module = sys.modules.get(model.__module__)
    if module is None or model.__module__ == "__main__":
        return None
    found = _attribute(module, model.__qualname__)
    if found is None or (found is not model and found is not function_of(model)):
        return None
    file, text = getattr(module, "__file__", None), getattr(module, READ, None)
    given = None if found is model else vars(model)[ATTRIBUTES] or None
    folder: ModelFolder | None = getattr(module, FOLDER, None)
    return Named(model.__module__, model.__qualname__, file, text, given, None if folder is None else folder.path)


def unpack_source(packed: bytes) -> tuple[type[Model], dict[str, Any]]:
    """Return the class and its parameters. Raises what importing its module raises; SettingsError if it is not a model."""
    main = sys.modules["__main__"]
    if not isinstance(main, _Script):  # else that of another model of this worker, from the same script
        main = sys.modules["__main__"] = _Script(main)
    source, params = pickle.loads(packed)  # noqa: S301 - from our own parent process
    if not isinstance(source, Named):
        main.lend_names()
        return check_model(source), params
    module = _imported(source)
    found = _attribute(module, source.qualname)
    if found is None:
        raise SettingsError(f"{source.module}:{source.qualname}: {module!r} has no such class")
    model = check_model(found)
    return check_model(model if source.attributes is None else declared(model, source.attributes)), params


def _imported(source: Named) -> types.ModuleType:
    """Import the module by name, unless that would find another file than the server's, or other code."""
    if source.folder is not None:
        sys.path.insert(0, source.folder)
    if source.text is not None and source.file is not None:
        return import_text(source.module, source.file, source.text)
    if source.file is None or _finds(source.module, source.file):
        return importlib.import_module(source.module)
    spec = importlib.util.spec_from_file_location(source.module, source.file)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{source.file}: cannot be imported as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.module] = module
    spec.loader.exec_module(module)
    return module


def import_text(name: str, file: str, text: bytes, folder: ModelFolder | None = None) -> types.ModuleType:
    """Run `text` as the module `name`, as if it was the content of `file`, which imports from `folder` first. Raises what the code raises; the
    module that had the name before is in its place again then."""
    parent, _, last = name.rpartition(".")
    if parent:
        importlib.import_module(parent)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise SettingsError(f"{file}: cannot be imported as a module")
    module, before = importlib.util.module_from_spec(spec), sys.modules.get(name)
    setattr(module, READ, text)
    if folder is not None:
        folder.adopt(module)
    sys.modules[name] = module
    try:
        # Not by the loader: its cache may hold older code that was written in the same second.
        exec(compile(text, file, "exec", dont_inherit=True), vars(module))  # noqa: S102 - the user's model
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


def _finds(name: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and (spec.origin == file or not file.endswith(".py"))


def _attribute(module: types.ModuleType, qualname: str) -> Any:
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


class _Script(types.ModuleType):
    """The module `__main__` of a worker while classes travel to it by value, which name the script that they come from."""

    def __init__(self, program: types.ModuleType) -> None:
        super().__init__("__main__")
        self._ours = set(map(id, vars(program).values()))  # of the worker's own program

    def lend_names(self) -> None:
        """Take the classes and functions that came by value, where pickle looks for them by name: the items and responses of a script may be of
        its own types."""
        for value in gc.get_objects():
            is_named = isinstance(value, (type, types.FunctionType)) and value.__module__ == "__main__"
            if is_named and id(value) not in self._ours:
                setattr(self, value.__name__, value)


def pickler(file: io.BytesIO, travels_by_value: Callable[[type], bool]) -> Any:
    """Return a pickler that writes to `file`, and by value the classes for which `travels_by_value` is true."""
    import cloudpickle  # slow to import, and only needed where processes are started

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type(msgspec.Struct)) and travels_by_value(obj):
                return make_struct, struct_parts(obj)
            return super().reducer_override(obj)

    return Pickler(file, 5)


def struct_parts(struct: type[msgspec.Struct]) -> tuple[Any, ...]:
    """Return the arguments from which `make_struct` makes the same struct again."""
    annotated = inspect.get_annotations(struct)  # its own, not inherited ones
    own = [field for field in msgspec.structs.fields(struct) if field.name in annotated]
    methods = {name: value for name, value in vars(struct).items() if isinstance(value, METHODS)}
    namespace = {name: value for name, value in methods.items() if name != "__annotate_func__"}  # Python 3.14 makes it
    options = {name: getattr(struct.__struct_config__, name) for name in OPTIONS}
    options["rename"] = {field.name: field.encode_name for field in own}
    options["kw_only"] = any(field.name not in struct.__match_args__ for field in own)
    fields = [(field.name, field.type, _default(field)) for field in own]
    return struct.__name__, struct.__qualname__, struct.__module__, fields, struct.__bases__, namespace, options


def make_struct(
    name: str,
    qualname: str,
    module: str,
    fields: list[tuple[str, Any, dict[str, Any]]],
    bases: tuple[type, ...],
    namespace: dict[str, Any],
    options: dict[str, Any],
) -> type[msgspec.Struct]:
    """Return the struct that `struct_parts` has taken apart."""
    declared = [(field, kind, msgspec.field(**default)) for field, kind, default in fields]
    struct = msgspec.defstruct(name, declared, bases=bases, module=module, namespace=namespace, **options)
    struct.__qualname__ = qualname
    return struct


def _default(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    if field.default is not msgspec.NODEFAULT:
        return {"default": field.default}
    if field.default_factory is not msgspec.NODEFAULT:
        return {"default_factory": field.default_factory}
    return {}
