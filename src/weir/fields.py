"""Declare a setting once: its type, default, help and rule.

Each part of Weir has one frozen dataclass of settings. Flags, TOML keys and `WEIR_` variables are derived from it
(settings.py); nothing is stated a second time.
"""

from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

from weir.errors import SettingsError

Rule = tuple[Callable[[Any], bool], str]

POSITIVE: Rule = (lambda value: value > 0, "must be greater than 0")
AT_LEAST_ZERO: Rule = (lambda value: value >= 0, "must be 0 or more")
SHARE: Rule = (lambda value: 0 <= value <= 1, "must be from 0 to 1")
AT_LEAST_ONE: Rule = (lambda value: value >= 1, "must be 1 or more")


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
    """Hold every field of `settings` against its rule; for `__post_init__`.

    Raises SettingsError naming the first key, value and rule that disagree.
    """
    for declared in fields(settings):
        rule, value = declared.metadata.get("rule"), getattr(settings, declared.name)
        if rule is None or value is None:
            continue
        passes, text = rule
        try:
            accepted = passes(value)
        except TypeError:
            accepted = False
        if not accepted:
            raise SettingsError(f"{declared.name}={value!r}: {text}")
