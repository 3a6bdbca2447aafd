"""NVIDIA's AIPerf as an outside client of texts: it replays the arrivals of a recorded chat service, eight times as fast, and ranks documents by two APIs."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result import Part, Result, Run, count, short
from benchmarks.harness.servers import Server, python_of
from benchmarks.harness.texts import (
    MODEL,
    described,
    model_directory,
    rank_body,
    sample,
    serving_texts,
    weir,
    weir_texts,
    write_ranker,
)
from benchmarks.policies.bursts import TRACES

CALLS, RANKINGS, QUICK = 1000, 200, 100
FASTER = 8
DOCUMENTS, CLIENTS = 8, 8  # of a ranking, and at once
RANKERS = {"hf_tei_rankings": "/rerank", "cohere_rankings": "/v2/rerank"}
COLUMNS = ["endpoint type", "requests", "requests/s", "mean ms", "p50 ms", "p90 ms", "p99 ms", "errors"]


def write_schedule(times: "np.typing.NDArray[np.float64]", texts: list[str], file: Path) -> Path:
    """Write when each request is sent, in ms from the first, and its text."""
    return _lines(
        file,
        [
            {"timestamp": round(1000 * float(at - times[0]), 3), "text_input": texts[place % len(texts)]}
            for place, at in enumerate(times)
        ],
    )


def write_rankings(texts: Sequence[str], file: Path) -> Path:
    """Write a query and DOCUMENTS passages for each request, until the texts end."""
    size = DOCUMENTS + 1
    groups = [texts[start : start + size] for start in range(0, len(texts) - size + 1, size)]
    named = [(("query", [query]), ("passages", documents)) for query, *documents in groups]
    return _lines(
        file, [{"texts": [{"name": name, "contents": contents} for name, contents in each]} for each in named]
    )


def _lines(file: Path, documents: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(each) + "\n" for each in documents))
    return file


def row(endpoint_type: str, found: dict[str, Any]) -> list[str]:
    """Return a row of the table from AIPerf's own figures."""
    latency = found["request_latency"]
    return [
        f"`{endpoint_type}`", count(found["completed_request_count"]["avg"]), short(found["request_throughput"]["avg"]),
        *(short(latency[name]) for name in ("avg", "p50", "p90", "p99")), count(_errors(found)),
    ]  # fmt: skip


def _errors(found: dict[str, Any]) -> float:
    return float((found.get("error_request_count") or {"avg": 0})["avg"])


def _profile(server: Server, folder: Path, endpoint_type: str, *arguments: object) -> dict[str, Any]:
    """Have AIPerf ask `server`; return what it exports."""
    # AIPerf loads a tokenizer, though it sends texts: the model's own, without its weights.
    tokenizer, out = folder / "tokenizer", folder / endpoint_type
    if not tokenizer.exists():
        shutil.copytree(model_directory(), tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    command = [
        Path(python_of("aiperf")).with_name("aiperf"), "profile", "--model", MODEL, "--tokenizer", tokenizer, "--url", f"http://127.0.0.1:{server.port}",
        "--endpoint-type", endpoint_type, *arguments, "--ui", "none", "--artifact-dir", out,
    ]  # fmt: skip
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"aiperf ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads((out / "profile_export_aiperf.json").read_text())
    return found


def _ranker(folder: Path) -> AbstractContextManager[Server]:
    command = [*weir_texts(write_ranker(folder / "ranker"), "--device-map", "cpu"), "--cache", str(folder / "cache")]
    return serving_texts("Weir", command, "/rerank", rank_body(("First do it",)))


def _measure(run: Run) -> Result:
    times = np.loadtxt(TRACES / "azure-conv.csv", skiprows=1)[: QUICK if run.quick else CALLS] / FASTER
    texts, found = sample(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        schedule = write_schedule(times, texts, folder / "schedule.jsonl")
        replay = ["--input-file", schedule, "--custom-dataset-type", "mooncake_trace", "--fixed-schedule"]
        with weir() as server:
            found["embeddings"] = _profile(server, folder, "embeddings", *replay)
        asked = [
            "--input-file",
            write_rankings(texts, folder / "rankings.jsonl"),
            "--custom-dataset-type",
            "single_turn",
        ]
        asked += ["--request-count", QUICK if run.quick else RANKINGS, "--concurrency", CLIENTS]
        with _ranker(folder) as server:
            found |= {name: _profile(server, folder, name, *asked) for name in RANKERS}
    result = Result(COLUMNS, rows=[row(name, each) for name, each in found.items()])
    for name, each in found.items():
        run.step(f"{name}: {count(each['completed_request_count']['avg'])} requests")
        result.values[f"{name} errors"] = _errors(each)
        result.at_most(f"{name}: errors", _errors(each), 0, "{:.0f}")
    result.notes.append(
        f"`embeddings`: the first {count(len(times))} arrivals of the chat trace, at {FASTER} times their speed, in {times[-1] - times[0]:.0f} s. The others: {CLIENTS} clients, which rank "
        f"{DOCUMENTS} documents per request, by the same network with a random classifier. {described(texts)}. AIPerf {found['embeddings']['aiperf_version']} runs on the same machine."
    )
    return result


AIPERF = Part(
    "aiperf",
    "Vectors and rankings, asked by AIPerf",
    f"[AIPerf](https://github.com/ai-dynamo/aiperf), unchanged, asks `weir embed serve` with default settings: `/v1/embeddings`, `{'` and `'.join(RANKERS.values())}`.",
    lambda rounds: 1 + len(RANKERS),
    _measure,
    round=f"{count(CALLS)} and {count(RANKINGS)} requests",
)
