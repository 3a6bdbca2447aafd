"""Plants the fault that FAULT names in every Python that finds this on its path: servers, their workers and fronts too. See __main__.py."""

import os
import sys

if _NAME := os.environ.get("FAULT"):
    from importlib import import_module
    from pathlib import Path

    _ROOT = str(Path(__file__).parents[2])
    sys.path.insert(0, _ROOT)
    _planting, _known = import_module("tests.faults.planting"), import_module("tests.faults.known")
    sys.path.remove(_ROOT)
    _planting.plant(_known.FAULTS[_NAME])
