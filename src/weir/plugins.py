"""Finds parts by name: Weir's own, and those that installed packages add through entry points. None is imported before it is used.

Weir's own need no installed metadata, so a checkout has them, too.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from weir.errors import SettingsError, WeirError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint  # slow to import


class Plugins:
    """The parts of one kind.

    Arguments:
        kind: what messages call one of them: the setting that names it.
        group: the group of entry points.
        ours: where Weir's own are, as MODULE:NAME, by name. They precede those of packages.
    """

    def __init__(self, kind: str, group: str, ours: Mapping[str, str] | None = None) -> None:
        self._kind = kind
        self._ours = ours or {}
        self._group = group

    def __contains__(self, name: str) -> bool:
        return name in self._ours or name in self._installed()

    def names(self) -> list[str]:
        """Return all names: Weir's own, then those of packages in alphabetical order."""
        return [*self._ours, *sorted(self._installed().keys() - self._ours.keys())]

    def load(self, name: str) -> Any:
        """Import and return the part `name`. Raises SettingsError, which lists all names if there is none of this name."""
        return self._guarded(name, lambda load: load())

    def make(self, name: str, *arguments: Any) -> Any:
        """Return what the part `name` returns for `arguments`. Raises SettingsError as `load` does, and one for any other error."""
        return self._guarded(name, lambda load: load()(*arguments))

    def _installed(self) -> "dict[str, EntryPoint]":
        import importlib.metadata  # slow, and only needed for names that are not ours

        return {entry.name: entry for entry in importlib.metadata.entry_points(group=self._group)}

    def _guarded(self, name: str, use: Callable[[Callable[[], Any]], Any]) -> Any:
        """Return what `use` makes of the function that imports the part."""
        where, load = self._found(name)
        try:
            return use(load)
        except WeirError:
            raise
        except Exception as error:
            raise SettingsError(f"{self._kind}={name!r}: {where}: {type(error).__name__}: {error}") from error

    def _found(self, name: str) -> tuple[str, Callable[[], Any]]:
        if name in self._ours:
            return self._ours[name], partial(resolve_name, self._ours[name])
        entry = self._installed().get(name)
        if entry is None:
            known = ", ".join(self.names()) or "none"
            raise SettingsError(f"unknown {self._kind} {name!r}; available: {known} (entry points {self._group})")
        return entry.value, entry.load
