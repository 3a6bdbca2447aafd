"""Sentence vectors on a GPU, in half precision: one sentence a request, beside the same runtime without a server.

`python -m benchmarks.gpu_vectors [--rounds N] [--seconds S] [--runtime onnx|torch] [--model DIRECTORY]` needs an NVIDIA GPU, and
onnxruntime-gpu or torch; it says so where there is none. bert-as-service tells of 900 sentences/s on one Tesla M40 (BERT base, 20 tokens).
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.result import count, middle, ratio, spread
from benchmarks.harness.servers import Server, ask_own, load, require_wrk
from benchmarks.harness.texts import described, model_directory, sample, serving_texts, weir_texts, write_bodies
from weir.errors import SettingsError
from weir.profiling.energy import find_nvml

CLIENTS = (1, 64, 256)
OLD = 900  # sentences/s of bert-as-service on one GPU
PRECISION, DEVICE = "fp16", "0"


def main() -> int:
    """Measure, or say what is missing and return 1."""
    asked = _arguments()
    if (missing := _missing(asked.runtime)) is not None:
        print(f"benchmarks.gpu_vectors: nothing was measured: {missing}", file=sys.stderr)
        return 1
    require_wrk()
    console, texts = Console(), sample()
    directory = asked.model or model_directory()
    flags = ("--runtime", asked.runtime, "--precision", PRECISION, "--device-map", DEVICE)
    rates: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, serving_texts("Weir", weir_texts(directory, *flags)) as server:
        bodies = write_bodies(texts, Path(folder) / "bodies")
        for _ in range(asked.rounds):
            for clients in CLIENTS:
                rates[f"{clients} clients"].append(_rate(server, clients, asked.seconds, bodies))
            rates["without a server"].append(_offline(asked, directory))
    table = Table("", "sentences/s")
    for name, seen in rates.items():
        table.add_row(name, spread(seen, count))
    console.print(table)
    best = rates[f"{CLIENTS[-1]} clients"]
    console.print(
        f"{ratio(best, rates['without a server']):.2f} of the runtime without a server (wished: 0.95 or more)"
    )
    console.print(f"{middle(best):,.0f} sentences/s (bert-as-service: {OLD} on one GPU)")
    console.print(described(texts), soft_wrap=True)
    return 0


def _missing(runtime: str) -> str | None:
    """Say what is missing, if anything is."""
    try:
        find_nvml()
    except SettingsError as error:
        return f"there is no GPU here: {error.message}"
    if runtime == "torch":
        return None if find_spec("torch") else "torch is not installed (pip install torch)"
    from weir.embedding.runtime.onnx import has_cuda

    return None if has_cuda() else "this onnxruntime does not compute on GPUs (pip install onnxruntime-gpu)"


def _rate(server: Server, clients: int, seconds: float, bodies: Path) -> float:
    done = load(server.url, clients, seconds, bodies=bodies)
    if done.refused or done.broken:
        raise RuntimeError(f"{clients} clients: {done}")
    return done.rate


def _offline(asked: argparse.Namespace, directory: Path) -> float:
    told = (PRECISION, 1, 1, asked.seconds, DEVICE, asked.runtime, directory)
    return float(max(ask_own("parts.vectors", *told).values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.gpu_vectors", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="alternated rounds, of which the median counts")
    parser.add_argument("--seconds", type=float, default=6.0, help="of load, each time")
    parser.add_argument("--runtime", choices=("onnx", "torch"), default="torch", help="what computes")
    parser.add_argument("--model", type=Path, help="the model's directory (default: the small one)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
