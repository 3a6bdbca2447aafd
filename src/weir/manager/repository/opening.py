"""What a server knows of models at its start, and which of them it loads."""

from collections.abc import Sequence

from weir.errors import SettingsError
from weir.manager.spec import Known, Listening, Reading, Repository, Sources

ALL, NONE = "all", "none"


def all_sources(known: Known, folder: Repository | None, spoken: Listening) -> Sources:
    """Return the TARGETs, the models of the folder, and what load calls will describe, as one. Raises SettingsError for a
    name that both of the first have."""
    if folder is None:
        return Sources([known], spoken)
    for name in known.names():
        if name in folder.names():
            raise SettingsError(
                f"name={name!r}: is both a TARGET and a model of the repository; give the TARGET another (--name)"
            )
    return Sources([known, folder], spoken)


def read_wanted(sources: Sources, load: Sequence[str]) -> list[Reading]:
    """Return what is to be loaded at the start. Raises SettingsError for a name that nothing is known of."""
    names = sources.names()
    if NONE in load and len(load) > 1:
        raise SettingsError(f"load={list(load)!r}: none goes with no other name")
    for name in load:
        if name not in (ALL, NONE, *names):
            raise SettingsError(f"load={name!r}: there is no such model; there are {', '.join(names) or 'none'}")
    wanted = names if not load or ALL in load else [name for name in names if name in load]
    return [sources.read(name) for name in wanted]
