"""A graph as this machine reads it: optimised, its weights in the order in which the kernels want them, in one file.

Left alone, each worker would make its own copy of every matrix in that order. From a file that is mapped into memory all
workers share one, and none has to make it.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from weir.workers.launch import SILENCE

logger = logging.getLogger("weir")

GRAPH, WEIGHTS = "graph.onnx", "weights.bin"
SMALLEST_BYTES = 1024  # what is smaller lies in the graph


def packed(graph: Path) -> Path:
    """Return the packed form of `graph`, made on first use in a folder beside it.

    It is good for one version of onnxruntime and one kind of CPU. Where it cannot be written, `graph` is returned.
    """
    folder = graph.parent / f"{graph.stem}-packed-{_machine()}"
    if (folder / GRAPH).exists():
        return folder / GRAPH
    try:
        with open(graph.parent / f"{graph.stem}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / GRAPH).exists():
                _pack(graph, folder)
    except OSError as error:
        logger.warning(
            "%s: workers do not share all of the model's memory, for this cannot be written: %s", folder, error
        )
        return graph
    return folder / GRAPH


def _pack(graph: Path, folder: Path) -> None:
    """Have another process make it: what that takes of memory does not stay with the worker."""
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    environment = {**os.environ, **SILENCE, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        subprocess.run([sys.executable, "-P", "-m", __name__, str(graph), str(made)], env=environment, check=True)
        made.chmod(0o755)
        os.replace(made, folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def write(graph: Path, folder: Path) -> None:
    """Write the packed form of `graph` into `folder`."""
    from weir.embedding.runtime.onnx import library

    onnxruntime = library()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns that the result is for this machine
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(folder / GRAPH)
    for key, value in {
        "optimized_model_external_initializers_file_name": WEIGHTS,
        "optimized_model_external_initializers_min_size_in_bytes": str(SMALLEST_BYTES),
        "save_external_prepacked_constant_initializers": "1",
    }.items():
        options.add_session_config_entry(f"session.{key}", value)
    onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def _machine() -> str:
    """Name what the layout depends on: the library and what the CPU can do."""
    from weir.embedding.runtime.onnx import library

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    can = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return hashlib.sha256(f"{library().__version__} {platform.machine()} {can}".encode()).hexdigest()[:12]


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))
