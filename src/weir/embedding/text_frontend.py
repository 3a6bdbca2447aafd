"""What the server itself must know of a model of texts: its tokenizer, its sizes. The workers have the weights."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weir.embedding.budget import Budget
from weir.embedding.calibration import Progress, budget_for
from weir.embedding.checkpoint.reading import read_for
from weir.embedding.deputy import TextDeputy
from weir.embedding.encoder import Encoder
from weir.embedding.model_spec import Said
from weir.embedding.padding import runs
from weir.embedding.padding_metrics import Computing
from weir.embedding.pieces import highest_places
from weir.embedding.prompts import prompt_of_server
from weir.embedding.recipe import OF_LAST_LAYER, Pooling, chosen_recipe, dimensions_in
from weir.embedding.rounds import MOST_TOKENS
from weir.embedding.runtime.devices import may_use_gpu
from weir.embedding.tokens.options import TokenizerOptions
from weir.errors import SettingsError

if TYPE_CHECKING:
    from weir.embedding.calling import EmbeddingContext
    from weir.serving.service import Service

logger = logging.getLogger("weir")

# What a worker that is measured has in common with those that will serve.
_OF_WORKERS = ("executor", "env", "cpu_affinity", "threads", "start_timeout", "predict_timeout")


class Front:
    """Read from the model's directory. Raises SettingsError naming the file, or the setting, and the rule."""

    def __init__(self, said: Said) -> None:
        text = said.text
        checkpoint = read_for(said.computing.runtime, said.directory)
        if text.max_length is not None and text.max_length > checkpoint.architecture.max_length:
            raise SettingsError(
                f"{said.name}: max_length={text.max_length}: the model reads at most {checkpoint.architecture.max_length} tokens"
            )
        self.name = said.name
        self.recipe = chosen_recipe(
            checkpoint, pooling=text.pooling, layers=text.layers or None, mask_special=text.mask_special,
            positions=text.positions, normalize=text.normalize, dimensions=text.dimensions,
            precision=said.computing.precision, window=text.window,
        )  # fmt: skip
        chosen = text.layers or checkpoint.layout.pooled or self.recipe.pooling in OF_LAST_LAYER
        if checkpoint.architecture.layers == 1 and not chosen:
            logger.info(
                "%s: has 1 layer, which is pooled; of models with more it is the second-to-last (--layers)", said.name
            )
        self.dimensions = dimensions_in(checkpoint, self.recipe)
        self.max_length = text.max_length or checkpoint.max_length
        self._said = said
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

        chosen = self._said.computing.cache
        return Path(chosen) if chosen else cache_directory()

    def prune(self) -> None:
        """Remove graphs that are more than its cache may have, and that nobody uses."""
        from weir.embedding.graph.cache import graphs_in, prune

        for folder in prune(graphs_in(self.cache), self._said.computing.max_cache_size):
            logger.info("%s: removed, as there is more than max_cache_size", folder)

    async def budget(self, progress: Progress) -> Budget | None:
        """Return how large batches should be on this machine, measured if nobody has before; None where nobody wants to know."""
        from weir.embedding.model import TextEncoder

        said = self._said
        if not said.wants_calibration:
            return None
        params = said.params(MOST_TOKENS)
        settings = {key: said.settings[key] for key in _OF_WORKERS if key in said.settings}
        return await budget_for(
            TextEncoder, params, identity=self._identity(), max_length=self.max_length,
            safe_tokens=self._run_tokens, fixed=said.text.fixed_length, folder=self.cache / "budgets",
            vocabulary=self._checkpoint.architecture.vocab_size, progress=progress, **settings,
        )  # fmt: skip

    def _identity(self) -> dict[str, Any]:
        """Say what is measured: not where it lies, and not what leaves its speed as it is."""
        params = self._said.params()
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
        executor = self._said.settings.get("executor", "process")
        return {**params, "content": self._checkpoint.content_hash(), "executor": executor}

    @property
    def _run_tokens(self) -> int:
        """How many tokens workers compute at once where nothing is said and nothing was measured."""
        from weir.embedding.model import RUN_TOKENS_CPU, RUN_TOKENS_GPU

        return RUN_TOKENS_GPU if may_use_gpu(self._said.computing.device_map) else RUN_TOKENS_CPU

    def computing(self, run_tokens: int | None, padding_cost: float) -> Computing:
        """Return how workers that compute so many tokens at once (None: their own number), where padding counts `padding_cost` times, cut batches
        into runs, for what counts padding."""
        run_tokens = self._run_tokens if run_tokens is None else run_tokens
        cut = partial(runs, run_tokens=run_tokens, padding_cost=padding_cost)
        return Computing(cut, self.max_length if self._said.text.fixed_length else 0, padding_cost)

    def deputy(self, site: "EmbeddingContext", encoder: Encoder) -> TextDeputy:
        """Return what answers for the model, by `encoder`, at the doors that are not those of texts."""
        return TextDeputy(site, encoder, of_tokens=self.recipe.pooling is Pooling.NONE)

    def encoder(self, service: "Service", budget: Budget | None = None) -> Encoder:
        """Return what encodes texts by `service`, whose batches were measured for `budget`."""
        dense = self._checkpoint.dense and self.recipe.pooling is not Pooling.NONE
        whole = dimensions_in(self._checkpoint, replace(self.recipe, dimensions=None))
        highest = None if dense else highest_places(self.recipe.poolings, whole)[: self.dimensions]
        return Encoder(
            service, self._tokenizer, dimensions=self.dimensions, max_length=self.max_length, name=self.name,
            truncate=self._said.text.truncate, split=self._said.text.split, normalize=self.recipe.normalize,
            fixed_length=self.max_length if self._said.text.fixed_length else None, prompts=self._checkpoint.prompts, highest=highest,
            tokens_per_second=0.0 if budget is None else budget.tokens_per_second, of_tokens=self.recipe.pooling is Pooling.NONE,
        )  # fmt: skip
