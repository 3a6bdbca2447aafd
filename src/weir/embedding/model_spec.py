"""What was said of a model of texts, and the model that the server runs by that."""

from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from weir.catalog.sources import ModelToServe
from weir.embedding.budget import Budget
from weir.embedding.runtime.devices import may_use_gpu
from weir.embedding.settings import ComputingSettings, TextSettings
from weir.workers.launch import available_cpus

TARGET = "weir.embedding.model:TextEncoder"


class Said(NamedTuple):
    """A model of texts: where it is, what is computed on what. `settings` are those of its line and workers."""

    name: str
    directory: Path
    text: TextSettings
    computing: ComputingSettings
    settings: dict[str, Any]

    @property
    def workers(self) -> int:
        """How many workers there are: as was said, else as many as the CPUs are enough for, where they compute, and 1 elsewhere.

        Runs of single texts on a CPU gain little from a second thread, and workers share the weights. The torch runtime shares nothing.
        """
        if "workers" in self.settings:
            return int(self.settings["workers"])
        computing = self.computing
        alike = self.settings.get("executor", "process") == "process" and computing.runtime == "onnx"
        if not alike or may_use_gpu(computing.device_map):
            return 1
        return max(1, _cpus() // int(self.settings.get("threads") or 1))

    @property
    def threads(self) -> int:
        """How many threads a worker computes with: as was said, else its share of the CPUs that this process may use."""
        said: int | None = self.settings.get("threads")
        return said or max(1, _cpus() // self.workers)

    @property
    def wants_calibration(self) -> bool:
        """Whether somebody has to find out how large batches should be."""
        told = "max_batch_cost" in self.settings or self.settings.get("executor") == "external"
        return self.computing.calibrate and not told

    def params(self, run_tokens: int | None = None, padding_cost: float = 1.0) -> dict[str, Any]:
        """Return the model's parameters; `run_tokens` is what a batch may have, if that is known, where padding counts `padding_cost` times."""
        text, computing = self.text, self.computing
        return {
            "directory": str(self.directory), "pooling": text.pooling, "window": text.window, "layers": text.layers or None,
            "mask_special": text.mask_special, "positions": text.positions, "normalize": text.normalize,
            "dimensions": text.dimensions, "precision": computing.precision, "runtime": computing.runtime,
            "devices": computing.device_map, "threads": self.threads, "compiled": computing.compile,
            "gpu_memory_fraction": computing.gpu_memory_fraction, "max_length": text.max_length,
            "fixed_length": text.fixed_length, "truncate": text.truncate and not text.split, "special_tokens": text.special_tokens,
            "cased": text.cased, "pair_separator": text.pair_separator, "prompt": text.prompt,
            "run_tokens": run_tokens if computing.run_tokens is None else computing.run_tokens,
            "padding_cost": padding_cost, "cache": computing.cache, "hide_special": text.hide_special,
        }  # fmt: skip

    def of_workers(self) -> dict[str, Any]:
        """Return the settings of the line and the workers."""
        settings = {key: value for key, value in self.settings.items() if key != "threads"}
        if settings.get("executor", "process") == "process":
            settings["workers"] = self.workers
            settings["threads"] = self.threads  # of its other libraries; threads of this process are not ours to set
        return settings

    def served(self, budget: Budget | None = None) -> ModelToServe:
        """Return what the server runs, in batches of `budget` as far as nothing else was said."""
        settings = {**(budget.settings() if budget is not None else {}), **self.of_workers()}
        run_tokens = None if budget is None else int(settings["max_batch_cost"])
        params = self.params(run_tokens, settings.get("padding_cost", 1.0))
        return ModelToServe(TARGET, self.name, params, [], settings)


def _cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(available_cpus())


def read_model(model: ModelToServe) -> Said:
    """Return what was said of a model whose target is a directory. Raises SettingsError."""
    rest = dict(model.settings)
    text = TextSettings(**_taken(TextSettings, rest))
    computing = ComputingSettings(**_taken(ComputingSettings, rest))
    return Said(model.name, Path(model.target).expanduser().resolve(), text, computing, rest)


def _taken(kind: type[Any], settings: dict[str, Any]) -> dict[str, Any]:
    return {each.name: settings.pop(each.name) for each in fields(kind) if each.name in settings}
