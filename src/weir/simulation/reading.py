"""Reads profiles from files."""

from pathlib import Path

from weir.errors import SettingsError
from weir.policy.cost.profile import Profile


def read_profile(path: str | Path) -> Profile:
    """Return the profile in the file `path`. Raises SettingsError naming the file if there is none."""
    try:
        return Profile.from_toml(Path(path).read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: must be a profile made by `weir profile`: {error}") from error
