"""Says which tests find the faults of known.py: `python -m tests.faults [NAME ...]`.

For each fault it runs the tests that name its module, its class or function, then those of the folder and of what uses that, until
one fails. What was found is kept in
build/faults.json; `--again` looks again. The exit code is 1 if a fault was missed.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import STDOUT
from tempfile import TemporaryFile
from typing import IO

from tests.faults.known import FAULTS

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "faults.json"
# As a test fails, not at the end: what follows it may hang.
_FAILED = re.compile(r"^(?:ERROR (\S+)|(\S+::.*?) (?:FAILED|ERROR))", re.MULTILINE)
_GRACE = 60.0  # in seconds, for tests that are interrupted to end their servers
# What uses a part of the source; the tests of the part itself go first.
_USERS = {
    "wire": ["frontends", "client", "text_server", "workers"],
    "protocols": ["frontends", "fronts", "text_server"],
    "frontends": ["protocols", "fronts"],
    "workers": ["serving"],
    "text_server": ["text_models", "fronts"],
    "catalog": ["frontends/http", "frontends/grpc"],
}


def tests_for(where: str) -> Iterator[list[str]]:
    """Yield the paths of tests that may find a fault at `where`, the likeliest first."""
    module, _, attribute = where.partition(":")
    _, part, *rest = module.split(".")
    folder = ROOT / "tests" / part
    names = [rest[-1], *(name for name in attribute.split(".") if not name.startswith("_"))]
    mention = re.compile(rf"\b({'|'.join(names)})\b")
    own = sorted(folder.rglob("test_*.py"), key=lambda path: not path.stem.endswith(rest[-1].strip("_")))
    named = [path for path in own if rest[-1] in path.stem or mention.search(path.read_text())]
    yield [str(path) for path in named[:8]]
    yield [str(path) for path in own if path not in named[:8]]
    yield from ([f"tests/{each}"] for each in _USERS[part])
    yield [str(path) for path in sorted((ROOT / "tests").glob("test_*.py"))]
    yield ["tests/simulated", "tests/fuzz"]


def found_by(name: str, seconds: float) -> str:
    """Return the first test that fails with the fault; else "missed", and how many steps did not come to their end within `seconds`."""
    paths = [str(ROOT / "tests" / "faults"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"FAULT": name, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [
        sys.executable,
        *[
            "-m",
            "pytest",
            "-vx",
            "-n0",
            "-p",
            "no:cacheprovider",
            "--no-header",
            "--tb=no",
            "--color=no",
            "--timeout=60",
        ],
    ]
    unfinished = 0
    for paths in filter(None, tests_for(FAULTS[name].where)):
        code, said = _run([*command, *paths], env, seconds)
        if found := _FAILED.search(said):
            return found[1] or found[2]
        if code is None:
            unfinished += 1
        elif code not in (0, 5):
            raise RuntimeError(f"{name}: the tests cannot be run: {said}")
    return f"missed ({unfinished} steps took too long)" if unfinished else "missed"


def _run(command: list[str], env: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """Return the exit code of `command`, or None if it took more than `seconds`, and what it printed."""
    with TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=said, stderr=STDOUT)
        code, due = None, time.monotonic() + seconds
        try:
            # A fault may also hang what is to end after the test that has failed.
            while code is None and time.monotonic() < due and not _FAILED.search(_read(said)):
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(1.0)
            if code is None:
                process.send_signal(signal.SIGINT)  # so that it ends its servers
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
        finally:
            process.kill()
            process.wait()
        return code, _read(said)


def _read(said: IO[str]) -> str:
    return os.pread(said.fileno(), 1 << 24, 0).decode(errors="replace")


def main() -> int:
    """Look for each fault, and print a table; return the exit code."""
    parser = argparse.ArgumentParser(prog="tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*FAULTS, []], help="which; by default all")
    parser.add_argument("--seconds", type=float, default=900.0, help="the most that each step may take")
    parser.add_argument("--again", action="store_true", help="look for what was found before, too")
    chosen = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    names = chosen.names or list(FAULTS)
    for name in names:
        if chosen.again or kept.get(name, "missed").startswith("missed"):
            kept[name] = found_by(name, chosen.seconds)
            KEPT.parent.mkdir(exist_ok=True)
            KEPT.write_text(json.dumps(kept, indent=1))
        print(f"| `{name}` | {FAULTS[name].where} | {kept[name]} |", flush=True)
    return int(any(kept[name].startswith("missed") for name in names))


if __name__ == "__main__":
    sys.exit(main())
