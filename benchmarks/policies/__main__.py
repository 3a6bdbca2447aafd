"""`python -m benchmarks.policies [NAME...] [--seeds N] [--requests N]`; without names, all. `report` only writes the page."""

import argparse
import os
import platform
from importlib.metadata import version

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is loaded: its threads spin while they wait

from rich.console import Console

from benchmarks.harness.result import commit, progress_bar, rich_table
from benchmarks.policies import bursts, devices, foreseen, scenarios, served_pairs, uneven
from benchmarks.policies.harness import FIRST_SEED, Comparison, Effort, draw, keep, write_page

IN_ORDER = (
    scenarios.DAY,
    scenarios.RATES,
    scenarios.FOREIGN,
    scenarios.CREW,
    scenarios.PROMISE,
    scenarios.IN_TIME,
    scenarios.OVERLOAD,
    scenarios.SILENCES,
    bursts.BURSTS,
    bursts.RANDOM_BURSTS,
    foreseen.FORESEEN,
    devices.DEVICE,
    devices.DEVICE_LIVE,
    devices.DEVICE_TRACES,
    devices.DEVICE_DEADLINES,
    uneven.UNEVEN,
    served_pairs.SERVED_PAIRS,
    served_pairs.SERVED_TRACES,
    scenarios.EXTREMES,
)
COMPARISONS = {each.name: each for each in IN_ORDER}


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser("benchmarks.policies", description=__doc__)
    parser.add_argument(
        "what", nargs="*", choices=[*COMPARISONS, "report", []], metavar="NAME", help=", ".join(COMPARISONS)
    )
    parser.add_argument("--seeds", type=int, default=8, help="independent lines of arrivals")
    parser.add_argument("--requests", type=int, default=50_000, help="of each line")
    asked = parser.parse_args()
    console = Console()
    for name, comparison in COMPARISONS.items():
        if not asked.what or name in asked.what:
            _play(console, comparison, asked.seeds, asked.requests)
    draw()
    write_page()


def _play(console: Console, comparison: Comparison, seeds: int, requests: int) -> None:
    with progress_bar(console) as progress:
        task = progress.add_task(comparison.title, total=comparison.steps(seeds))
        compared = comparison.compare(Effort(seeds, requests, lambda text: progress.advance(task)))
    console.print(rich_table(compared.columns, compared.rows, comparison.title))
    versions = f"weir-serving {version('weir-serving')} ({commit()}), Python {platform.python_version()}, numpy {version('numpy')}"
    lines = f"seeds {FIRST_SEED} to {FIRST_SEED + seeds - 1}, {requests:,} requests each"
    about = {} if comparison.exact else {"lines": lines, "intervals": "95 %, over the lines"}
    keep(comparison.name, compared, {**about, "versions": versions})


if __name__ == "__main__":
    main()
