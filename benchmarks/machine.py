"""What the figures were measured on."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks.load import require_wrk
from benchmarks.peer_setup import VERSIONS
from benchmarks.servers import ROOT

OURS = ("weir-serving", "uvloop", "httptools", "uvicorn", "msgspec", "numpy")


def describe() -> dict[str, str]:
    """Return hardware and versions, as they are shown."""
    libraries = ", ".join(f"{name} {version(name)}" for name in OURS)
    return {
        "processor": f"{_processor()}, {psutil.cpu_count()} logical cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": libraries,
        "commit": _said("git", "rev-parse", "--short", "HEAD"),
        "peers": ", ".join(requirements[0].replace("==", " ") for requirements in VERSIONS.values()),
        "load": " ".join(_said(require_wrk(), "-v").split()[:2]),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _said(*command: str) -> str:
    # wrk -v ends with status 1.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
