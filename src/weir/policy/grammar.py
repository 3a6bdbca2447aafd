"""The text form of settings of a policy: `name`, `name:value` or `name:key=value,key=value`.

    greedy                                size-or-delay:size=32,delay=5ms
    full                                  full:16
    control-limit:8                       my_module:MyPolicy:patience=20ms

A value alone is that of the policy's first setting. Durations are in seconds, or carry `us`, `ms` or `s`.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin

from weir.errors import SettingsError

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
WORDS = {"true": True, "false": False, "none": None}


def parse_duration(text: str) -> float:
    """Return the seconds that `text` stands for: a number, or a number with us, ms or s. Raises ValueError."""
    for unit, factor in UNITS.items():
        number = text.removesuffix(unit)
        if number != text:
            # Division is exact where multiplication by 0.001 is not: 5ms is 0.005.
            return float(number) / round(1.0 / factor)
    return float(text)


def build(make: Callable[..., Any], arguments: str | None, said: str) -> Any:
    """Call `make`, a class or function, with the arguments that `arguments` states.

    `said` is the whole text, for the message. Raises SettingsError that names the key, the value and the rule: unknown,
    said twice, missing, of the wrong type, or refused by `make`.
    """
    known = _parameters(make)
    values: dict[str, Any] = {}
    for part in arguments.split(",") if arguments is not None else ():
        key, separator, text = part.partition("=")
        if not separator:
            if values or not known:
                raise SettingsError(f"policy={said!r}: {part!r} must be key=value{_has(known)}")
            key, text = next(iter(known)), part
        if key not in known:
            raise SettingsError(f"policy={said!r}: no setting {key!r}{_has(known)}")
        if key in values:
            raise SettingsError(f"policy={said!r}: {key}={text} says {key} twice; state it once")
        values[key] = _convert(key, text, known[key].annotation, said)
    missing = [key for key, each in known.items() if each.default is each.empty and key not in values]
    if missing:
        raise SettingsError(f"policy={said!r}: {missing[0]} must be given, as in {said.split(':')[0]}:{missing[0]}=...")
    try:
        return make(**values)
    except SettingsError as error:
        raise SettingsError(f"policy={said!r}: {error.message}") from None
    except (TypeError, ValueError) as error:
        raise SettingsError(f"policy={said!r}: {error}") from error


def _parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        signature = inspect.signature(make, eval_str=True)
    except (NameError, SyntaxError):  # annotations that cannot be evaluated here: the text of a value decides its type
        signature = inspect.signature(make)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: each for name, each in signature.parameters.items() if each.kind not in variable}


def _has(known: dict[str, inspect.Parameter]) -> str:
    return "; it has " + ", ".join(known) if known else "; it has no settings"


def _convert(key: str, text: str, annotation: Any, said: str) -> Any:
    kinds = get_args(annotation) if get_origin(annotation) in (types.UnionType, Union) else (annotation,)
    if types.NoneType in kinds and text.lower() == "none":
        return None
    for kind, read, rule in (
        (bool, _read_bool, "must be true or false"),
        (int, int, "must be a whole number"),
        (float, parse_duration, "must be a number, or a duration such as 5ms"),
        (str, str, ""),
    ):
        if kind in kinds:
            try:
                return read(text)
            except ValueError:
                raise SettingsError(f"policy={said!r}: {key}={text!r}: {rule}") from None
    return _guess(text)


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _guess(text: str) -> Any:
    """Return the value of a text whose type is not declared."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for read in (int, parse_duration):
        try:
            return read(text)
        except ValueError:
            continue
    return text
