"""Pickles classes that only exist in this process, of a script or a notebook: what cloudpickle does, and msgspec's
structs, which it takes apart without their fields."""

import io
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import msgspec

METHODS = (types.FunctionType, classmethod, staticmethod, property)
# Of a struct's configuration, what `defstruct` takes under the same name.
OPTIONS = (
    "tag", "tag_field", "omit_defaults", "forbid_unknown_fields", "frozen", "eq", "order", "repr_omit_defaults",
    "array_like", "gc", "weakref", "dict", "cache_hash",
)  # fmt: skip


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
    """Pickles by value the classes for which `travels_by_value` is true."""

    def __init__(self, file: io.BytesIO, travels_by_value: Callable[[type], bool]) -> None:
        super().__init__(file, 5)
        self._travels_by_value = travels_by_value

    def reducer_override(self, obj: Any) -> Any:
        """Say how to make a struct again; cloudpickle knows everything else."""
        if isinstance(obj, type(msgspec.Struct)) and self._travels_by_value(obj):
            return make_struct, struct_parts(obj)
        return super().reducer_override(obj)


def struct_parts(struct: type[msgspec.Struct]) -> tuple[Any, ...]:
    """Return what `make_struct` makes the same struct of: name, own fields, bases, namespace, options."""
    annotated = vars(struct).get("__annotations__", {})
    own = [field for field in msgspec.structs.fields(struct) if field.name in annotated]
    namespace = {name: value for name, value in vars(struct).items() if isinstance(value, METHODS)}
    options = {name: getattr(struct.__struct_config__, name) for name in OPTIONS}
    options["rename"] = {field.name: field.encode_name for field in own}
    options["kw_only"] = any(field.name not in struct.__match_args__ for field in own)
    fields = [(field.name, field.type, _default(field)) for field in own]
    return struct.__name__, struct.__qualname__, struct.__module__, fields, struct.__bases__, namespace, options


def make_struct(
    name: str, qualname: str, module: str, fields: list[tuple[str, Any, dict[str, Any]]], bases: tuple[type, ...],
    namespace: dict[str, Any], options: dict[str, Any],
) -> type[msgspec.Struct]:  # fmt: skip
    """Return the struct again."""
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
