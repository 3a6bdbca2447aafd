"""Declare a setting once: its type, default, help and rule.

Each part of Weir has one frozen dataclass of settings. Flags, TOML keys and `WEIR_` variables are derived from it
(settings.py); nothing is stated a second time.
"""

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from weir.errors import SettingsError, brief

Rule = tuple[Callable[[Any], bool], str]

POSITIVE: Rule = (lambda value: value > 0, "must be greater than 0")
AT_LEAST_ZERO: Rule = (lambda value: value >= 0, "must be 0 or more")
SHARE: Rule = (lambda value: 0 <= value <= 1, "must be from 0 to 1")
AT_LEAST_ONE: Rule = (lambda value: value >= 1, "must be 1 or more")
ROWS: Rule = (lambda value: 1 <= value < 1 << 31, "must be 1 or more, and at most 2147483647")


def one_of(*values: Any) -> Rule:
    """The rule that a setting is one of `values`."""
    return (lambda value: value in values, "must be one of " + ", ".join(map(str, values)))


def setting(
    default: Any, help: str, *, rule: Rule | None = None, metavar: str | None = None, secret: bool = False
) -> Any:
    """Declare one setting of a dataclass. None always passes `rule`: it means "not set". What is `secret` is never shown."""
    metadata = {"help": help, "rule": rule, "metavar": metavar, "secret": secret}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


def check(settings: Any) -> None:
    """Hold every field of `settings` against its type, then its rule; for `__post_init__`.

    Raises SettingsError naming the first key, value and rule that disagree.
    """
    for declared in fields(settings):
        rule, value = declared.metadata.get("rule"), getattr(settings, declared.name)
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise SettingsError(f"{declared.name}={brief(value)}: must be a number of at most 64 bits")
        if value is None:
            continue
        if not _fits(declared.type, value):
            raise SettingsError(f"{declared.name}={value!r}: must be {name_of(declared.type)}")
        if rule is not None and not rule[0](value):
            raise SettingsError(f"{declared.name}={value!r}: {rule[1]}")


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def name_of(hint: Any) -> str:
    """Return what a value of the type `hint` is called in an error: "a whole number", "a list, each element text"."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    if get_origin(hint) is list:
        return f"a list, each element {name_of(kinds[0])}"
    return "a table" if get_origin(hint) is dict else _KINDS.get(kinds[0], str(kinds[0]))


def _fits(hint: Any, value: Any) -> bool:
    """Tell whether `value` is of the type that a setting declares. A number of numpy's is a number, a path is text."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(each, value) for each in inner)
    if origin is list:
        return isinstance(value, (list, tuple)) and all(_fits(inner[0], each) for each in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(
            _fits(inner[0], key) and _fits(inner[1], own) for key, own in value.items()
        )
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, (str, PathLike))
    return isinstance(value, bool) if hint is bool else True
