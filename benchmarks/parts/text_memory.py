"""What a server of sentence vectors takes: time to start, memory by workers, beside its peers; and what 100,000 requests of every kind of caller
leave behind in it.

The child `PORT ZMQ_PORT ZMQ_PORT_OUT FIRST COUNT` sends so many requests, no two texts alike: to /v1/embeddings, to /encode and over
ZeroMQ, of which the latter two call themselves something new again and again; requests that must be refused, each in another way; and
callers who leave before their answer. It prints how often each kind was answered.
"""

import http.client
import json
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.harness.result import Part, Result, Run, count, mebibytes, middle
from benchmarks.harness.rounds import Column, Measurements, Rounds, folder, medians, spreads
from benchmarks.harness.servers import Server, ask_own, free_port
from benchmarks.harness.texts import (
    CORES,
    INFINITY,
    MODEL,
    SENTENCE_TRANSFORMERS,
    infinity,
    sample,
    sentence_transformers,
    vectors_of,
    weir,
)
from weir.bench.vectors import WORDS
from weir.client import EmbeddingClient
from weir.text_server.bert_as_service.client import BertTransport

ALONE, MANY = "Weir, 1 worker", "Weir, 4 workers"
FORKED = {ALONE: 1, MANY: 4}
ASKED = 64  # texts before memory is read: every worker has computed some


def _start(stack: ExitStack) -> Mapping[str, Any]:
    """Return what starts each server: one measurement is one start."""
    cache = str(folder(stack))
    flags = {name: ("--workers", str(workers), "--threads", "1", "--cache", cache) for name, workers in FORKED.items()}
    ours = {name: partial(weir, *flags[name], name=name) for name in FORKED}
    return ours | {INFINITY: infinity, SENTENCE_TRANSFORMERS: sentence_transformers}


def _one(start: Any, case: str, unused: float) -> dict[str, float]:
    """Return the seconds from the command to the first vector; bytes (PSS) of the process that listens, `front`, and of those below it."""
    began = time.monotonic()
    with start() as server:
        seconds = time.monotonic() - began
        for text in sample(ASKED):
            vectors_of(server, [text])
        workers = float(sum(process.memory_full_info().pss for process in server.front.children(recursive=True)))
        front = float(server.front.memory_full_info().pss)
    return {"seconds": seconds, "front": front, "workers": workers, "all": front + workers}


def _conclude(result: Result, measured: Measurements) -> None:
    for name, case in measured.pairs():
        result.values |= {
            f"{name} start": measured.middle(name, case, "seconds"),
            f"{name} PSS": measured.middle(name, case, "all"),
        }
    times = result.values["PSS of workers, times"] = measured.times(MANY, ALONE, figure="workers")
    result.at_most("PSS of 4 workers at most 1.5 times that of one", times, 1.5)
    many, one = (measured.of(name, figure="workers") for name in (MANY, ALONE))
    more = result.values["PSS of a further worker"] = middle(
        [(of_4 - of_1) / 3 for of_4, of_1 in zip(many, one, strict=True)]
    )
    result.notes.append(
        f"all-MiniLM-L6-v2 in fp32 (91 MB of weights), after {ASKED} texts. Weir's workers have one thread each, its peers {CORES}. On the very first start Weir builds the "
        f"model's graph and measures batch sizes. Each additional worker takes {mebibytes(more)} MiB."
    )


MEMORY = Rounds(
    "vectors-memory",
    "Startup time and memory of an embedding server",
    "Time from the command to the first vector, and memory, compared with infinity and with sentence-transformers behind FastAPI.",
    start=_start,
    one=_one,
    contenders=(*FORKED, INFINITY, SENTENCE_TRANSFORMERS),
    heads=("server",),
    columns=(
        spreads("seconds to the first vector", "seconds", "{:.1f}".format),
        Column("the very first time", lambda measured, name, case: f"{measured.before(name, case, 'seconds'):.1f}"),
        medians("MiB, PSS: all", "all", mebibytes),
        medians("the process that listens", "front", mebibytes),
        medians("below it", "workers", mebibytes),
    ),
    conclude=_conclude,
    progress=("seconds", "{:.1f} s to the first vector".format),
    warm_ups=1,
)


REQUESTS, AT_A_TIME = 100_000, 5_000
SHOWN = (5_000, 20_000, 40_000, 60_000, 80_000, 100_000)
# Requests after which memory is what it is: tables are full, queues and buffers have had their largest size.
WARM = 20_000
GROWN = 0.03
LAYERS = 6  # of the model; all but the first are left out


class Held(NamedTuple):
    """Bytes of memory of the server's process and of its workers that no file is behind, with their shares of what several have: the
    share of a file's pages also depends on what else runs on the machine."""

    front: float
    workers: float


def measure_growth(run: Run) -> Result:
    """Ask one server 100,000 times, whatever rounds and seconds are."""
    ports = (free_port(), free_port())
    frontends = ("--zmq-port", str(ports[0]), "--zmq-port-out", str(ports[1]))
    one_layer = ("--layers", str(-LAYERS), "--precision", "int8", "--no-calibrate")
    with weir(*frontends, *one_layer) as server:
        held = _asked(run, server, ports)
    result = Result(["requests", "MiB: server", "workers"])
    for requests in SHOWN:
        result.rows.append([count(requests), mebibytes(held[requests].front), mebibytes(held[requests].workers)])
    for what in Held._fields:
        before, after = (getattr(held[requests], what) for requests in (WARM, REQUESTS))
        result.values[f"{what} grown"] = grown = after / before - 1
        text = f"{what}: from {WARM:,} to {REQUESTS:,} requests at most {100 * GROWN:.0f} % more"
        result.goal(text, f"{100 * grown:+.1f} %", grown <= GROWN)
    result.notes.append(_growth_note())
    return result


