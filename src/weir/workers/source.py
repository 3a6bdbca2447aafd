"""How a model class travels to a worker process: by name where it can be imported there, otherwise by value.

Classes that only exist in this process, of a script or a notebook, are pickled by cloudpickle, but for msgspec's structs, which cloudpickle
takes apart without their fields.
"""

import gc
import importlib
import importlib.util
import io
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weir.errors import SettingsError
from weir.model import ATTRIBUTES, Model, check_model, function_of
from weir.workers.imports import FOLDER, ModelFolder

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
        return Named(Path(where).stem, qualname, str(Path(where).resolve()))
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
    """Return the class and its parameters. Raises what importing its module raises; SettingsError if it is no model."""
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
        """Take the classes and functions that came by value, where pickle looks for them by name: the items and answers of a script may be of
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
    annotated = vars(struct).get("__annotations__", {})
    own = [field for field in msgspec.structs.fields(struct) if field.name in annotated]
    namespace = {name: value for name, value in vars(struct).items() if isinstance(value, METHODS)}
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
