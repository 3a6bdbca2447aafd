"""A text model in the server's process: its settings, and what the server needs of its files. Only the workers load the weights."""

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.batching import BatchingSettings
from weir.catalog.sources import ModelToServe
from weir.config import stated_settings, that_affect_speed
from weir.errors import InvalidRequest, SettingsError
from weir.images import ImageLimits, Picture, look
from weir.images.preparation import PREPROCESSOR
from weir.messages import label_of
from weir.policy.loading import BANK_FILE, load_policy
from weir.profiling.machine import memory_of
from weir.text_models import (
    OF_TOKENS,
    WITH_CLASSIFIER,
    WITH_HEAD,
    ComputingSettings,
    Pooling,
    Recipe,
    TextSettings,
    WorkerShare,
    split_settings,
)
from weir.text_models.checkpoint.hub import local_directory, parse_target
from weir.text_models.checkpoint.onnx_files import RUNTIME, find_file, wanted_names
from weir.text_models.checkpoint.reading import CONFIG
from weir.text_models.formats import read_document
from weir.text_models.graph.cache import cache_directory, graphs_folder, prune
from weir.text_models.model import (
    RUN_TOKENS_CPU,
    RUN_TOKENS_GPU,
    SAMPLE,
    ImageTower,
    TextEncoder,
    TextTower,
    poolings_of,
    runs,
)
from weir.text_models.packing import read_ranges
from weir.text_models.recipe import dimensions_of, read_files
from weir.text_models.runtime import may_use_gpu
from weir.text_models.texts import EncodedImage, TextOutput
from weir.text_server.calibration import MAX_TOKENS, Budget, Measurement, Progress, TextsToMeasure, budget_for
from weir.text_server.encoder import Encoder, TextShape
from weir.text_server.metrics import RunShapes
from weir.text_server.protocols.kserve import TextInference
from weir.text_server.requests import max_pooled_places
from weir.text_server.texts import TextFacts, TextTask, VisionFacts, WorkersUse
from weir.text_server.tokenizing import TokenizerThreads
from weir.workers.cpus import affinity, cpu_count, cpu_quota
from weir.workers.process.shared import SharedPool, WorkersNeed, environment_of, share_workers
from weir.workers.settings import WorkerSettings

if TYPE_CHECKING:
    from weir.serving.handle import ModelHandle
    from weir.text_models.checkpoint.reading import Checkpoint
    from weir.text_server.exchange import EmbeddingContext


TARGET = "weir.text_models.model:"  # and the name of a class
GREEDY = "greedy"
IMAGES = "images"  # the version of a model that is its tower for images


