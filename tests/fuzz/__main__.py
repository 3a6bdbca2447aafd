"""Fuzzes every parser for so many seconds each: `python -m tests.fuzz [--seconds 300] [TARGET ...]`.

What made a difference is kept in tests/fuzz/corpus, one folder per target, and is where the next run begins; a test runs
all of it. An input that breaks a promise is written to tests/fuzz/found, and the exit code is 1 then.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.targets import TARGETS

HERE = Path(__file__).parent
MAX_BYTES = 4096


def main() -> int:
    """Fuzz one target after the other; return how many broke."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="which parsers; by default all")
    parser.add_argument("--seconds", type=int, default=300, help="for how long, each")
    said = parser.parse_args()
    broken = [name for name in said.targets or TARGETS if not fuzz(name, said.seconds)]
    for name in broken:
        print(f"{name}: broke; what it was given is in {HERE / 'found'}", file=sys.stderr)
    return 1 if broken else 0


def fuzz(name: str, seconds: int) -> bool:
    """Fuzz one target; tell whether it kept its promises. What is new and useful goes into its corpus, and what adds nothing leaves it, but for what was
    written by hand or broke a target once: their names say so."""
    corpus, found = HERE / "corpus" / name, HERE / "found"
    found.mkdir(exist_ok=True)
    corpus.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.one", name, f"-max_len={MAX_BYTES}", "-timeout=10"]
    print(f"{name}: {seconds} s", flush=True)
    search = [f"-max_total_time={seconds}", f"-artifact_prefix={found}/{name}-", str(corpus)]
    kept_its_promises = subprocess.run([*command, *search], check=False).returncode == 0
    with tempfile.TemporaryDirectory() as merged:
        subprocess.run([*command, "-merge=1", "-use_counters=0", merged, str(corpus)], check=True)
        for file in corpus.iterdir():
            if not (Path(merged, file.name).exists() or any(word in file.name for word in ("seed-", "crash-"))):
                file.unlink()
    return kept_its_promises


if __name__ == "__main__":
    sys.exit(main())
