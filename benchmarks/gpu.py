"""The solved policy on a GPU: a transformer of BERT base's size, its energy read from NVIDIA's counter.

`python -m benchmarks.gpu [--rounds N] [--seconds S]` needs torch and a GPU; it says so where there is none. It prints
the profile and the load sweep, and writes gpu.profile.toml and gpu.md into the working directory.
"""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

import weir
from benchmarks.gpu_model import TOKENS, WORDS
from benchmarks.harness.result import Result, Run
from benchmarks.harness.sweep import Meter, Sweep, sweep
from weir.errors import SettingsError
from weir.policy.cost.profile import Profile
from weir.profiling.energy import find_nvml

MODEL = "benchmarks.gpu_model:Encoder"
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


def main() -> int:
    """Measure, or say what is missing and return 1."""
    asked = _arguments()
    if find_spec("torch") is None:
        return _missing("torch is not installed (pip install torch)")
    try:
        meter = find_nvml()
    except SettingsError as error:
        return _missing(error.message)
    console = Console()
    console.print(f"GPU: {meter.name}")
    profile = weir.profile(MODEL, max_batch_size=LARGEST, seconds=asked.profile_seconds)
    Path("gpu.profile.toml").write_text(profile.to_toml())
    run = Run(asked.rounds, asked.seconds, lambda text: console.print(f"[dim]{text}[/]"))
    result = measure(run, profile, LOADS, FLAGS, meter.read_mj)
    show(console, result)
    return 0


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
    table = Table(*result.columns)
    for row in result.rows:
        table.add_row(*row)
    console.print(table)
    head = ["| " + " | ".join(result.columns) + " |", "|" + " --- |" * len(result.columns)]
    rows = ["| " + " | ".join(row) + " |" for row in result.rows]
    goals = [f"- {text}: {seen} ({'yes' if met == 'yes' else 'NO'})" for text, seen, met in result.goals]
    Path("gpu.md").write_text("\n".join([*head, *rows, "", *goals, *result.notes]) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("benchmarks.gpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="alternated rounds")
    parser.add_argument("--seconds", type=float, default=5.0, help="a quarter of each round's load")
    parser.add_argument("--profile-seconds", type=float, default=240.0, help="to measure the model")
    return parser.parse_args()


def _missing(what: str) -> int:
    print(f"benchmarks.gpu: nothing was measured: {what}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
