"""The peers of part `texts`: vectors by infinity's engines and by sentence-transformers, documents that are ranked, and two outputs from one pass.

A peer that does not start is shown with the reason.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from benchmarks.harness.result import Result, Run, count, middle, ratio
from benchmarks.harness.servers import Load, Server, load
from benchmarks.harness.texts import (
    INFINITY_ENGINES,
    MODEL,
    WEIR,
    infinity,
    model_directory,
    prepared,
    rank_body,
    sample,
    sentence_transformers,
    serving_texts,
    weir_texts,
)

Start = Callable[[], AbstractContextManager[Server]]

ENGINES = {engine: f"infinity_emb, {engine}" for engine in INFINITY_ENGINES}
BACKENDS = {backend: f"sentence-transformers, {backend}" for backend in ("torch", "onnx")}
VECTORS = (*ENGINES.values(), *BACKENDS.values())

DOCUMENTS, RANKING_CLIENTS = 20, (1, 16)
RANKING_SECONDS = 8.0  # of load at least: the slowest peers take seconds for 20 documents
RANKING = "ranking"
RANKERS = (WEIR, *VECTORS)

ONE_PASS, TWO_REQUESTS = "dense and sparse from one pass", "two requests, one for each"
BOTH_CLIENTS = 16


# TEI's own pages have figures of GPUs only (its README, on 2026-11-23).
def started(stack: ExitStack, starts: Mapping[str, Start]) -> tuple[dict[str, Server], dict[str, str]]:
    """Start what starts, until the end of `stack`; return it, and the reason of each that does not."""
    servers: dict[str, Server] = {}
    missing: dict[str, str] = {}
    for name, start in starts.items():
        try:
            servers[name] = stack.enter_context(start())
        except (RuntimeError, SystemExit) as error:
            missing[name] = str(error).strip().splitlines()[-1]
    return servers, missing


def of_vectors(place: Path) -> dict[str, Start]:
    """Return how each peer is started, with the models in `place`."""
    files = {"torch": None, "bettertransformer": None, "optimum": place / "vectors", "onnx": place / "vectors"}
    return {
        **{name: _infinity(engine, files[engine], name) for engine, name in ENGINES.items()},
        **{name: _sentence_transformers(backend, files[backend], name) for backend, name in BACKENDS.items()},
    }


def _infinity(engine: str, directory: Path | None, name: str) -> Start:
    return lambda: infinity(engine, directory, name=name)


def _sentence_transformers(backend: str, directory: Path | None, name: str) -> Start:
    return lambda: sentence_transformers(backend, directory, name=name)


def of_ranking(place: Path, cache: Path) -> dict[str, Start]:
    """Return how each server that ranks is started."""
    ranker, first = place / "ranker", rank_body(("First do it",))
    ours = [*weir_texts(ranker, "--device-map", "cpu"), "--cache", str(cache)]
    starts: dict[str, Start] = {WEIR: lambda: serving_texts(WEIR, ours, "/rerank", first)}
    for engine, name in ENGINES.items():
        starts[name] = _ranking_infinity(engine, ranker, name, first)
    for backend, name in BACKENDS.items():
        starts[name] = _ranking_sentence_transformers(backend, ranker, name)
    return starts


def _ranking_infinity(engine: str, ranker: Path, name: str, first: bytes) -> Start:
    return lambda: infinity(engine, ranker, name=name, path="/rerank", body=first)


def _ranking_sentence_transformers(backend: str, ranker: Path, name: str) -> Start:
    return lambda: sentence_transformers(backend, ranker, name=name, ranks=True)


def _lines(bodies: Sequence[bytes], file: Path) -> Path:
    file.write_bytes(b"".join(body + b"\n" for body in bodies))
    return file


def ranking_bodies(file: Path) -> Path:
    """Write requests that rank DOCUMENTS paragraphs each."""
    texts = sample()
    groups = [texts[at : at + DOCUMENTS] for at in range(0, len(texts) - DOCUMENTS + 1, DOCUMENTS)]
    return _lines([rank_body(group, texts[-place - 1]) for place, group in enumerate(groups)], file)


def output_bodies(names: Sequence[Sequence[str]], file: Path) -> Path:
    """Write for each text a request for each of these lists of outputs."""
    bodies = [
        json.dumps({"input": text, "model": MODEL, "outputs": each}).encode() for text in sample() for each in names
    ]
    return _lines(bodies, file)


def _sound(server: Server, done: Load) -> Load:
    if done.refused or done.broken:
        raise RuntimeError(f"{server.name}: {done}")
    return done


def measure_ranking(run: Run, place: Path, cache: Path, result: Result) -> None:
    """Rank documents with each server in rounds, and add a row for each."""
    with ExitStack() as stack:
        servers, missing = started(stack, of_ranking(place, cache))
        bodies = ranking_bodies(cache / "rankings")
        found: dict[tuple[str, int], list[Load]] = {}
        for server in servers.values():
            load(server.url, 2, 2.0, bodies=bodies)
        for _ in range(run.rounds):
            for clients in RANKING_CLIENTS:
                for name, server in servers.items():
                    done = _sound(server, load(server.url, clients, max(run.seconds, RANKING_SECONDS), bodies=bodies))
                    found.setdefault((name, clients), []).append(done)
            run.step(f"ranking: {found[WEIR, RANKING_CLIENTS[-1]][-1].rate:.1f} requests/s")
    result.notes.append(
        f"{DOCUMENTS} documents ranked by the same network, requests/s with {' and '.join(map(str, RANKING_CLIENTS))} clients: {_rankings(found)}."
    )
    _add_missing(result, RANKING, missing)
    peers = [name for name in servers if name != WEIR]
    for clients in RANKING_CLIENTS if peers else ():
        best = max(peers, key=lambda name: middle([each.rate for each in found[name, clients]]))
        ours, theirs = ([each.rate for each in found[name, clients]] for name in (WEIR, best))
        result.values[f"ranking {clients}"] = middle(ours)
        result.at_least(
            f"ranking, {clients} client{'s' if clients > 1 else ''}: at least as many as {best}, the best peer",
            ratio(ours, theirs), 1,
        )  # fmt: skip


def _rankings(found: Mapping[tuple[str, int], list[Load]]) -> str:
    names = dict.fromkeys(name for name, _ in found)
    rates = {key: f"{middle([each.rate for each in rounds]):.1f}" for key, rounds in found.items()}
    return "; ".join(f"{name} {', '.join(rates[name, clients] for clients in RANKING_CLIENTS)}" for name in names)


def measure_both(run: Run, place: Path, cache: Path, result: Result) -> None:
    """Ask for dense and sparse vectors in one request and in two, in rounds."""
    command = [*weir_texts(place / "both", "--device-map", "cpu", "--allow-pickle"), "--cache", str(cache)]
    bodies = {
        ONE_PASS: (output_bodies([["dense", "sparse"]], cache / "one"), 1),
        TWO_REQUESTS: (output_bodies([["dense"], ["sparse"]], cache / "two"), 2),
    }
    rates: dict[str, list[float]] = {name: [] for name in bodies}
    with serving_texts("Weir, dense and sparse", command) as server:
        load(server.url, BOTH_CLIENTS, 2.0, bodies=bodies[ONE_PASS][0])
        for _ in range(run.rounds):
            for name, (file, requests) in bodies.items():
                done = _sound(server, load(server.url, BOTH_CLIENTS, run.seconds, bodies=file))
                rates[name].append(done.rate / requests)
            run.step(f"{ONE_PASS}: {rates[ONE_PASS][-1]:.0f} texts/s")
    shown = ", ".join(f"{name} {count(middle(each))}" for name, each in rates.items())
    result.notes.append(f"Texts/s, {BOTH_CLIENTS} clients: {shown}.")
    result.at_least(f"{ONE_PASS}: more than 1.5 times {TWO_REQUESTS}", ratio(rates[ONE_PASS], rates[TWO_REQUESTS]), 1.5)


def _add_missing(result: Result, what: str, missing: Mapping[str, str]) -> None:
    for name, reason in missing.items():
        result.notes.append(f"{name}, {what}: *not measured: {reason}*")


def note_peers(
    result: Result, missing: Mapping[str, str], rates: Mapping[tuple[str, int], list[float]], clients: Sequence[int]
) -> None:
    """Say which of infinity's engines was best, how we compare with that, and what was not measured."""
    _add_missing(result, "vectors", missing)
    engines = [name for name in ENGINES.values() if (name, clients[0]) in rates]
    for each in clients if engines else ():
        best = max(engines, key=lambda name: middle(rates[name, each]))
        result.values[f"times infinity {each}"] = times = ratio(rates[WEIR, each], rates[best, each])
        result.at_least(
            f"{each} client{'s' if each > 1 else ''}: at least 2 times {best}, infinity's best engine here", times, 2
        )


def prepare(place: Path) -> tuple[Path, str]:
    """Return the folder of the peers' models, and why there is none."""
    model_directory()
    try:
        return prepared(place), ""
    except (RuntimeError, SystemExit) as error:
        return place, str(error).strip().splitlines()[-1]