def _asked(run: Run, server: Server, ports: tuple[int, int]) -> dict[int, Held]:
    held = {}
    for first in range(0, REQUESTS, AT_A_TIME):
        done = ask_own("parts.text_memory", server.port, *ports, first, AT_A_TIME)
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


def _growth_note() -> str:
    percent = {kind: share for kind, (share, _) in SHARES.items()}
    return (
        f"Anonymous and shared memory (PSS). One layer of all-MiniLM-L6-v2 in int8; one text a request, of up to {LONGEST} words, no two alike: {percent['openai']} % to "
        f"/v1/embeddings, {percent['encode']} % to /encode, {percent['zeromq']} % over ZeroMQ, {percent['refused']} % refused, {percent['left']} % whose callers leave early."
    )


# How many of a hundred requests are of each kind, and how many callers of it there are.
SHARES = {"openai": (40, 4), "encode": (20, 2), "zeromq": (20, 1), "refused": (15, 1), "left": (5, 1)}
SAME_NAME = {"encode": 4, "zeromq": 100}  # requests before a caller takes another name
AHEAD = 32  # requests that a caller over ZeroMQ has under way
LONGEST = 24  # words


class Where(NamedTuple):
    """The ports of the server."""

    port: int
    zmq_port: int
    zmq_port_out: int


def text(number: int) -> str:
    """Return text `number`: no other is like it."""
    chance = random.Random(number)
    return " ".join([*chance.choices(WORDS, k=chance.randint(1, LONGEST)), str(number)])


def openai(where: Where, numbers: range) -> int:
    """Ask /v1/embeddings over one connection."""
    bodies = ({"input": text(number), "model": MODEL} for number in numbers)
    return _all_answered(where, "/v1/embeddings", ((json.dumps(body), {}) for body in bodies), 200, 200)


def encode(where: Where, numbers: range) -> int:
    """Ask /encode over one connection, by ever new names."""
    asked = (
        (
            json.dumps({"id": number, "texts": [text(number)]}),
            {"X-Client-Id": f"encode-{number // SAME_NAME['encode']}"},
        )
        for number in numbers
    )
    return _all_answered(where, "/encode", asked, 200, 200)


def refused(where: Where, numbers: range) -> int:
    """Ask /v1/embeddings for what there is not."""
    return _all_answered(where, "/v1/embeddings", ((_wrong(number), {}) for number in numbers), 400, 499)


def _wrong(number: int) -> str:
    kinds: list[Callable[[], str]] = [
        lambda: json.dumps({"input": text(number), "model": f"unknown-{number}"}),
        lambda: json.dumps({"input": ["", text(number)], "model": MODEL}),
        lambda: json.dumps({"input": [number + 0.5], "model": MODEL}),
        lambda: json.dumps({"input": text(number), "model": MODEL, "dimensions": 1_000_000}),
        lambda: json.dumps({"input": text(number), "model": MODEL, "encoding_format": f"base{number}"}),
        lambda: '{"input": "' + text(number),
    ]
    return kinds[number % len(kinds)]()


def _all_answered(where: Where, path: str, asked: Iterator[tuple[str, dict[str, str]]], least: int, most: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=60)
    done = 0
    for body, headers in asked:
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        said = answer.read()
        if not least <= answer.status <= most:
            raise RuntimeError(f"{path} {body[:200]}: {answer.status} {said[:200]!r}")
        done += 1
    connection.close()
    return done


def zeromq(where: Where, numbers: range) -> int:
    """Ask over ZeroMQ, by ever new names."""
    done = 0
    for first in range(numbers.start, numbers.stop, SAME_NAME["zeromq"]):
        some = range(first, min(first + SAME_NAME["zeromq"], numbers.stop))
        transport = BertTransport("127.0.0.1", where.zmq_port, where.zmq_port_out)
        with EmbeddingClient(ignore_all_checks=True, transport=transport) as client:
            done += sum(1 for _ in client.encode_async(([text(number)] for number in some), ahead=AHEAD))
    return done


def left(where: Where, numbers: range) -> int:
    """Ask /encode, each time over a new connection, and leave."""
    for number in numbers:
        body = json.dumps({"id": number, "texts": [text(number)]}).encode()
        head = (
            f"POST /encode HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", where.port), timeout=60) as connection:
            connection.sendall(head.encode() + body)
    return len(numbers)


KINDS: dict[str, Callable[[Where, range], int]] = {
    "openai": openai, "encode": encode, "zeromq": zeromq, "refused": refused, "left": left,
}  # fmt: skip


def shared(first: int, count: int) -> Iterator[tuple[str, range]]:
    """Yield the numbers of the texts of each caller, with its kind."""
    for kind, (share, callers) in SHARES.items():
        whole = count * share // 100
        for caller in range(callers):
            begin, end = (first + whole * place // callers for place in (caller, caller + 1))
            yield kind, range(begin, end)
        first += whole


def send_mix() -> None:
    """Do what is asked."""
    *ports, first, count = map(int, sys.argv[1:])
    where = Where(*ports)
    callers = list(shared(first, count))
    with ThreadPoolExecutor(len(callers)) as pool:
        asking = [(kind, pool.submit(KINDS[kind], where, numbers)) for kind, numbers in callers]
        done = dict.fromkeys(KINDS, 0)
        for kind, each in asking:
            done[kind] += each.result()
    print(json.dumps(done))


GROWTH = Part(
    "vectors-growth",
    "Memory after 100,000 requests",
    "Memory of an embedding server by requests served: nothing leaks.",
    lambda rounds: REQUESTS // AT_A_TIME,
    measure_growth,
)


if __name__ == "__main__":
    send_mix()
