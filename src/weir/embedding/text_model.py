"""A model of texts as the server sees it: what the settings say of it, and what must be known of its files. The workers have the weights."""

import logging
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.catalog.sources import ModelToServe
from weir.embedding.calibration import MOST_TOKENS, Budget, Progress, budget_for
from weir.embedding.checkpoint.reading import read_for
from weir.embedding.encoder import Encoder
from weir.embedding.inference import TextInference
from weir.embedding.metrics import RunShapes
from weir.embedding.model import runs
from weir.embedding.recipe import OF_LAST_LAYER, Pooling, chosen_recipe, dimensions_in
from weir.embedding.requests import highest_places
from weir.embedding.runtime import may_use_gpu
from weir.embedding.settings import ComputingSettings, TextSettings
from weir.embedding.texts import TokenizerOptions, prompt_of_server
from weir.errors import SettingsError
from weir.workers.process.launch import available_cpus

if TYPE_CHECKING:
    from weir.embedding.exchange import EmbeddingContext
    from weir.serving.service import Service


TARGET = "weir.embedding.model:TextEncoder"


class TextModelSpec(NamedTuple):
    """A model of texts: where it is, what is computed on what. `settings` are those of its queue and workers."""

    name: str
    directory: Path
    text: TextSettings
    computing: ComputingSettings
    settings: dict[str, Any]

    @property
    def workers(self) -> int:
        """The number of workers: as set, else as many as the CPUs are enough for where these compute, and 1 elsewhere.

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
        """The number of threads that a worker computes with: as set, else its share of the CPUs that this process may use."""
        stated: int | None = self.settings.get("threads")
        return stated or max(1, _cpus() // self.workers)

    @property
    def wants_calibration(self) -> bool:
        """Whether it has to be measured how large batches should be."""
        is_stated = "max_batch_cost" in self.settings or self.settings.get("executor") == "external"
        return self.computing.calibrate and not is_stated

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
        """Return the settings of the queue and the workers."""
        settings = {key: value for key, value in self.settings.items() if key != "threads"}
        if settings.get("executor", "process") == "process":
            settings["workers"] = self.workers
            settings["threads"] = self.threads  # of its other libraries; threads of this process are not ours to set
        return settings

    def served(self, budget: Budget | None = None) -> ModelToServe:
        """Return what the server runs, in batches of `budget` unless the settings state otherwise."""
        settings = {**(budget.settings() if budget is not None else {}), **self.of_workers()}
        run_tokens = None if budget is None else int(settings["max_batch_cost"])
        params = self.params(run_tokens, settings.get("padding_cost", 1.0))
        return ModelToServe(TARGET, self.name, params, [], settings)


def _cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(available_cpus())


def read_model(model: ModelToServe) -> TextModelSpec:
    """Return the settings of a model whose target is a directory. Raises SettingsError."""
    rest = dict(model.settings)
    text = TextSettings(**_taken(TextSettings, rest))
    computing = ComputingSettings(**_taken(ComputingSettings, rest))
    return TextModelSpec(model.name, Path(model.target).expanduser().resolve(), text, computing, rest)


def _taken(kind: type[Any], settings: dict[str, Any]) -> dict[str, Any]:
    return {each.name: settings.pop(each.name) for each in fields(kind) if each.name in settings}


logger = logging.getLogger("weir")

# What a worker that is measured has in common with those that will serve.
_OF_WORKERS = ("executor", "env", "cpu_affinity", "threads", "start_timeout", "predict_timeout")


class ServedTextModel:
    """Read from the model's directory. Raises SettingsError naming the file, or the setting, and the rule."""

    def __init__(self, spec: TextModelSpec) -> None:
        text = spec.text
        checkpoint = read_for(spec.computing.runtime, spec.directory)
        if text.max_length is not None and text.max_length > checkpoint.architecture.max_length:
            raise SettingsError(
                f"{spec.name}: max_length={text.max_length}: the model reads at most {checkpoint.architecture.max_length} tokens"
            )
        self.name = spec.name
        self.recipe = chosen_recipe(
            checkpoint, pooling=text.pooling, layers=text.layers or None, mask_special=text.mask_special,
            positions=text.positions, normalize=text.normalize, dimensions=text.dimensions,
            precision=spec.computing.precision, window=text.window,
        )  # fmt: skip
        chosen = text.layers or checkpoint.layout.pooled or self.recipe.pooling in OF_LAST_LAYER
        if checkpoint.architecture.layers == 1 and not chosen:
            logger.info(
                "%s: has 1 layer, which is pooled; of models with more it is the second-to-last (--layers)", spec.name
            )
        self.dimensions = dimensions_in(checkpoint, self.recipe)
        self.max_length = text.max_length or checkpoint.max_length
        self._spec = spec
        self._checkpoint = checkpoint
        self._tokenizer = checkpoint.tokenizer(
            TokenizerOptions(
                lowercase=None if text.cased is None else not text.cased, special_tokens=text.special_tokens,
                word_special_tokens=text.word_special_tokens, pair_separator=text.pair_separator,
                prompt=prompt_of_server(text.prompt, checkpoint.prompts),
            )
        )  # fmt: skip

    @property
    def cased(self) -> bool:
        """Whether capital letters count."""
        return self._tokenizer.cased

    @property
    def weights_file(self) -> Path:
        """Where its weights are, or what says where they are."""
        return self._checkpoint.store.paths[0]

    @property
    def cache(self) -> Path:
        """Where its graph, and what is measured of it, are kept."""
        from weir.embedding.graph.cache import cache_directory

        chosen = self._spec.computing.cache
        return Path(chosen) if chosen else cache_directory()

    def prune(self) -> None:
        """Remove graphs that are more than its cache may have, and that nobody uses."""
        from weir.embedding.graph.cache import graphs_in, prune

        for folder in prune(graphs_in(self.cache), self._spec.computing.max_cache_size):
            logger.info("%s: removed, as there is more than max_cache_size", folder)

    async def budget(self, progress: Progress) -> Budget | None:
        """Return how large batches should be on this machine, measured if nobody has before; None where nobody wants to know."""
        from weir.embedding.model import TextEncoder

        spec = self._spec
        if not spec.wants_calibration:
            return None
        params = spec.params(MOST_TOKENS)
        settings = {key: spec.settings[key] for key in _OF_WORKERS if key in spec.settings}
        return await budget_for(
            TextEncoder, params, identity=self._identity(), max_length=self.max_length,
            safe_tokens=self._run_tokens, fixed=spec.text.fixed_length, folder=self.cache / "budgets",
            vocabulary=self._checkpoint.architecture.vocab_size, progress=progress, **settings,
        )  # fmt: skip

    def _identity(self) -> dict[str, Any]:
        """Say what is measured: not where it lies, and not what leaves its speed as it is."""
        params = self._spec.params()
        for name in (
            "directory",
            "cache",
            "truncate",
            "cased",
            "pair_separator",
            "prompt",
            "special_tokens",
            "hide_special",
            "run_tokens",
            "padding_cost",
        ):
            del params[name]
        executor = self._spec.settings.get("executor", "process")
        return {**params, "content": self._checkpoint.content_hash(), "executor": executor}

    @property
    def _run_tokens(self) -> int:
        """The number of tokens that workers compute at once where neither a setting nor a measurement states it."""
        from weir.embedding.model import RUN_TOKENS_CPU, RUN_TOKENS_GPU

        return RUN_TOKENS_GPU if may_use_gpu(self._spec.computing.device_map) else RUN_TOKENS_CPU

    def computing(self, run_tokens: int | None, padding_cost: float) -> RunShapes:
        """Return how workers that compute so many tokens at once (None: their own number), where padding counts `padding_cost` times, cut batches
        into runs, for what counts padding."""
        run_tokens = self._run_tokens if run_tokens is None else run_tokens
        cut = partial(runs, run_tokens=run_tokens, padding_cost=padding_cost)
        return RunShapes(cut, self.max_length if self._spec.text.fixed_length else 0, padding_cost)

    def inference(self, context: "EmbeddingContext", encoder: Encoder) -> TextInference:
        """Return what answers for the model, by `encoder`, by the protocols that are not those of texts."""
        return TextInference(context, encoder, of_tokens=self.recipe.pooling is Pooling.NONE)

    def encoder(self, service: "Service", budget: Budget | None = None) -> Encoder:
        """Return what encodes texts by `service`, whose batches were measured for `budget`."""
        dense = self._checkpoint.dense and self.recipe.pooling is not Pooling.NONE
        whole = dimensions_in(self._checkpoint, replace(self.recipe, dimensions=None))
        highest = None if dense else highest_places(self.recipe.poolings, whole)[: self.dimensions]
        return Encoder(
            service, self._tokenizer, dimensions=self.dimensions, max_length=self.max_length, name=self.name,
            truncate=self._spec.text.truncate, split=self._spec.text.split, normalize=self.recipe.normalize,
            fixed_length=self.max_length if self._spec.text.fixed_length else None, prompts=self._checkpoint.prompts, highest=highest,
            tokens_per_second=0.0 if budget is None else budget.tokens_per_second, of_tokens=self.recipe.pooling is Pooling.NONE,
        )  # fmt: skip
