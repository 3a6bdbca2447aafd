"""Measurements in a fresh process, which prints one line of JSON."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.servers import ROOT, environment


def ask(command: Sequence[str], timeout: float = 300) -> Any:
    """Run `command`; return the JSON of its last line. Raises RuntimeError with what it wrote when it fails."""
    done = subprocess.run(
        list(command), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def ask_own(module: str, *arguments: object) -> Any:
    """Run a module of benchmarks/runs with this interpreter; return its JSON."""
    return ask([sys.executable, "-m", f"benchmarks.runs.{module}", *map(str, arguments)])
