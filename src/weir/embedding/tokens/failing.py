"""What the library raises for files that it takes and cannot use: plain exceptions, and panics, which are no Exception."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weir.errors import SettingsError


@contextmanager
def named(directory: Path) -> Iterator[None]:
    """Raise SettingsError naming `directory` for whatever the library raises in the block."""
    try:
        yield
    except SettingsError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise SettingsError(f"{directory}: its tokenizer cannot be read: {error}") from None
