"""What was said of a model of texts, and the model that the server runs by that."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from weir.embedding.settings import ComputingSettings, TextSettings
from weir.manager.spec import ModelToServe

TARGET = "weir.embedding.model:TextEncoder"


class Said(NamedTuple):
    """A model of texts: where it is, what is computed on what. `settings` are those of its line and workers."""

    name: str
    directory: Path
    text: TextSettings
    computing: ComputingSettings
    settings: dict[str, Any]

    def served(self) -> ModelToServe:
        """Return what the server runs."""
        text, computing = self.text, self.computing
        threads = self.settings.get("threads") or _threads(self.settings.get("workers", 1))
        params = {
            "directory": str(self.directory), "pooling": text.pooling, "layers": text.layers or None,
            "mask_special": text.mask_special, "positions": text.positions, "normalize": text.normalize,
            "dimensions": text.dimensions, "precision": computing.precision, "runtime": computing.runtime,
            "devices": computing.device_map, "threads": threads, "compiled": computing.compile,
            "gpu_memory_fraction": computing.gpu_memory_fraction, "max_length": text.max_length,
            "fixed_length": text.fixed_length, "truncate": text.truncate, "special_tokens": text.special_tokens,
            "cased": text.cased, "pair_separator": text.pair_separator, "run_tokens": computing.run_tokens,
            "cache": computing.cache,
        }  # fmt: skip
        settings = {key: value for key, value in self.settings.items() if key != "threads"}
        if settings.get("executor", "process") == "process":
            settings["threads"] = threads  # of its other libraries; threads of this process are not ours to set
        return ModelToServe(TARGET, self.name, params, [], settings)


def read_model(model: ModelToServe) -> Said:
    """Return what was said of a model whose target is a directory. Raises SettingsError."""
    rest = dict(model.settings)
    text = TextSettings(**_taken(TextSettings, rest))
    computing = ComputingSettings(**_taken(ComputingSettings, rest))
    return Said(model.name, Path(model.target).expanduser().resolve(), text, computing, rest)


def _taken(kind: type[Any], settings: dict[str, Any]) -> dict[str, Any]:
    return {each.name: settings.pop(each.name) for each in fields(kind) if each.name in settings}


def _threads(workers: int) -> int:
    """Return how many threads a worker computes with when nobody said: its share of the CPUs that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // workers)
