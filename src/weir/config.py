"""Declares settings, each with its type, default, help and rule; and reads their values from text or TOML.

Each part of Weir has one frozen dataclass of settings, from which settings.py derives flags, TOML keys and `WEIR_` variables. A text
is one value. A flag of a list is given once per element; a variable has all elements, separated by spaces or as JSON.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec

from weir.errors import SettingsError, brief

# From version 1.29 onnxruntime reports its use over the network, unless this is set before it is loaded.
SILENCE = {"ORT_DISABLE_TELEMETRY": "1"}

Rule = tuple[Callable[[Any], bool], str]  # tells whether a value is valid; the text for errors

POSITIVE: Rule = (lambda value: value > 0, "must be greater than 0")
AT_LEAST_ZERO: Rule = (lambda value: value >= 0, "must be 0 or more")
SHARE: Rule = (lambda value: 0 <= value <= 1, "must be from 0 to 1")
AT_LEAST_ONE: Rule = (lambda value: value >= 1, "must be 1 or more")
ROWS: Rule = (lambda value: 1 <= value < 1 << 31, "must be 1 or more, and at most 2147483647")


def one_of(*values: Any) -> Rule:
    """Return the rule that a setting must be one of `values`."""
    return (lambda value: value in values, "must be one of " + ", ".join(map(str, values)))


def setting(
    default: Any,
    help: str,
    *,
    rule: Rule | None = None,
    metavar: str | None = None,
    secret: bool = False,
    guards: bool = False,
    may_be_empty: bool = False,
    affects_speed: bool = True,
) -> Any:
    """Declare a setting as the field of a dataclass.

    Arguments:
        default: the default; None means "not set", and always satisfies `rule`.
        help: the text for `--help` and the documentation.
        rule: what a value must satisfy besides its type.
        metavar: the placeholder of the value in `--help`.
        secret: whether the value must never be shown.
        guards: whether a server without it is open to more callers. An empty variable is refused then, and means "not set" otherwise.
        may_be_empty: whether an empty text is a value.
        affects_speed: whether a model may be faster or slower with another value, so that it is measured again, see `that_affect_speed`.
    """
    rule = rule if may_be_empty else _not_empty(rule)
    metadata = {
        "help": help,
        "rule": rule,
        "metavar": metavar,
        "secret": secret,
        "guards": guards,
        "speed": affects_speed,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


def _not_empty(rule: Rule | None) -> Rule:
    """Return `rule` for values that an empty text, which no file, address or name can be, is not among."""
    if rule is None:
        return (lambda value: value != "", "must not be empty")
    return (lambda value: value != "" and rule[0](value), rule[1])


def check(settings: Any) -> None:
    """Check every field of `settings` against its type and its rule; call this in `__post_init__`.

    Raises SettingsError naming the first wrong key, its value and the rule.
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


@dataclass(frozen=True)
class Checked:
    """Base class of settings whose fields are checked, see `check`."""

    def __post_init__(self) -> None:
        check(self)


def that_affect_speed(settings: Checked) -> dict[str, Any]:
    """Return the values by name of the settings that affect how fast a model is."""
    return {each.name: getattr(settings, each.name) for each in fields(settings) if each.metadata["speed"]}


def stated_settings(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `values` that the dataclass of settings `kind` declares."""
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def name_of(hint: Any) -> str:
    """Return the name of a type for errors: "a whole number", "a list, each element text"."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    if get_origin(hint) is list:
        return f"a list, each element {name_of(kinds[0])}"
    return "a table" if get_origin(hint) is dict else _KINDS.get(kinds[0], str(kinds[0]))


def _fits(hint: Any, value: Any) -> bool:
    """Return whether `value` has the type that a setting declares. Numbers of numpy count as numbers, and paths as text."""
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


_NUMBERS = re.compile(r"(-?[0-9]{1,9})(?:-([0-9]{1,9}))?")


def from_texts(hint: Any, texts: Sequence[str], source: str) -> Any:
    """Return the value of a flag that was given with `texts`; `source` is the name of the flag.

    Raises SettingsError naming the source, the text and the rule, also for a value that is given twice.
    """
    if hint == list[dict[str, str]]:
        return _environments([_pair(text, source) for text in texts])
    if get_origin(hint) is dict:
        if len(texts) == 1 and texts[0].lstrip().startswith("{"):
            return from_text(hint, texts[0], source)
        return _params([_pair(text, source) for text in texts], source)
    if hint == list[int]:
        return [number for text in texts for number in _numbers(text, source)]
    if get_origin(hint) is list:
        (inner,) = get_args(hint)
        return [_numbers(text, source) if inner == list[int] else _scalar(inner, text, source) for text in texts]
    if len(texts) > 1:
        raise SettingsError(f"{source}: given {len(texts)} times ({', '.join(texts)}); must be given once")
    return _scalar(hint, texts[0], source)


def from_text(hint: Any, text: str, source: str) -> Any:
    """Return the value of a variable with the content `text`; `source` is its name. Raises SettingsError."""
    if get_origin(hint) not in (list, dict):
        return _scalar(hint, text, source)
    if not text.lstrip().startswith(("[", "{")):
        return from_texts(hint, text.split(), source)
    try:
        return from_toml(hint, msgspec.json.decode(text), source)
    except msgspec.DecodeError as error:
        raise SettingsError(f"{source}={text!r}: must be JSON as it starts with [ or {{ ({error})") from error


def from_toml(hint: Any, value: Any, source: str) -> Any:
    """Return `value`, which comes from TOML or JSON, in the declared type. Raises SettingsError."""
    if get_origin(hint) is list and (not isinstance(value, list) or _is_inner(hint, value)):
        value = [value]
    try:
        return _finite(msgspec.convert(value, hint), source)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}={value!r}: must be {name_of(hint)}") from error


