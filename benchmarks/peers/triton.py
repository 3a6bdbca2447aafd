"""Triton's server binary, out of PyPI's nvidia-pytriton 0.7.0, with its Python backend. Run with --http PORT --grpc PORT [--models FOLDER]; SETTINGS
(JSON) may say how many `instances` of each model there are.

Makes a model repository and a folder of backends in a temporary place, then becomes the server. PyTriton's own decorators are
not used: this is tritonserver and nothing else.
"""

import argparse
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

MODELS = Path(__file__).with_name("triton_models")


def main() -> None:
    """Start the server in place of this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", type=int, required=True)
    parser.add_argument("--grpc", type=int, required=True)
    parser.add_argument("--models", type=Path, default=MODELS)
    said = parser.parse_args()
    packages = Path(sysconfig.get_path("purelib"))
    home = packages / "pytriton" / "tritonserver"
    backends = _backends(home)
    libraries = [packages / "nvidia_pytriton.libs", Path(sysconfig.get_config_var("LIBDIR"))]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "PYTHONPATH": str(packages),
    }
    command = [
        str(home / "bin" / "tritonserver"), f"--model-repository={_models(said.models)}", f"--backend-directory={backends}",
        f"--http-port={said.http}", f"--grpc-port={said.grpc}", "--allow-metrics=false", "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1", "--log-verbose=0", "--log-info=false",
    ]  # fmt: skip
    os.execve(command[0], command, environment)


def _models(folder: Path) -> Path:
    """Return a copy of the repository with so many instances of each model as SETTINGS says."""
    copy = Path(tempfile.mkdtemp(prefix="triton-")) / "models"
    shutil.copytree(folder, copy)
    count = json.loads(os.environ.get("SETTINGS", "{}")).get("instances", 1)
    for config in copy.glob("*/config.pbtxt"):
        config.write_text(config.read_text().replace("{ count: 1 ", f"{{ count: {count} "))
    return copy


def _backends(home: Path) -> Path:
    """Return a copy of the backends with the stub of this Python version in its place."""
    copy = Path(tempfile.mkdtemp(prefix="triton-")) / "backends"
    shutil.copytree(home / "backends", copy)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy(stub, copy / "python")
    os.chmod(copy / "python" / stub.name, 0o755)
    return copy


if __name__ == "__main__":
    main()
