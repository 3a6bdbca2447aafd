"""NVIDIA's AIPerf as an outside client of texts: the arrivals of a recorded chat service, eight times as fast, ask for one vector each."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result import Part, Result, Run, count, short
from benchmarks.harness.servers import python_of
from benchmarks.harness.texts import MODEL, described, model_directory, sample, weir
from benchmarks.policies.bursts import TRACES

CALLS, QUICK_CALLS = 4000, 200
FASTER = 8
COLUMNS = ["requests", "requests/s", "mean ms", "p50 ms", "p90 ms", "p99 ms", "errors"]


def write_schedule(times: "np.typing.NDArray[np.float64]", texts: list[str], file: Path) -> Path:
    """Write when each request is sent, in ms from the first, and its text."""
    lines = [
        json.dumps({"timestamp": round(1000 * float(at - times[0]), 3), "text_input": texts[place % len(texts)]})
        for place, at in enumerate(times)
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def row(found: dict[str, Any]) -> list[str]:
    """Return a row of the table from AIPerf's own figures."""
    latency = found["request_latency"]
    return [
        count(found["completed_request_count"]["avg"]), short(found["request_throughput"]["avg"]),
        *(short(latency[name]) for name in ("avg", "p50", "p90", "p99")), count((found.get("error_request_count") or {"avg": 0})["avg"]),
    ]  # fmt: skip


def _measure(run: Run) -> Result:
    times = np.loadtxt(TRACES / "azure-conv.csv", skiprows=1)[: QUICK_CALLS if run.quick else CALLS] / FASTER
    texts = sample()
    with tempfile.TemporaryDirectory() as kept, weir() as server:
        folder = Path(kept)
        # AIPerf loads a tokenizer, though it sends texts: the model's own, without its weights.
        tokenizer = shutil.copytree(
            model_directory(), folder / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors")
        )
        program = Path(python_of("aiperf")).with_name("aiperf")
        command = [
            program, "profile", "--model", MODEL, "--tokenizer", tokenizer, "--url", f"http://127.0.0.1:{server.port}",
            "--endpoint-type", "embeddings", "--input-file", write_schedule(times, texts, folder / "schedule.jsonl"),
            "--custom-dataset-type", "mooncake-trace", "--fixed-schedule", "--ui", "none", "--artifact-dir", folder / "out",
        ]  # fmt: skip
        done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"aiperf ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        found = json.loads((folder / "out" / "profile_export_aiperf.json").read_text())
        run.step(f"{count(found['completed_request_count']['avg'])} requests")
    result = Result(COLUMNS)
    result.rows.append(row(found))
    result.values["errors"] = (found.get("error_request_count") or {"avg": 0})["avg"]
    result.notes.append(
        f"The first {count(len(times))} arrivals of the chat trace, at {FASTER} times their speed, in {times[-1] - times[0]:.0f} s; {described(texts)}. AIPerf {found['aiperf_version']} "
        "runs on the same machine."
    )
    return result


AIPERF = Part(
    "aiperf",
    "Texts, asked by AIPerf",
    "[AIPerf](https://github.com/ai-dynamo/aiperf) replays recorded arrivals against `/v1/embeddings` of `weir embed serve`, with default settings.",
    lambda rounds: 1,
    _measure,
    round=f"{count(CALLS)} requests",
)