def _is_inner(hint: Any, value: list[Any]) -> bool:
    """Return whether `value` is a single element of a setting that is a list of lists."""
    (inner,) = get_args(hint)
    return get_origin(inner) is list and bool(value) and not isinstance(value[0], list)


def _scalar(hint: Any, text: str, source: str) -> Any:
    if {int, str} <= set(get_args(hint)):  # as a text, a number would stay one
        with suppress(msgspec.ValidationError):
            return msgspec.convert(text.strip(), int, strict=False)
    try:
        return _finite(msgspec.convert(text, hint, strict=False), source)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}={text!r}: must be {name_of(hint)}") from error


def _finite(value: Any, source: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{source}={value!r}: must be finite")
    return value


def _numbers(text: str, source: str) -> list[int]:
    """Return the numbers in a text like `0,1,4-7` or `-2,-1`."""
    numbers: list[int] = []
    for part in text.split(","):
        found = _NUMBERS.fullmatch(part.strip())
        if found is None:
            raise SettingsError(f"{source}={text!r}: must be whole numbers and ranges like 0,1,4-7")
        numbers += range(int(found[1]), int(found[2] or found[1]) + 1)
    return numbers


def _pair(text: str, source: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (equals and key.strip()):
        raise SettingsError(f"{source}={text!r}: must be KEY=VALUE")
    return key.strip(), value


def _params(pairs: list[tuple[str, str]], source: str) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for key, text in pairs:
        if key in params:
            raise SettingsError(f"{source}={key}={text}: {key!r} is given twice; must be given once")
        try:
            params[key] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            params[key] = text
    return params


def _environments(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Return the environments of the workers: as many dicts as the name with the most values has, one for all workers if each name has
    one value. The n-th value of a name is for worker n; a name with fewer values repeats them, as for_worker() does.
    """
    values: dict[str, list[str]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    count = max(map(len, values.values()), default=0)
    return [{name: own[index % len(own)] for name, own in values.items()} for index in range(count)]


SIZES = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}
_SIZE = re.compile(rf"([0-9]+(?:\.[0-9]+)?)\s*({'|'.join(SIZES)}|B|)")
SIZE_RULE = "must be a size such as 16GB or 512MiB, greater than 0"


def parse_size(value: int | str) -> int | None:
    """Return the bytes that `value` states: a number of bytes, or a number followed by a unit of SIZES; None if it states none."""
    found = _SIZE.fullmatch(str(value).strip())
    size = 0.0 if found is None else float(found[1]) * SIZES.get(found[2], 1)
    return int(size) if 1 <= size < 1 << 63 else None


SIZE: Rule = (lambda value: parse_size(value) is not None, SIZE_RULE)


def as_size(size_bytes: float) -> str:
    """Return a size as people read it: 1.5GB."""
    unit = next((unit for unit in ("TB", "GB", "MB", "KB") if size_bytes >= SIZES[unit]), None)
    return f"{size_bytes:.0f}B" if unit is None else f"{size_bytes / SIZES[unit]:.3g}{unit}"


UNITS = {"us": 1e6, "ms": 1e3, "s": 1.0}  # how many make a second


def parse_duration(text: str) -> float:
    """Return the seconds that `text` states: a number, or a number followed by us, ms or s. Raises ValueError
    otherwise.
    """
    for unit, count in UNITS.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) / count  # 5ms is 0.005, as multiplication by 0.001 would not give
    return float(text)


def _is_duration(text: str) -> bool:
    with suppress(ValueError):
        return parse_duration(text) > 0.0
    return False


DURATION: Rule = (_is_duration, "must be a duration greater than 0, such as 20ms")
