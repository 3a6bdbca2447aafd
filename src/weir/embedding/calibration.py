"""Measures a model of texts on this machine, to know how large its batches should be; keeps what it has found.

On CPUs the best is often one text at a time, on GPUs thousands of tokens: so it is measured, in a worker like those that will serve, in a few
seconds, at the first start with this model on this machine.
"""

import hashlib
import json
import os
import platform
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from weir.embedding.budget import MAX_ROWS, Budget, Timed, choose
from weir.embedding.texts import Tokens
from weir.manager.service import Service
from weir.messages import Dispatch, Timing
from weir.model import Model
from weir.profiling.machine import cpu_name
from weir.telemetry.silent import SilentObserver

VERSION = 2  # of the way of measuring: what was found otherwise is measured anew
LENGTHS = (16, 64, 256)  # of texts: a sentence, a paragraph, a page
MOST_TOKENS = 32_768  # in a batch
ENOUGH_SECONDS, LONGEST_SECONDS = 0.1, 0.3  # for one size: so long it is repeated; a size that takes longer is the last
REPEATS = 5
CLEARLY_WORSE = 0.85  # of the best throughput: after two sizes below that, larger ones are not tried

MOST_KEPT = 1000  # measurements; those that were used least recently go

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
    fixed: bool = False, vocabulary: int = 100, progress: Progress = nothing, **settings: Any,
) -> Budget:  # fmt: skip
    """Return the best batches of `model` on this machine: what `folder` has kept, else measured now.

    `params` are the model's, but for those that cut batches into runs: it has to run each batch as one. `identity`, a JSON-able dict, says what is
    measured: the hash of the model's content, what is computed of it, on what. Ids of tokens are below `vocabulary`, texts at
    most `max_length` long, or with `fixed` all so long. `settings` are those of workers. `progress` is told a share and what is measured. Raises what the start of the
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
    measured = [timed async for timed in _measure(model, params, sizes, vocabulary, progress, settings)]
    budget = choose(measured)
    _keep(kept, {"budget": asdict(budget), "identity": dict(identity), "measured": measured})
    return budget


def _key(identity: Mapping[str, Any]) -> str:
    """Name what was measured, and where."""
    decides = [VERSION, dict(identity), platform.machine(), cpu_name(), len(os.sched_getaffinity(0)), _version()]
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
    model: type[Model], params: Mapping[str, Any], lengths: list[int], vocabulary: int, progress: Progress, settings: dict[str, Any]
) -> AsyncIterator[Timed]:  # fmt: skip
    """Yield how long batches of each size take, smaller ones first."""
    heard = _Heard()
    chosen: dict[str, Any] = {
        "max_batch_size": MAX_ROWS, "max_queue_size": 2 * MAX_ROWS, "timeout": 600.0, "policy": "greedy",
        "workers": 1, "pipeline_depth": 1, "padded": False,
    }  # fmt: skip
    async with Service(model, params=dict(params), observers=[heard], **(settings | chosen)) as service:
        progress(0.0, "warming up")
        await _run(service, heard, 1, lengths[-1], vocabulary)
        for number, length in enumerate(lengths):
            best, worse, rows = 0.0, 0, 1
            while worse < 2 and rows <= MAX_ROWS and rows * length <= MOST_TOKENS:
                progress((number + rows.bit_length() / 10) / len(lengths), f"{rows} x {length} tokens")
                timed = await _time(service, heard, rows, length, vocabulary)
                yield timed
                speed = rows * length / timed.seconds
                worse = worse + 1 if speed < CLEARLY_WORSE * best else 0
                best = max(best, speed)
                rows = 2 * rows if timed.seconds < LONGEST_SECONDS else MAX_ROWS + 1
    progress(1.0, "done")


async def _time(service: Service, heard: _Heard, rows: int, length: int, vocabulary: int) -> Timed:
    """Return the least time of a few: what else the machine does only adds to it."""
    least, spent = float("inf"), 0.0
    for repeat in range(REPEATS):
        if repeat > 1 and spent > ENOUGH_SECONDS:
            break
        await _run(service, heard, rows, length, vocabulary, repeat)
        spent += heard.seconds
        least = min(least, heard.seconds)
    return Timed(rows, length, max(least, 1e-9))


async def _run(service: Service, heard: _Heard, rows: int, length: int, vocabulary: int, seed: int = 0) -> None:
    ids = np.random.default_rng(seed).integers(0, vocabulary, (rows, length), np.int32).astype("<i4")
    await service.infer_many([Tokens(text.tobytes()) for text in ids])
