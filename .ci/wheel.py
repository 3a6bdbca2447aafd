"""Installs a wheel of Weir with each extra into an empty environment, and serves a model there: `make wheel` builds it first.

Nothing of this checkout is on the path meanwhile, so what the wheel lacks is missed.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "import weir\n\n\nclass Square(weir.Model):\n    def predict(self, batch):\n        return [x * x for x in batch]\n"
)
NONE = "none"  # the install without any extra
# The templates of `weir new` that are tried with an extra.
TEMPLATES = {
    NONE: ["plain", "stream"],
    "onnx": ["onnx"],
    "sklearn": ["sklearn"],
    "torch": ["torch"],
    "transformers": ["hf"],
}
# Extras that bring torch. PyPI's build of it has gigabytes of CUDA with it; --torch names another one.
WITH_TORCH = ("torch", "transformers")
TORCH = "torch==2.13.0"
# What an extra is for is served with it, where that takes no download: this model stands for the one that the template hf names.
TINY = """
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast
open("vocab.txt", "w").write("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
BertForSequenceClassification(BertConfig(vocab_size=7, **sizes)).save_pretrained("tiny")
BertTokenizerFast("vocab.txt").save_pretrained("tiny")
"""


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


def attempt(wheel: Path, extra: str, torch: str) -> None:
    """Install `wheel` with `extra` (and `torch`, the arguments of pip for it, where the extra needs it) into an empty environment, and serve there.
    Raises if that does not work."""
    with tempfile.TemporaryDirectory(prefix=f"weir-{extra}-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = str(folder / "venv" / "bin" / "python")
        named = f"weir-serving @ {wheel.resolve().as_uri()}"
        wanted = named if extra == NONE else named.replace(" @", f"[{extra}] @")
        pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        if extra in WITH_TORCH:
            run(*pip, *torch.split())
        run(*pip, wanted)
        run(python, "-m", "pip", "--disable-pip-version-check", "check")
        work = folder / "work"
        work.mkdir()
        (work / "square.py").write_text(MODEL)
        weir = [str(folder / "venv" / "bin" / "weir"), "serve", "--port", "0"]
        on_ray = ["--executor", "ray"] if extra == "ray" else []
        assert serve([*weir, "square:Square", *on_ray], work, b"3") == 9
        if extra == "transformers":
            run(python, "-c", TINY, cwd=work)
            answer = serve([*weir, "hf:text-classification=./tiny", "--name", "square"], work, b'"good"')
            assert set(answer) == {"label", "score"}, answer
        for template in TEMPLATES.get(extra, ()):
            follow(template, folder)


def follow(template: str, folder: Path) -> None:
    """Write a project from `template`, and follow the instructions that `weir new` prints, and then the server. `folder` has the environment."""
    programs = folder / "venv" / "bin"
    words = {"pip": [str(programs / "python"), "-m", "pip", "--quiet"], "python": [str(programs / "python")]}
    printed = run(str(programs / "weir"), "new", template, "--template", template, cwd=folder)
    steps = [shlex.split(line) for line in printed.partition("next:\n")[2].splitlines()]
    project = folder / steps[0][1]
    settings = project / "weir.toml"
    settings.write_text(
        re.sub(r"(?<=hf:text-classification=)[^\"]+", str(folder / "work" / "tiny"), settings.read_text())
    )
    for program, *more in steps[1:-1]:
        run(*words.get(program, [str(programs / program)]), *more, cwd=project)
    assert serve([str(programs / steps[-1][0]), *steps[-1][1:], "--port", "0"], project, None, template)


def serve(command: list[str], folder: Path, item: bytes | None, model: str = "square") -> Any:
    """Run the server of `model` in `folder`, ask it once, for `item` or by the command that it shows, end it, and return the answer. Raises AssertionError for an exit code."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("WEIR_", "PYTHON"))}
    clean["RAY_USAGE_STATS_ENABLED"] = "0"
    with subprocess.Popen(command, cwd=folder, env=clean, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = next((line for line in server.stdout if re.search(rf"curl .*/infer/{model}", line)), None)
        assert line is not None, "it ended before it was ready"
        try:
            if item is None:
                answer = run("curl", "--silent", "--show-error", "--fail", *shlex.split(line)[1:])
            else:
                with urllib.request.urlopen(shlex.split(line)[-1], data=item, timeout=30) as response:
                    answer = json.load(response)
        finally:
            server.send_signal(signal.SIGTERM)
    assert server.returncode == 0, f"it ended with {server.returncode}"
    return answer


def main() -> None:
    """Try each extra that was named; without any, all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"an extra, or {NONE} (default: all)")
    parser.add_argument("--wheel", type=Path, help="the wheel to try (default: one that is built from this checkout)")
    parser.add_argument(
        "--torch", default=TORCH, help="what pip installs for the extras with torch (default: %(default)s)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weir-wheel-") as folder:
        wheel = arguments.wheel or build(Path(folder))
        print(wheel.name, flush=True)
        for extra in arguments.extras or extras():
            attempt(wheel, extra, arguments.torch)
            print(f"  {extra}: installed, served and ended", flush=True)


if __name__ == "__main__":
    main()
