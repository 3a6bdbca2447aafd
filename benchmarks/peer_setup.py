"""The peers, each in an environment of its own under .venvs/."""

import subprocess
import sys
from pathlib import Path

from benchmarks.servers import PEERS, ROOT

VERSIONS = {
    "mosec": ["mosec==0.9.8"],
    "mpservice": ["mpservice==0.16.8"],
    "triton": ["nvidia-pytriton==0.7.0"],
    "mlserver": ["mlserver==1.7.1", "uvloop<0.21"],  # with a newer uvloop its workers die at their start
    "infinity": ["infinity_emb==0.0.78", "infinity_emb[server,torch]", "click<8.2", "transformers<5"],
    "sentence-transformers": ["sentence-transformers==6.2.0", "fastapi", "uvicorn[standard]"],
}
# Installed before all else, so that pip does not look for another.
FIRST = dict.fromkeys(("infinity", "sentence-transformers"), "torch==2.13.0")
_HOME = ROOT / ".venvs"


def python_of(peer: str) -> str:
    """Return the interpreter that runs `peer`; end with what to do if it is not there."""
    python = _HOME / peer / "bin" / "python"
    if not _stamp(peer).exists():
        raise SystemExit(f"{peer} is not installed: python -m benchmarks setup")
    return str(python)


def script(name: str) -> str:
    """Return the path of a script in peers/."""
    return str(PEERS / name)


def set_up() -> list[str]:
    """Install what is missing; return what is there."""
    for peer, requirements in VERSIONS.items():
        if not _stamp(peer).exists():
            subprocess.run([sys.executable, "-m", "venv", str(_HOME / peer)], check=True)
            pip = [str(_HOME / peer / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
            first = FIRST.get(peer)
            if first is not None:
                subprocess.run([*pip, "install", first], check=True)
            subprocess.run([*pip, "install", *requirements, *([first] if first is not None else [])], check=True)
            _stamp(peer).touch()
    return [requirements[0] for requirements in VERSIONS.values()]


def _stamp(peer: str) -> Path:
    return _HOME / peer / ("." + VERSIONS[peer][0])
