"""Names that come from outside, as paths that stay where they belong."""

from pathlib import Path, PurePosixPath

from weir.errors import InvalidRequest, ModelNotFound, SettingsError, brief
from weir.manager.naming import NAME

LONGEST_PATH = 1024  # characters of a file's path below its model's folder


def model_folder(root: Path, name: str) -> Path:
    """Return the folder of the model `name`. Raises ModelNotFound if there is none, or if that is no name of a model."""
    if not NAME.fullmatch(name) or not (folder := root / name).is_dir():
        raise ModelNotFound(f"model {name!r}: there is no such folder in the model repository")
    return folder


def file_within(folder: Path, file: str, source: str) -> Path:
    """Return the path of `file`, which must lie in `folder`. Raises SettingsError."""
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or "\\" in file or "\0" in file or len(file.encode()) > LONGEST_PATH:
        raise SettingsError(f"{source}: file={file!r}: must be a file in the version's folder")
    found = folder / path
    try:
        there = found.is_file()
    except OSError:  # a name that is too long
        there = False
    if not there:
        raise SettingsError(f"{source}: file={file!r}: there is no such file in {folder.name}/")
    return found


def upload_path(name: str) -> PurePosixPath:
    """Return the path VERSION/FILE of a file that came with a load call. Raises InvalidRequest unless it is one."""
    path = PurePosixPath(name)
    inside = len(path.parts) >= 2 and all(NAME.fullmatch(part) for part in path.parts) and str(path) == name
    if not inside or len(name) > LONGEST_PATH:
        raise InvalidRequest(
            f"file {brief(name, 200)}: must be VERSION/NAME, of letters, digits and . _ ~ -, up to 255 for each part and "
            f"{LONGEST_PATH} for all"
        )
    return path
