"""Measures a model of texts on this machine, to know how large its batches should be; keeps what it has found.

On CPUs the best is often one text at a time, on GPUs thousands of tokens: so it is measured, in a worker like those that will serve, in a few
seconds, at the first start with this model on this machine.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from weir.embedding.budget import MAX_ROWS, Budget, choose, safe
from weir.embedding.rounds import Rounds, Size
from weir.embedding.texts import Tokens
from weir.messages import Dispatch, Timing
from weir.model import Model
from weir.profiling.machine import cpu_name
from weir.serving.service import Service
from weir.telemetry.silent import SilentObserver
from weir.workers.launch import available_cpus

VERSION = 4  # of the way of measuring: what was found otherwise is measured anew
LENGTHS = (16, 64, 256)  # of texts: a sentence, a paragraph, a page

MOST_KEPT = 1000  # measurements; those that were used least recently go

logger = logging.getLogger("weir")

Progress = Callable[[float, str], None]


def nothing(share: float, what: str) -> None:
    """Show no progress."""


class _Heard(SilentObserver):
    """Remembers how long the last batch took, to its worker and back."""

    seconds = 0.0

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        self.seconds = dispatch.seconds


async def budget_for(
    model: type[Model], params: Mapping[str, Any], *, identity: Mapping[str, Any], max_length: int, folder: Path,
    safe_tokens: int, fixed: bool = False, vocabulary: int = 100, progress: Progress = nothing, **settings: Any,
) -> Budget:  # fmt: skip
    """Return the best batches of `model` on this machine: what `folder` has kept, else measured now.

    `params` are the model's, but for those that cut batches into runs: it has to run each batch as one. `identity`, a JSON-able dict, says what is
    measured: the hash of the model's content, what is computed of it, on what. Ids of tokens are below `vocabulary`, texts at
    most `max_length` long, or with `fixed` all so long. What was measured while the machine did other things is neither used nor kept: batches
    of `safe_tokens` are the answer then. `settings` are those of workers. `progress` is told a share and what is measured. Raises what the start of the
    model's worker raises. A folder that cannot be written to is no failure: it is measured again the next time.
    """
    kept = folder / f"{_key(identity)}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        budget = Budget(**json.loads(kept.read_text())["budget"])
        with suppress(OSError):  # of another user
            os.utime(kept)
        return budget
    lengths = [] if fixed else [length for length in LENGTHS if length <= max_length]
    sizes = lengths or [max_length]
    progress(0.0, "starting a worker")  # which makes the graph, if there is none yet
    rounds = await _measure(model, params, Rounds(sizes, mixed=not fixed), sizes[-1], vocabulary, progress, settings)
    if not rounds.agree:
        logger.warning(
            "the machine did other things while batches were measured: of %s tokens until they are measured at the next start",
            safe_tokens,
        )
        return safe(safe_tokens)
    measured = rounds.timed()
    budget = choose(measured)
    _keep(kept, {"budget": asdict(budget), "identity": dict(identity), "measured": measured})
    return budget


def _key(identity: Mapping[str, Any]) -> str:
    """Name what was measured, and where."""
    decides = [VERSION, dict(identity), platform.machine(), cpu_name(), len(available_cpus()), _version()]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def _version() -> str:
    try:
        return version("onnxruntime")
    except PackageNotFoundError:
        return ""


def _keep(file: Path, found: dict[str, Any]) -> None:
    made = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps(found))
        os.replace(made, file)
        for old in sorted(file.parent.iterdir(), key=_used)[:-MOST_KEPT]:
            old.unlink(missing_ok=True)


def _used(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


async def _measure(
    model: type[Model], params: Mapping[str, Any], rounds: Rounds, longest: int, vocabulary: int, progress: Progress,
    settings: dict[str, Any],
) -> Rounds:  # fmt: skip
    """Fill `rounds`, and return them."""
    heard = _Heard()
    chosen: dict[str, Any] = {
        "max_batch_size": MAX_ROWS, "max_queue_size": 2 * MAX_ROWS, "timeout": 600.0, "policy": "greedy",
        "workers": 1, "pipeline_depth": 1, "padded": False,
    }  # fmt: skip
    async with Service(model, params=dict(params), observers=[heard], **(settings | chosen)) as service:
        progress(0.0, "warming up")
        await _run(service, Size(1, longest), vocabulary)
        seed = 0
        while due := rounds.due():
            for size in due:
                progress(rounds.share, _told(size))
                seed += 1
                await _run(service, size, vocabulary, seed)
                rounds.note(size, heard.seconds)
    progress(1.0, "done")
    return rounds


async def _run(service: Service, size: Size, vocabulary: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    texts = [random.integers(0, vocabulary, length, np.int32).astype("<i4") for length in size.lengths]
    await service.infer_many([Tokens(text.tobytes()) for text in texts])


def _told(size: Size) -> str:
    return f"{size.rows} x {size.length} tokens" + (f", {size.shorter} of them shorter" if size.shorter else "")
