"""The settings of the model repository."""

from dataclasses import dataclass

from weir.fields import check, setting


@dataclass(frozen=True)
class RepositorySettings:
    """Which models there are beside the TARGETs, and which of all of them are loaded at the start."""

    model_repository: str | None = setting(
        None, "folder of models, MODEL/VERSION/FILE, that can be loaded while serving", metavar="DIR"
    )
    load: list[str] = setting(
        [], "model to load at the start, or all, or none; without it all are loaded", metavar="NAME"
    )
    watch: bool = setting(False, "load models of the repository when their files change, and unload those that go")

    def __post_init__(self) -> None:
        check(self)
