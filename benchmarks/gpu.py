"""Weir on a GPU. Both need an NVIDIA GPU and say so where there is none.

`python -m benchmarks.gpu [--rounds N] [--seconds S]` solves a policy for a transformer of BERT base's size, its energy read from NVIDIA's counter, and
sweeps the load. It needs torch, prints the profile and the sweep, and writes gpu.profile.toml and gpu.md into the working directory.

`python -m benchmarks.gpu vectors [--runtime onnx|torch] [--model DIRECTORY]` measures sentence vectors in half precision: one sentence a request, beside
the same runtime without a server. bert-as-service tells of 900 sentences/s on one Tesla M40 (BERT base, 20 tokens).
"""

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

import weir
from benchmarks.harness.result import Result, Run, markdown, middle, ratio
from benchmarks.harness.rounds import Measurements, Rounds, folder, of_load, spreads
from benchmarks.harness.servers import ask_own, load, require_wrk
from benchmarks.harness.texts import described, model_directory, sample, serving_texts, weir_texts, write_bodies
from benchmarks.models import TOKENS, WORDS
from benchmarks.parts.embedding import Meter, Sweep, sweep
from weir.errors import SettingsError
from weir.policy.cost import Profile
from weir.profiling.machine import find_nvml

MODEL = "benchmarks.models:Encoder"
LARGEST = 64
FLAGS = ("--max-batch-size", str(LARGEST), "--max-queue-delay", "3")
RULES = {
    "greedy": "greedy",
    "full batches of 64": "full",
    "8 or 5 ms": "size-or-delay:size=8,delay=5ms",
    "32 or 10 ms": "size-or-delay:size=32,delay=10ms",
    "64 or 50 ms": "size-or-delay:size=64,delay=50ms",
}
LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)


CLIENTS = (1, 64, 256)
OLD = 900  # sentences/s of bert-as-service on one GPU
PRECISION, DEVICE = "fp16", "0"


def main() -> int:
    """Measure, or say what is missing and return 1."""
    asked = _arguments()
    missing = _missing(asked.what == "vectors", asked.runtime)
    if missing is not None:
        print(f"benchmarks.gpu: nothing was measured: {missing}", file=sys.stderr)
        return 1
    console = Console()
    run = Run(asked.rounds, asked.seconds, lambda text: console.print(f"[dim]{text}[/]"))
    if asked.what == "vectors":
        require_wrk()
        result = vectors(asked.runtime, asked.model or model_directory()).measure(run)
        result.print(console)
        console.print(*result.notes, soft_wrap=True)
        return 0
    meter = find_nvml()
    console.print(f"GPU: {meter.name}")
    profile = weir.profile(MODEL, max_batch_size=LARGEST, seconds=asked.profile_seconds)
    Path("gpu.profile.toml").write_text(profile.to_toml())
    show(console, measure(run, profile, LOADS, FLAGS, meter.read_mj))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.gpu", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("sweep", "vectors"), default="sweep")
    parser.add_argument("--rounds", type=int, default=5, help="alternated rounds, of which the median counts")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of load, each time; of a sweep a quarter of each round's"
    )
    parser.add_argument("--profile-seconds", type=float, default=240.0, help="to measure the model")
    parser.add_argument("--runtime", choices=("onnx", "torch"), default="torch", help="what computes vectors")
    parser.add_argument("--model", type=Path, help="the directory of the model of vectors (default: the small one)")
    return parser.parse_args()


def _missing(vectors: bool, runtime: str) -> str | None:
    """Say what is missing, if anything is."""
    if (not vectors or runtime == "torch") and find_spec("torch") is None:
        return "torch is not installed (pip install torch)"
    try:
        find_nvml()
    except SettingsError as error:
        return error.message
    if vectors and runtime == "onnx":
        from weir.text_models.runtime.onnx import has_cuda

        return None if has_cuda() else "this onnxruntime does not compute on GPUs (pip install onnxruntime-gpu)"
    return None


def measure(
    run: Run, profile: Profile, loads: tuple[float, ...], flags: tuple[str, ...], meter: Meter | None
) -> Result:
    """Solve with a price of 1 per ms and 1 per W, and sweep the loads."""
    with TemporaryDirectory() as folder:
        items = Path(folder) / "items.jsonl"
        ids = [[(7 * row + 13 * place) % WORDS for place in range(TOKENS)] for row in range(64)]
        items.write_text("".join(json.dumps(each) + "\n" for each in ids))
        asked = Sweep(MODEL, "/infer/encoder", items, flags, RULES, loads, meter)
        return sweep(run, asked, weir.solve(profile))


def show(console: Console, result: Result) -> None:
    """Print the table, and write it as gpu.md."""
    result.print(console)
    goals = [f"- {text}: {seen} ({'yes' if met == 'yes' else 'NO'})" for text, seen, met in result.goals]
    Path("gpu.md").write_text("\n".join([markdown(result.columns, result.rows), "", *goals, *result.notes]) + "\n")


OFFLINE = "without a server"


def vectors(runtime: str, directory: Path) -> Rounds:
    """Return the comparison of a server of sentence vectors with its runtime."""
    return Rounds(
        "gpu-vectors",
        "Sentence vectors on a GPU",
        "One sentence a request, in half precision, beside the same runtime without a server.",
        start=partial(_start_vectors, runtime, directory),
        one=_vector_rate,
        contenders=("Weir", OFFLINE),
        cases=(*CLIENTS, ""),
        takes_part=lambda name, clients: (name == OFFLINE) == (clients == ""),
        heads=("clients", "server"),
        columns=(spreads("sentences/s"),),
        conclude=_conclude_vectors,
        progress=("rate", "{:,.0f} sentences/s".format),
    )


def _start_vectors(runtime: str, directory: Path, stack: ExitStack) -> Mapping[str, Any]:
    flags = ("--runtime", runtime, "--precision", PRECISION, "--device-map", DEVICE)
    server = stack.enter_context(serving_texts("Weir", weir_texts(directory, *flags)))
    return {"Weir": (server, write_bodies(sample(), folder(stack) / "bodies")), OFFLINE: (None, (runtime, directory))}


def _vector_rate(contender: Any, clients: Any, seconds: float) -> dict[str, float]:
    server, given = contender
    if server is None:
        return {"rate": max(ask_own("parts.vectors", PRECISION, 1, 1, seconds, DEVICE, *given).values())}
    return of_load(load(server.url, clients, seconds, bodies=given), server)


def _conclude_vectors(result: Result, measured: Measurements) -> None:
    offline, best = measured.of(OFFLINE), measured.of("Weir", CLIENTS[-1])
    share = ratio(best, offline)
    result.at_least("at least 0.95 of the runtime without a server", share, 0.95)
    result.notes.append(f"{middle(best):,.0f} sentences/s (bert-as-service: {OLD} on one GPU). {described(sample())}")


if __name__ == "__main__":
    sys.exit(main())
