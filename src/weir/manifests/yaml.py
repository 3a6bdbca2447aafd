"""Writes plain data as YAML: dicts, lists, texts, numbers, true, false and null.

A default install has no YAML library, and does not need one to write: what is difficult in YAML is to read it. A text stands plain
only if no reader, of YAML 1.1 or 1.2, could take it for anything else; any other text is quoted, or a block where it has lines.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# A word that begins with a letter, / or --, with single separators inside. Numbers, times and indicators do not look like that.
_PLAIN = re.compile(r"(?:--)?[A-Za-z/][A-Za-z0-9_/]*(?:[-.=:/@]+[A-Za-z0-9_/]+)*")
_RESERVED = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)
_BLOCK = re.compile(r"[\t -~\n]*[!-~]\n")  # printable lines, of which the last is not blank
_ONE_LINE = re.compile(r"[ -~]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_INDENT = "  "


def documents(objects: Sequence[Any]) -> str:
    """Return `objects` as YAML documents, one after another. Raises TypeError for a value that is no plain data."""
    return "---\n".join("\n".join(_lines(each)) + "\n" for each in objects)


def _lines(value: Any, indent: str = "") -> Iterator[str]:
    """Yield the lines of `value`, where a value of its own line begins with `indent`."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _entry(f"{indent}{_scalar(key)}:", inner, indent, isinstance(inner, Mapping))
    elif _is_list(value) and value:
        for inner in value:
            yield from _item(inner, indent)
    else:
        yield indent + _scalar(value)


def _entry(head: str, value: Any, indent: str, deeper: bool) -> Iterator[str]:
    """Yield `head` and the value that follows it, either on its line or below."""
    if isinstance(value, str) and _BLOCK.fullmatch(value) and not value[0].isspace():
        yield f"{head} |"
        for line in value.splitlines():
            yield f"{indent}{_INDENT}{line}" if line else ""
    elif value and (isinstance(value, Mapping) or _is_list(value)):
        yield head
        yield from _lines(value, indent + _INDENT if deeper else indent)
    else:
        yield f"{head} {_scalar(value)}"


def _item(value: Any, indent: str) -> Iterator[str]:
    if value and (isinstance(value, Mapping) or _is_list(value)):
        first, *rest = _lines(value, indent + _INDENT)
        yield f"{indent}- {first[len(indent) + len(_INDENT) :]}"
        yield from rest
    else:
        yield from _entry(f"{indent}-", value, indent, deeper=True)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and not _RESERVED.fullmatch(value) else _quoted(value)
    if isinstance(value, Mapping):
        return "{}"
    if _is_list(value):
        return "[]"
    raise TypeError(f"{value!r}: must be a dict, a list, a text, a number, true, false or null")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    digits, exponent, power = repr(value).partition("e")
    if not exponent:
        return digits
    # YAML 1.1 knows an exponent only after a point, and with its sign.
    return f"{digits if '.' in digits else digits + '.0'}e{power if power[0] == '-' else '+' + power.lstrip('+')}"


def _quoted(text: str) -> str:
    if '"' in text and _ONE_LINE.fullmatch(text):
        return "'" + text.replace("'", "''") + "'"
    return '"' + "".join(map(_character, text)) + '"'


def _character(character: str) -> str:
    if " " <= character <= "~":
        return _ESCAPES.get(character, character)
    number = ord(character)
    if character.isprintable() and number not in (0xFFFE, 0xFFFF):
        return character
    known = _ESCAPES.get(character)
    if known is None:
        known = f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
    return known
