"""The platform `sklearn`: estimators of scikit-learn in files of skops (.skops), or pickled ones (.joblib, .pkl) where that is
allowed. The estimator is described by a separate process: the server does not load scikit-learn."""

import os
from pathlib import Path
from typing import Any

from weir.catalog.repository.platforms import need, only_file, read_apart, with_attributes
from weir.catalog.repository.sklearn_model import SKOPS, SklearnModel
from weir.catalog.sources import ModelToServe
from weir.catalog.targets import PLATFORMS
from weir.errors import SettingsError
from weir.model import Model
from weir.workers.process.launch import python_path
from weir.workers.source import declared

ENDINGS = [ending for ending, platform in PLATFORMS.items() if platform == "sklearn"]


class SklearnPlatform:
    """The platform `sklearn`: files of estimators and pipelines, run by scikit-learn."""

    def load(self, model: ModelToServe) -> type[Model]:
        """Return a class that runs the estimator in the file. Raises SettingsError; see Platform."""
        path = only_file(model, ENDINGS)
        what = f"{model.label}: {path.name}"
        if path.suffix != SKOPS and not model.trust.pickles:
            raise SettingsError(
                f"{what}: loading a pickle file can run arbitrary code; if you trust it, set --allow-pickle; or save it with "
                f"skops.io.dump(estimator, '{path.stem}.skops')"
            )
        need("sklearn", "sklearn", model, "scikit-learn")
        if path.suffix == SKOPS:
            need("skops", "sklearn", model)
        described = _described(path, what, model.trust.types)
        if untrusted := described.get("untrusted"):
            flags = " ".join(f"--trust-type {name}" for name in untrusted)
            raise SettingsError(f"{what}: contains types that may run code; if you trust it, set {flags}")
        _check_method(model, described, what)
        attributes = {
            "path": str(path), "trusted": model.trust.types, "features": described["features"],
            "columns": tuple(described["columns"]), "examples": tuple(described["examples"]),
        }  # fmt: skip
        return with_attributes(declared(SklearnModel, attributes), model)


def _described(path: Path, what: str, trusted: tuple[str, ...]) -> dict[str, Any]:
    """Return the description that sklearn_model prints of the file. Steps of a pipeline may be of the user's own modules."""
    inherited = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": python_path(inherited)}
    return read_apart(
        "weir.catalog.repository.sklearn_model", [str(path), *trusted], f"{what}: cannot be loaded", environment
    )


def _check_method(model: ModelToServe, described: dict[str, Any], what: str) -> None:
    method = model.params.get("method", "predict")
    if method not in described["methods"]:
        has = ", ".join(described["methods"]) or "none of those that are served"
        raise SettingsError(
            f"{what}: method={method!r}: {described['type']} has {has}; another one: --param method=NAME"
        )
