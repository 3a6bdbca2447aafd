"""`python -m benchmarks setup [PEER...] | all | PART... [--rounds N] [--seconds S] [--quick]`; `soak [--minutes M]`; `report`."""

import argparse
import resource
from datetime import UTC, datetime

from rich.console import Console

from benchmarks.harness import report
from benchmarks.harness.report import PARTS, describe
from benchmarks.harness.result import Part, Run, progress_bar
from benchmarks.harness.rounds import Rounds
from benchmarks.harness.servers import VERSIONS, require_wrk, set_up
from benchmarks.parts import overload


def main() -> None:
    """Do what the command line says."""
    asked = _arguments()
    console = Console()
    _allow_many_files()
    if asked.what[0] == "setup":
        console.print("Peers: " + ", ".join(set_up(asked.what[1:] or VERSIONS)))
    elif asked.what == ["soak"]:
        overload.soak(console, asked.minutes)
    elif asked.what != ["report"]:
        require_wrk()
        for name, value in describe().items():
            console.print(f"[dim]{name:10}[/] {value}")
        for part in _chosen(asked.what):
            _measure(console, part, asked)
    if asked.what[0] not in ("setup", "soak") and not asked.quick:
        console.print("Written: " + ", ".join(report.write()))


def _arguments() -> argparse.Namespace:
    names = ", ".join(PARTS)
    parser = argparse.ArgumentParser("benchmarks", description=__doc__)
    parser.add_argument(
        "what", nargs="+", metavar="PART", help=f"all, or some of: {names}; or setup [PEER...], soak, report"
    )
    parser.add_argument("--rounds", type=int, default=5, help="alternated rounds, of which the median counts")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load, each time")
    parser.add_argument("--quick", action="store_true", help="a short run, where a part has one; nothing is written")
    parser.add_argument("--minutes", type=float, default=60.0, help="of soak")
    asked = parser.parse_args()
    first, *more = asked.what
    kind, known = ("peer", set(VERSIONS)) if first == "setup" else ("part", {*PARTS, "all", "soak", "report"})
    unknown = set(more if first == "setup" else asked.what) - known
    if unknown:
        parser.error(f"unknown {kind}: {', '.join(sorted(unknown))}; available: {', '.join(sorted(known))}")
    return asked


def _chosen(names: list[str]) -> list[Part | Rounds]:
    return [part for name, part in PARTS.items() if name in names or "all" in names]


def _allow_many_files() -> None:
    """Servers and loads inherit this limit; a thousand slow clients need it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _measure(console: Console, part: Part | Rounds, asked: argparse.Namespace) -> None:
    rounds, seconds = 1 if asked.quick and isinstance(part, Rounds) else asked.rounds, asked.seconds
    with progress_bar(console) as progress:
        task = progress.add_task(part.title, total=part.steps(rounds))

        def step(text: str) -> None:
            progress.console.print(f"[dim]{part.name}:[/] {text}")
            progress.advance(task)

        result = part.measure(Run(rounds, seconds, step, asked.quick))
    result.print(console, part.title)
    if asked.quick:
        return
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    report.keep(part, result, {**describe(), "rounds": f"{rounds} of {part.round or f'{seconds:g} s'}", "date": when})


if __name__ == "__main__":
    main()
