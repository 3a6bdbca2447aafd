"""What is asked of a simulation, held against its rules before anything is done."""

from typing import Any

from weir.errors import SettingsError


def check_count(name: str, value: Any, least: int) -> None:
    """Raise SettingsError unless `value` is a whole number of at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least:
        raise SettingsError(f"{name}={value!r}: must be {least} or more" + ("" if whole else ", a whole number"))


def check_seconds(name: str, value: float | None) -> None:
    """Raise SettingsError unless `value` is a number of seconds greater than 0, or None."""
    if value is not None and not value > 0.0:
        raise SettingsError(f"{name}={value!r}: must be a number of seconds, greater than 0")
