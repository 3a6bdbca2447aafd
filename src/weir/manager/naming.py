"""What a model and its version may be called."""

import re

from weir.errors import SettingsError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._~-]{0,254}")  # a file may be called so too


def check_name(name: str) -> str:
    """Return `name` if it can stand in a path; SettingsError otherwise."""
    if not NAME.fullmatch(name):
        raise SettingsError(
            f"name={name!r}: must be of up to 255 letters, digits and . _ ~ -, and begin with none of . ~ -"
        )
    return name


def check_version(version: str) -> str:
    """Return `version` if it can stand in a path, or is "" (none); SettingsError otherwise."""
    if version and not NAME.fullmatch(version):
        raise SettingsError(
            f"version={version!r}: must be of letters, digits and . _ ~ -, and begin with none of . ~ -"
        )
    return version
