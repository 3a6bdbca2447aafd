"""What 100,000 requests of every kind of caller leave behind in a server of sentence vectors."""

from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.children import ask_own
from benchmarks.result import Part, Result, Run, count, mebibytes
from benchmarks.runs.text_mix import LONGEST, SAME_NAME, SHARES
from benchmarks.servers import Server, free_port
from benchmarks.text_servers import CORES, weir

REQUESTS, AT_A_TIME = 100_000, 5_000
SHOWN = (5_000, 20_000, 40_000, 60_000, 80_000, 100_000)
WARM = (
    20_000  # requests after which memory is what it is: tables are full, queues and buffers have had their largest size
)
GROWN = 0.03
LAYERS = 6  # of the model; all but the first are left out


class Held(NamedTuple):
    """Bytes of memory of the server's process and of its workers that no file is behind, with their shares of what several have: the
    share of a file's pages also depends on what else runs on the machine."""

    front: float
    workers: float


def measure(run: Run) -> Result:
    """Ask one server 100,000 times, whatever rounds and seconds are."""
    ports = (free_port(), free_port())
    doors = ("--zmq-port", str(ports[0]), "--zmq-port-out", str(ports[1]))
    one_layer = ("--layers", str(-LAYERS), "--precision", "int8", "--no-calibrate")
    with weir(*doors, *one_layer) as server:
        held = _asked(run, server, ports)
    result = Result(["requests", "MiB: server", "workers"])
    for requests in SHOWN:
        result.rows.append([count(requests), mebibytes(held[requests].front), mebibytes(held[requests].workers)])
    for what in Held._fields:
        before, after = (getattr(held[requests], what) for requests in (WARM, REQUESTS))
        result.values[f"{what} grown"] = grown = after / before - 1
        text = f"{what}: from {WARM:,} to {REQUESTS:,} requests at most {100 * GROWN:.0f} % more"
        result.goal(text, f"{100 * grown:+.1f} %", grown <= GROWN)
    result.notes.append(_said())
    return result


def _asked(run: Run, server: Server, ports: tuple[int, int]) -> dict[int, Held]:
    held = {}
    for first in range(0, REQUESTS, AT_A_TIME):
        done = ask_own("text_mix", server.port, *ports, first, AT_A_TIME)
        if sum(done.values()) != AT_A_TIME:
            raise RuntimeError(f"{AT_A_TIME} requests were to be sent: {done}")
        now = held[first + AT_A_TIME] = _held(server)
        run.step(f"{count(first + AT_A_TIME)} requests: {mebibytes(now.front)} and {mebibytes(now.workers)} MiB")
    return held


def _held(server: Server) -> Held:
    return Held(_unfiled(server.front), sum(map(_unfiled, server.front.children(recursive=True))))


def _unfiled(process: psutil.Process) -> float:
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return 1024.0 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _said() -> str:
    percent = {kind: share for kind, (share, _) in SHARES.items()}
    return (
        f"Memory that no file is behind (anonymous and shared, PSS), of the server's process and of its workers with what they were forked from. The first of the {LAYERS} layers of all-MiniLM-L6-v2 in int8 on {CORES} cores: what is counted is requests. One text each, of up to {LONGEST} "
        f"words, no two alike: {percent['openai']} % to /v1/embeddings, {percent['encode']} % to /encode by clients of a new name every "
        f"{SAME_NAME['encode']} requests, {percent['zeromq']} % over ZeroMQ by clients that are new every {SAME_NAME['zeromq']}, "
        f"{percent['refused']} % that are refused, {percent['left']} % whose callers leave before the answer."
    )


PART = Part(
    "vectors-growth",
    "What 100,000 requests leave behind",
    "Memory of a server of sentence vectors while it is asked 100,000 times, by callers of every kind.",
    lambda rounds: REQUESTS // AT_A_TIME,
    measure,
)
