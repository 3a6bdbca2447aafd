"""Installs a wheel of Weir with each extra into an empty environment, and serves a model there: `make wheel` builds it first.

Nothing of this checkout is on the path meanwhile, so what the wheel lacks is missed.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "import weir\n\n\nclass Square(weir.Model):\n    def predict(self, batch):\n        return [x * x for x in batch]\n"
)
NONE = "none"  # the install without any extra


def extras() -> list[str]:
    """Return all extras that pyproject.toml has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [NONE, *project["optional-dependencies"]]


def build(folder: Path) -> Path:
    """Build the wheel into `folder` and return its path."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a command; raise CalledProcessError if it fails."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WEIR_", "PYTHON"))}
    return subprocess.run(command, check=True, cwd=cwd, env=clean, stdout=subprocess.PIPE, text=True).stdout


def attempt(wheel: Path, extra: str) -> None:
    """Install `wheel` with `extra` into an empty environment, and serve there. Raises if that does not work."""
    with tempfile.TemporaryDirectory(prefix=f"weir-{extra}-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = str(folder / "venv" / "bin" / "python")
        named = f"weir-serving @ {wheel.resolve().as_uri()}"
        wanted = named if extra == NONE else named.replace(" @", f"[{extra}] @")
        run(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", wanted)
        run(python, "-m", "pip", "--disable-pip-version-check", "check")
        work = folder / "work"
        work.mkdir()
        (work / "square.py").write_text(MODEL)
        serve([str(folder / "venv" / "bin" / "weir"), "serve", "square:Square", "--port", "0"], work)


def serve(command: list[str], folder: Path) -> None:
    """Run the server in `folder`, ask it once, and end it. Raises AssertionError for a wrong answer or exit code."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WEIR_", "PYTHON"))}
    with subprocess.Popen(command, cwd=folder, env=clean, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next((found[0] for line in server.stdout if (found := re.search(r"http://\S+/infer/square", line))), None)
        assert url is not None, "it ended before it was ready"
        with urllib.request.urlopen(url, data=b"3", timeout=30) as answer:
            assert json.load(answer) == 9
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0, f"it ended with {server.returncode}"


def main() -> None:
    """Try each extra that was named; without any, all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"an extra, or {NONE} (default: all)")
    parser.add_argument("--wheel", type=Path, help="the wheel to try (default: one that is built from this checkout)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weir-wheel-") as folder:
        wheel = arguments.wheel or build(Path(folder))
        print(wheel.name, flush=True)
        for extra in arguments.extras or extras():
            attempt(wheel, extra)
            print(f"  {extra}: installed, served and ended", flush=True)


if __name__ == "__main__":
    main()
