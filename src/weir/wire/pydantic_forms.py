"""Values of pydantic's types in the form in which they are written: by their declared type, with its aliases and serializers.

JSON and msgpack are then written by the one encoder of wire/values.py, so bytes, dates and numpy's values are written alike in all answers.
pydantic is not imported here: it is loaded already where a user's type is pydantic's.
"""

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

# The mode of pydantic's serializers in which bytes stay bytes; they can read it. In "json" they must be UTF-8.
MODE = "weir"

Leaf = Callable[[Any], Any]


class PydanticForms:
    """The forms of the values of one type, which has this `serializer` and core schema. `leaf` writes values that pydantic does not know."""

    def __init__(self, serializer: Any, core_schema: Any, leaf: Leaf) -> None:
        self._serializer = serializer
        self._leaf = leaf
        self._has_own_json = _has_own_json(core_schema)

    def form(self, value: Any, *, as_json: bool) -> Any:
        """Return what is written of `value`. Raises ValueError if a serializer does."""
        if as_json and self._has_own_json:
            return self._serializer.to_python(value, mode="json", by_alias=True, warnings=False, fallback=self._leaf)
        return self._serializer.to_python(value, mode=MODE, by_alias=True, warnings=False)


def forms_of(value: Any, leaf: Leaf) -> PydanticForms | None:
    """Return the forms of a `value` whose type nobody has declared: those of its class. None if it is not of pydantic."""
    kind: Any = type(value)
    return _forms_of_class(kind, leaf) if hasattr(kind, "__pydantic_core_schema__") else None


@lru_cache(maxsize=256)
def _forms_of_class(kind: Any, leaf: Leaf) -> PydanticForms:
    return PydanticForms(kind.__pydantic_serializer__, kind.__pydantic_core_schema__, leaf)


def leaf_of(value: Any) -> Any:
    """Return what is written of a value such as pydantic's SecretStr, Url or iterator; `value` itself if it is none of pydantic's."""
    if type(value).__module__.partition(".")[0] not in ("pydantic", "pydantic_core"):
        return value
    return sys.modules["pydantic_core"].to_jsonable_python(value, by_alias=True)


def _has_own_json(schema: Any) -> bool:
    """Return whether the type says how it is written as JSON only: by a serializer, or in its configuration."""
    if isinstance(schema, Mapping):
        if str(schema.get("when_used")).startswith("json") and str(schema.get("type")).startswith("function"):
            return True
        return any(str(key).startswith("ser_json_") or _has_own_json(part) for key, part in schema.items())
    return isinstance(schema, (list, tuple)) and any(map(_has_own_json, schema))


def mentions(schema: Any, key: str) -> bool:
    """Return whether a core schema has `key` anywhere."""
    if isinstance(schema, Mapping):
        return key in schema or any(mentions(part, key) for part in schema.values())
    return isinstance(schema, (list, tuple)) and any(mentions(part, key) for part in schema)