class TextModelSpec(NamedTuple):
    """A text model to serve: its name, its directory, and its settings. `settings` are those of its queue and workers, by name.

    `repository` is its id on the hub, without a revision; "" for a directory.
    `cpus` is its share of the CPUs that this process may use; None for all. `pool` has the workers that it shares with other models; None if it has its own.
    `images` are the limits of pictures.
    """

    name: str
    directory: Path
    text: TextSettings
    computing: ComputingSettings
    settings: dict[str, Any]
    repository: str = ""
    aliases: tuple[str, ...] = ()
    cpus: int | None = None
    pool: SharedPool | None = None
    images: ImageLimits = ImageLimits()

    @property
    def listed(self) -> str:
        """The name that lists and responses have: one that it was given, else its id, else that of its directory."""
        return self.repository if self.repository.rpartition("/")[2] == self.name else self.name

    @property
    def own_cpus(self) -> int:
        """How many CPUs its workers and their threads may use together."""
        return self.cpus or cpu_count()

    @property
    def workers(self) -> int:
        """The number of workers, at most: as set, else one for each CPU, or for each `threads` CPUs, if processes compute with onnxruntime on CPUs; else 1.

        Single texts gain little from a second thread, and workers with onnxruntime share the weights. Workers with torch share nothing.
        """
        if "workers" in self.settings:
            return WorkerSettings(workers=self.settings["workers"]).most_workers
        if not self._share_weights:
            return 1
        return max(1, self.own_cpus // int(self.settings.get("threads") or 1))

    @property
    def _share_weights(self) -> bool:
        computing = self.computing
        are_alike = self.settings.get("executor", "process") == "process" and computing.runtime != "torch"
        return are_alike and not may_use_gpu(computing.device_map)

    @property
    def group(self) -> str | None:
        """The name of the device on which it takes turns with other models."""
        group: str | None = self.settings.get("device_group")
        return group

    @property
    def bulk_workers(self) -> int:
        """The number of workers of idle priority for bulk work: as set, else one for each worker, if that is a process that computes with onnxruntime on
        CPUs. None where models share workers; and none where the kernel limits CPU time, of which bulk work would use up that of the others.
        Raises SettingsError if models that share workers are to have some."""
        stated: int | None = self.settings.get("bulk_workers")
        if stated and self.pool is not None:
            rule = f"bulk_workers={stated}: text models that share workers can have none for bulk work alone"
            raise SettingsError(rule)
        if stated is not None:
            return stated
        limited = cpu_quota() < len(affinity())
        return 0 if not self._share_weights or self.pool is not None or limited else self.workers

    @property
    def threads(self) -> int:
        """The number of threads of a worker: as set, else its share of the CPUs that this process may use."""
        stated: int | None = self.settings.get("threads")
        return stated or max(1, self.own_cpus // self.workers)

    @property
    def lone_threads(self) -> int:
        """The most threads of a batch that runs alone: those of all workers. Those of a worker if the settings state them, or its CPUs, or if another model
        may have the turn where this one's other workers are idle."""
        stated = self.settings.get("threads") or self.settings.get("cpu_affinity") or self.group
        if stated or not self._share_weights or self.computing.runtime != "onnx":
            return self.threads
        return self.workers * self.threads

    @property
    def computes_in_one_thread(self) -> bool:
        """Whether one thread of a process computes all of a batch that has not the threads of idle workers."""
        is_process = self.settings.get("executor", "process") == "process"
        return is_process and self.threads == 1 and not may_use_gpu(self.computing.device_map)

    @property
    def need(self) -> WorkersNeed:
        """The workers that it needs: its own if it states how many, or their threads; else those of models with the same settings and runtime. Models that
        take turns have together the CPUs of one."""
        stated = {"workers", "threads"} & self.settings.keys()
        cpus = self.workers * (self.threads if len(stated) == 2 else 1) if stated else None
        return WorkersNeed(self.group or self.environment, cpus)

    @property
    def environment(self) -> Hashable | None:
        """The settings that must agree in models that share workers; None if it shares with none."""
        computing = self.computing
        environment = environment_of(WorkerSettings(**stated_settings(WorkerSettings, self.settings)))
        alike = (
            repr(environment),
            computing.runtime == "torch",
            repr(computing.device_map),
            computing.gpu_memory_fraction,
        )
        return None if environment is None else alike

    @property
    def wants_calibration(self) -> bool:
        """Whether the size of batches is to be measured: it is not set, and the setting `calibrate` is on."""
        is_stated = "max_batch_cost" in self.settings or self.settings.get("executor") == "external"
        return self.computing.calibrate and not is_stated

    def share(self, run_tokens: int | None = None, padding_cost: float = 1.0) -> WorkerShare:
        """Return the share of a worker whose batches have at most `run_tokens` tokens; see WorkerShare."""
        return WorkerShare(self.threads, self.lone_threads, run_tokens, padding_cost)

    def params(self, share: WorkerShare) -> dict[str, Any]:
        """Return the arguments of TextEncoder."""
        settings = {"text": self.text, "computing": self.computing, "images": self.images}
        return {"directory": str(self.directory), **settings, "share": share}

    def worker_settings(self) -> dict[str, Any]:
        """Return the settings of the queue and the workers. Raises SettingsError for what only models that wait gain from."""
        if (stated := self.settings.get("worker_concurrency", 1)) != 1:
            rule = f"worker_concurrency={stated}: is for models that wait, and text models compute: set workers"
            raise SettingsError(rule)
        settings = {key: value for key, value in self.settings.items() if key != "threads"}
        if settings.get("executor", "process") == "process":
            settings.setdefault("workers", self.workers)
            settings["threads"] = self.threads  # limits other libraries in a worker process, too
            settings["bulk_workers"] = self.bulk_workers
        if self.pool is not None:
            settings["executor"] = self.pool.member
        return settings

    def served(self, kind: type[TextEncoder] = TextEncoder, budget: Budget | None = None) -> ModelToServe:
        """Return the model for the registry, of the class `kind`, with the batches of `budget` unless the settings state others."""
        settings = {**(budget.settings() if budget is not None else {}), **self.worker_settings()}
        run_tokens = None if budget is None else int(settings["max_batch_cost"])
        params = self.params(self.share(run_tokens, settings.get("padding_cost", 1.0)))
        return ModelToServe(f"{TARGET}{kind.__name__}", self.name, params, [], settings, aliases=self.aliases)


def with_shares(specs: Sequence[TextModelSpec]) -> list[TextModelSpec]:
    """Return the models of one server with their shares of the CPUs that this process may use, and the workers that they share.

    Models that state neither workers nor threads share workers, if their other settings of workers agree. Those that take turns on a device do if all
    models of its group can.
    """
    apart = {spec.settings.get("device_group") for spec in specs if _is_unlike(spec, specs)} - {None}
    return [
        spec._replace(cpus=share.cpus)
        if spec.settings.get("device_group") in apart
        else spec._replace(cpus=share.cpus, pool=share.pool, computing=_part_of_gpu(spec.computing, share.models))
        for spec, share in zip(specs, share_workers([spec.need for spec in specs], cpu_count()), strict=True)
    ]


def _is_unlike(spec: TextModelSpec, specs: Sequence[TextModelSpec]) -> bool:
    """Return whether `spec` cannot share workers with the first model of its device group."""
    group = spec.settings.get("device_group")
    first = next(each for each in specs if each.settings.get("device_group") == group)
    return spec.need.cpus is not None or spec.environment is None or spec.environment != first.environment


def _part_of_gpu(computing: ComputingSettings, models: int) -> ComputingSettings:
    """Return the settings of one of several models in a worker: torch has one limit of memory for a process, onnxruntime one for each model."""
    fraction = computing.gpu_memory_fraction
    if fraction is None or computing.runtime == "torch" or models == 1:
        return computing
    return replace(computing, gpu_memory_fraction=fraction / models)


def read_model(named: ModelToServe) -> TextModelSpec:
    """Return the specification of a model whose target is a directory or an id, which is downloaded. Raises SettingsError naming a setting that breaks
    its rule, and what `local_directory` raises."""
    source = parse_target(named.target)
    text, computing, rest = split_settings(named.settings)
    onnx = partial(wanted_names, computing.runtime, computing.dtype)
    directory = local_directory(named.target, allow_pickle=computing.allow_pickle, onnx=onnx).expanduser().resolve()
    computing = _with_onnx_file(named.name, directory, computing)
    repository = "" if isinstance(source, Path) else source.repository
    return TextModelSpec(named.name, directory, text, computing, rest, repository, named.aliases)


def _with_onnx_file(name: str, directory: Path, computing: ComputingSettings) -> ComputingSettings:
    """Return the settings with the runtime that computes an ONNX file, if one is to be served; the log says which, and why."""
    config = directory / CONFIG
    names = wanted_names(computing.runtime, computing.dtype, config if config.is_file() else None)
    file = find_file(directory, names) if names else None
    if file is None or computing.runtime == RUNTIME:
        return computing if not computing.dtype or computing.runtime == RUNTIME else replace(computing, runtime=RUNTIME)
    if not computing.dtype:
        kind = read_document(config).values.get("model_type")
        logger.info("%s: model_type %s cannot be built from its weights; serving %s instead", name, kind, file)
    return replace(computing, runtime=RUNTIME)


logger = logging.getLogger("weir")


class ServedTextModel:
    """The files of a text model that the server reads: architecture, recipe and tokenizer."""

    def __init__(self, spec: TextModelSpec) -> None:
        """Read the directory. Raises SettingsError naming the file or the setting, and the rule."""
        text = spec.text
        files = read_files(spec.directory, text, spec.computing)
        self.recipe, self.max_length, self._tokenizer = files.recipe, files.max_length, files.tokenizer
        self._checkpoint = checkpoint = files.checkpoint
        if text.max_length is not None and text.max_length > self.max_length:
            raise SettingsError(
                f"{spec.name}: max_length={text.max_length}: the model reads at most {self.max_length} tokens"
            )
        logger.info("%s: %s", spec.name, described(checkpoint, self.recipe, text))
        if checkpoint.heads.pickled:
            logger.info(
                "%s: %s are pickles, which are not read without --allow-pickle",
                spec.name,
                ", ".join(checkpoint.heads.pickled),
            )
        self._vision = None if checkpoint.vision is None or checkpoint.vision.preparation is None else checkpoint.vision
        if self._vision is not checkpoint.vision:
            rule = f"without {PREPROCESSOR}, which says how images are prepared, only texts are read"
            logger.warning("%s: %s: %s", spec.name, spec.directory, rule)
        self.name = spec.name
        if self._vision is not None and spec.pool is None and spec.environment is not None and not spec.group:
            spec = spec._replace(pool=SharedPool())  # both towers are in the same workers
        self.dimensions = dimensions_of(checkpoint, self.recipe)
        self._ranges = None if text.ranges is None else read_ranges(Path(text.ranges), self.dimensions)
        self._spec = spec
        self._late = self._tokenizer.options.late
        if self._late is not None and text.split:
            rule = f"{spec.name}: split=True: texts of late interaction are not read in pieces: leave it out"
            raise SettingsError(rule)

    @property
    def cased(self) -> bool:
        """Whether the tokenizer distinguishes capital letters from small ones."""
        return self._tokenizer.cased

    @property
    def tasks(self) -> tuple[TextTask, ...]:
        """The tasks that the model can be called for, as its recipe gives vectors of texts, of tokens, or the numbers of a classifier; what it was made for first."""
        if self.recipe.pooling is Pooling.LOGITS:
            return (
                (TextTask.RERANK, TextTask.PREDICT)
                if self._checkpoint.architecture.labels == 1
                else (TextTask.PREDICT,)
            )
        if self._late is not None:
            return (TextTask.EMBED_ALL, TextTask.RERANK)
        if self._vision is not None:
            return (TextTask.EMBED, TextTask.RERANK)
        return tuple(_TASKS.get(pooling, TextTask.EMBED) for pooling in (self.recipe.pooling, *self.recipe.further))

    @property
    def has_small_responses(self) -> bool:
        """Whether its responses are small: it makes no vectors of tokens."""
        return self.recipe.pooling not in OF_TOKENS or self.recipe.pooling is Pooling.SPARSE

    @property
    def weights_file(self) -> Path:
        """The file with the weights, or the index of a model in parts."""
        return self._checkpoint.store.paths[0]

    @property
    def cache(self) -> Path:
        """The cache directory of its graph and of the measurement of its batches."""
        return cache_directory(self._spec.computing.cache)

    def prune(self) -> None:
        """Remove the least recently used graphs that no process uses, until the cache has at most max_cache_size bytes."""
        for folder in prune(graphs_folder(self.cache), self._spec.computing.max_cache_size):
            logger.info("%s: removed, as the cache is larger than max_cache_size", folder)

    @property
    def labels(self) -> dict[str, type[TextEncoder]]:
        """The class that computes texts, and that which computes images if it reads images, by their labels in the registry. External workers compute both:
        they attach to one socket."""
        if self._vision is None or self._spec.settings.get("executor") == "external":
            return {self.name: TextEncoder}
        return {self.name: TextTower, label_of(self.name, IMAGES): ImageTower}

    async def budget(self, label: str, progress: Progress) -> Budget | None:
        """Return the best limits of a batch on this machine, measured now if they are not known; None if they are not to be measured.

        Raises the error with which a worker fails to start.
        """
        spec, kind = self._spec, self.labels[label]
        if not spec.wants_calibration:
            return None
        params = spec.params(spec.share(MAX_TOKENS))
        settings = stated_settings(WorkerSettings, spec.settings)
        items = TextsToMeasure(self.max_length, spec.text.fixed_length, self._checkpoint.architecture.vocab_size)
        identity = self._identity()
        if kind is ImageTower:
            items = TextsToMeasure(self._image_tokens, fixed=True, image=SAMPLE)
            identity["tower"] = IMAGES
        in_one_thread = spec.computes_in_one_thread
        wanted = Measurement(kind, params, items, identity, self._run_tokens, settings, in_one_thread, progress)
        return await budget_for(wanted, self.cache / "budgets")

    def served(self, budgets: Mapping[str, Budget]) -> list[ModelToServe]:
        """Return the model for the registry with the batches of `budgets`, by label, unless the settings state others. Its tower for images is a version of it."""
        (label, kind), *towers = self.labels.items()
        found = [self._spec.served(kind, budgets.get(label))]
        for label, kind in towers:
            tower = self._spec.served(kind, budgets.get(label))
            settings = {key: value for key, value in tower.settings.items() if key not in _OF_TEXTS}
            limits = self._image_limits(budgets.get(label), settings)
            found.append(tower._replace(settings={**settings, **limits}, version=IMAGES, aliases=()))
        return found

    def _image_limits(self, budget: Budget | None, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of batches of images: as many as are measured or fit into one run, and no more bytes and pixels than one image may have beyond
        that. A stated policy that is not for such batches is replaced by greedy."""
        tokens, policy = self._image_tokens, str(stated.get("policy", GREEDY))
        most = self._spec.computing.run_tokens or self._run_tokens if budget is None else int(budget.max_batch_cost)
        largest = min(max(1, most // tokens), stated.get("max_batch_size", BatchingSettings.max_batch_size))
        try:
            if policy.endswith(BANK_FILE) or "profile=" in policy:
                raise SettingsError(f"policy={policy!r}: has the times of batches of texts")
            load_policy(policy, max_batch_size=largest)
        except SettingsError as error:
            logger.info("%s: images are served by policy=%s: %s", self.name, GREEDY, error.message)
            policy = GREEDY
        cost = float(largest * tokens + most_decoding(self._spec.images))
        return {"max_batch_size": largest, "max_batch_cost": cost, "policy": policy}

    @property
    def _image_tokens(self) -> int:
        assert self._vision is not None  # its label is there
        return self._vision.image_tokens

    def _identity(self) -> dict[str, Any]:
        """Return what decides the speed of the model, as JSON: the settings that affect it, the threads, the executor and the content."""
        spec = self._spec
        executor = spec.settings.get("executor", "process")
        own = {"threads": spec.threads, "executor": executor, "content": self._checkpoint.content_hash()}
        return {**that_affect_speed(spec.text), **that_affect_speed(spec.computing), **own}

    @property
    def _run_tokens(self) -> int:
        """The most tokens of a run of the network, unless a setting or a measurement states another number."""
        return RUN_TOKENS_GPU if may_use_gpu(self._spec.computing.device_map) else RUN_TOKENS_CPU

    def run_shapes(self, share: WorkerShare) -> RunShapes:
        """Return how workers with this share divide batches into runs, to count the padding."""
        run_tokens = self._spec.computing.run_tokens or share.run_tokens or self._run_tokens
        cut = partial(runs, run_tokens=run_tokens, padding_cost=share.padding_cost)
        return RunShapes(cut, self.max_length if self._spec.text.fixed_length else 0, share.padding_cost)

    def inference(self, context: "EmbeddingContext", encoder: Encoder) -> TextInference:
        """Return the inference of the model for protocols that are not made for texts. It encodes with `encoder`."""
        tokens = next(
            (pooling for pooling in self.recipe.further if pooling in OF_TOKENS and pooling is not Pooling.SPARSE), None
        )
        size = (
            0
            if tokens is None
            else dimensions_of(self._checkpoint, replace(self.recipe, pooling=tokens, joined=(), dimensions=None))
        )
        return TextInference(context, encoder, of_tokens=self.recipe.pooling in OF_TOKENS, size_of_tokens=size)

    def encoder(
        self,
        service: "ModelHandle",
        budgets: Mapping[str, Budget],
        fronts: int = 1,
        images: "ModelHandle | None" = None,
    ) -> Encoder:
        """Return the encoder of the model over `service`, which has the batches of `budgets`, and over `images`; for these and `fronts` see Encoder."""
        dense = self._checkpoint.dense and self.recipe.pooling not in OF_TOKENS
        whole = dimensions_of(self._checkpoint, replace(self.recipe, dimensions=None))
        max_pooled = None if dense else max_pooled_places(self.recipe.poolings, whole)[: self.dimensions]
        text, known = self._spec.text, [budgets.get(label) for label in (self.name, label_of(self.name, IMAGES))]
        speeds = [0.0 if budget is None else budget.tokens_per_second for budget in known]
        shape = TextShape(
            self.dimensions, self.max_length, text.truncate, text.split, self.recipe.normalize,
            self.max_length if text.fixed_length else 1, max_pooled, self.recipe.pooling in OF_TOKENS, *speeds,
        )  # fmt: skip
        vision, facts = self._vision, self._facts(lambda: encoder.services)  # others once they are loaded again
        read_image = None if vision is None else partial(_looked, vision.image_tokens, self._spec.images)
        threads = TokenizerThreads(self._tokenizer, look=read_image)
        encoder: Encoder = Encoder(service, threads, shape, name=self.name, facts=facts, fronts=fronts, images=images)
        return encoder

    def _facts(self, services: Callable[[], Sequence["ModelHandle"]]) -> TextFacts:
        pooling, vision = self.recipe.pooling, self._vision
        return TextFacts(
            id=self._spec.repository, listed=self._spec.listed,
            tasks=self.tasks, outputs=tuple(map(TextOutput, poolings_of(self.recipe))), labels=self._checkpoint.labels if pooling in _LABELLED else (),
            independent_labels=self._checkpoint.independent_labels, prompts=self._checkpoint.prompts, pooling="+".join(each.value for each in self.recipe.poolings),
            dtype=_DTYPES.get(self._spec.computing.dtype or "", _DTYPES[self.recipe.precision.value]), device="gpu" if may_use_gpu(self._spec.computing.device_map) else "cpu",
            truncates=self._spec.text.truncate, similarity=self._checkpoint.layout.similarity, ranges=self._ranges, use=_Use(services, self._spec.threads), unscaled=not self.recipe.normalize,
            waiting=lambda: sum([int(each.control.state(brief=True)["waiting"]) for each in services()]), ready=lambda: not any(each.not_ready_reason for each in services()),
            vision=None if vision is None else VisionFacts(vision.logit_scale, vision.logit_bias or 0.0, vision.logit_bias is not None),
        )  # fmt: skip


# A base model takes about as long for a token as Pillow takes to decode and resize so many pixels of the costliest files, on the same CPU. A byte of the file
# counts as a pixel, so that the cost of a batch bounds its memory, too.
_PIXELS_OF_A_TOKEN = 65_536


def most_decoding(limits: ImageLimits) -> float:
    """Return the most that the decoding of an image costs, in tokens."""
    return limits.max_image_pixels / _PIXELS_OF_A_TOKEN


def _looked(tokens: int, limits: ImageLimits, picture: Picture) -> EncodedImage | InvalidRequest:
    """Return the item of a picture, for which `tokens` are computed, or what its header breaks of `limits`."""
    try:
        header = look(picture.data, limits)
    except InvalidRequest as error:
        return error
    decoding = (header.pixels + len(picture.data)) / _PIXELS_OF_A_TOKEN
    return EncodedImage(picture.data, tokens, min(decoding, most_decoding(limits)))


def described(checkpoint: "Checkpoint", recipe: Recipe, text: TextSettings) -> str:
    """Return which layer and pooling are served, and why, as a line for the log."""
    poolings = "+".join(each.value for each in recipe.poolings)
    if recipe.pooling in (*WITH_CLASSIFIER, *WITH_HEAD):
        served = f"serves the {poolings} of its head"
    elif checkpoint.onnx is not None:
        served = f"serves {poolings} of the vectors of tokens in {checkpoint.onnx.path.name}"
    else:
        layers = "the last layer" if recipe.layers == (-1,) else f"layers {', '.join(map(str, recipe.layers))}"
        served = f"pools {layers} by {poolings}"
    if text.pooling is not None:
        return f"{served}, as --pooling states"
    if checkpoint.poolings:
        return f"{served}, as its modules.json states"
    if checkpoint.judges:
        stated = (
            "its modules.json states"
            if checkpoint.layout.answers
            else "a reranker that is a language model answers; --pooling sep makes vectors"
        )
        return f"{served}, as {stated}"
    if checkpoint.pooling_of_head is not None:
        return f"{served}, as its files state"
    whose = "as sentence-transformers does" if recipe.layers == (-1,) else "as --bare-layer or --layers states"
    more = "; if it is a reranker, --pooling yes-no scores pairs" if recipe.pooling is Pooling.SEP else ""
    return f"{served}, {whose}: its files state no pooling, which --pooling and --layers choose{more}"


# Seconds in which what workers take is not measured again: the kernel counts all pages of a process each time.
_USE_IS_NEWS = 1.0


class _Use:
    """Returns what the workers of `services`, which may be the same, take, as it was at most _USE_IS_NEWS seconds ago."""

    def __init__(self, services: Callable[[], Sequence["ModelHandle"]], threads: int) -> None:
        self._services = services
        self._threads = threads
        self._at = -_USE_IS_NEWS
        self._memory: dict[int, int | None] = {}

    def __call__(self) -> WorkersUse:
        now = time.monotonic()
        services = self._services()
        workers = [each for service in services for each in service.control.state(brief=True)["workers"]]
        pids = dict.fromkeys(each["pid"] for each in workers if each["pid"] is not None)
        if now - self._at >= _USE_IS_NEWS or pids.keys() != self._memory.keys():
            self._at, self._memory = now, {pid: memory_of(pid) for pid in pids}
        memory = [bytes_of for bytes_of in self._memory.values() if bytes_of is not None]
        return WorkersUse(services[0].control.workers.most_workers, self._threads, memory)


# What a model with one of these poolings can be called for.
_TASKS = {
    Pooling.NONE: TextTask.EMBED_ALL,
    Pooling.TOKENS: TextTask.EMBED_ALL,
    Pooling.SPARSE: TextTask.EMBED_SPARSE,
    Pooling.TOKEN_LOGITS: TextTask.PREDICT_TOKENS,
    Pooling.YES_NO: TextTask.RERANK,
}
_OF_TEXTS = ("max_batch_cost", "padded", "max_padding", "padding_cost")  # settings
_LABELLED = (Pooling.LOGITS, Pooling.TOKEN_LOGITS)
# What TEI and torch call the numbers of a precision, or of a variant of an ONNX file.
_DTYPES = {
    "fp32": "float32", "fp16": "float16", "float16": "float16", "bf16": "bfloat16",
    "int8": "int8", "uint8": "uint8", "q8": "int8", "q4": "q4", "q4f16": "q4f16", "bnb4": "bnb4",
}  # fmt: skip
