"""Does a server that chooses its threads by itself keep up with both ways to set them? `python -m benchmarks.lone [--seconds S] [--rounds N] [--cache FOLDER]`

Sentences of about 20 tokens, one a request, by clients that each wait for their answer. Three servers of each precision take turns: as Weir starts by
itself, where a batch that runs alone may get the threads of idle workers; one worker of one thread for each CPU; and one worker of all threads. Of each
of the other two the median of the rounds' ratios counts, and of these the lower. Memory is what a worker takes beyond one of the second server, each of which
runs by itself then: servers that map the same file share its pages.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console

from benchmarks.harness.result import Result
from benchmarks.harness.rounds import folder
from benchmarks.harness.servers import Server, load
from benchmarks.harness.texts import CORES, sentences, weir, write_bodies

CLIENTS = (1, 2, 16, 64)
PRECISIONS = ("fp32", "int8")
BAR, MOST_MB = 0.95, 10.0
OWN, MANY = "by itself", f"{CORES} workers of 1 thread"
STATED: dict[str, tuple[str, ...]] = {
    OWN: (),
    MANY: ("--workers", str(CORES), "--threads", "1"),
    f"1 worker of {CORES} threads": ("--workers", "1", "--threads", str(CORES)),
}
Rates = dict[tuple[str, str, int], list[float]]


def _worker_mb(server: Server) -> float:
    """Return the memory of the workers, with what they were forked from, for each of them. Pages that several processes share count once."""
    return sum(process.memory_full_info().pss / 1e6 for process in server.front.children(recursive=True)) / CORES


def measure(seconds: float, rounds: int, cache: Path | None, console: Console) -> Result:
    """Put each load on each server in every round."""
    result = Result(["precision", "clients", *STATED, f"{OWN}, of the better"])
    with ExitStack() as stack:
        place = folder(stack)
        bodies = write_bodies(sentences(), place / "sentences")
        kept = ("--cache", str(cache or place), "--bulk-workers", "0")
        memory: dict[tuple[str, str], float] = {}
        for precision in PRECISIONS:
            for name in (OWN, MANY):
                with weir(*kept, "--precision", precision, *STATED[name]) as server:
                    for clients in CLIENTS:
                        load(server.url, clients, 1.0, bodies=bodies)
                    memory[precision, name] = _worker_mb(server)
                console.print(f"[dim]{precision}, {name}: {memory[precision, name]:.0f} MB a worker[/]")
        servers = {
            (precision, name): stack.enter_context(weir(*kept, "--precision", precision, *flags, name=f"{precision} {name}"))
            for precision in PRECISIONS for name, flags in STATED.items()
        }  # fmt: skip
        for server in servers.values():
            load(server.url, 16, 1.0, bodies=bodies)
        rates: Rates = {}
        for number in range(rounds):
            names = list(STATED)[::-1] if number % 2 else list(STATED)
            for clients in CLIENTS:
                for precision in PRECISIONS:
                    for name in names:
                        done = load(servers[precision, name].url, clients, seconds, bodies=bodies)
                        rates.setdefault((precision, name, clients), []).append(done.rate)
                console.print(
                    f"[dim]round {number + 1} of {rounds}, {clients} clients, load {psutil.getloadavg()[0]:.1f}[/]"
                )
    _judge(result, rates)
    for precision in PRECISIONS:
        own, other = memory[precision, OWN], memory[precision, MANY]
        result.goal(
            f"{precision}: at most {MOST_MB:g} MB more of a worker", f"{own:.0f} beside {other:.0f} MB", own - other <= MOST_MB
        )  # fmt: skip
    return result


def _judge(result: Result, rates: Rates) -> None:
    others = list(STATED)[1:]
    for precision in PRECISIONS:
        for clients in CLIENTS:
            own = rates[precision, OWN, clients]
            ratio = min(
                median(mine / theirs for mine, theirs in zip(own, rates[precision, name, clients], strict=True))
                for name in others
            )
            cells = [f"{median(rates[precision, name, clients]):.0f}" for name in STATED]
            result.rows.append([precision, str(clients), *cells, f"{ratio:.2f}"])
            result.at_least(f"{precision}, {clients} clients: at least {BAR} of the better", ratio, BAR)


def main() -> int:
    """Measure and print; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=3, help="of all loads on all servers")
    parser.add_argument("--cache", type=Path, help="where graphs are kept (default: a new folder)")
    asked = parser.parse_args()
    console = Console()
    result = measure(asked.seconds, asked.rounds, asked.cache, console)
    result.print(console, "Threads of a batch that runs alone")
    return 0 if all(goal[-1] == "yes" for goal in result.goals) else 1


if __name__ == "__main__":
    raise SystemExit(main())
