"""Copies of graphs whose weights lie in a file as this CPU computes with them.

onnxruntime rearranges the weights of matrix products when a session is opened, and each session keeps what it made: half as much again as the weights
themselves. From such a copy every session maps them, in all workers, so that a session with more threads costs hardly any memory, and opens sooner.

The order depends on the CPU and on the release of onnxruntime, so a copy is made for each, next to the graph in the cache, and is removed with it. A
child process makes it, which is this module as a program: the memory that this takes is returned with the process.
"""

import hashlib
import json
import logging
import platform
import shutil
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from weir.errors import SettingsError
from weir.text_models.graph.cache import locked, manifest_of, run_child

# What /proc/cpuinfo calls that by which onnxruntime chooses how to compute, on x86 and on ARM.
_DECIDES = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features",
)  # fmt: skip

logger = logging.getLogger("weir")


def prepacked(graph: Path, cpuinfo: Path = Path("/proc/cpuinfo")) -> Path | None:
    """Return the copy of `graph` for this CPU, which is made if it is missing. Keep the graph in the cache meanwhile, see cache.hold.

    None if there is none: nothing says which CPU this is, or the cache cannot be written.
    """
    cpu = cpu_key(cpuinfo)
    if cpu is None:
        return None
    copy = graph.with_name(f"{graph.stem}-{cpu}{graph.suffix}")
    try:
        if not _is_complete(copy):
            with locked(graph.parent):
                if not _is_complete(copy):
                    _make(graph, copy)
    except (OSError, SettingsError) as error:
        logger.info("%s: the weights cannot be kept as this CPU reads them: %s", graph, error)
        return None
    return copy


def cpu_key(cpuinfo: Path) -> str | None:
    """Return what stands for the CPU and the release of onnxruntime in the name of a copy; None if the kernel does not describe the CPU."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    decides = [found[name] for name in _DECIDES if name in found]
    if not decides:
        return None
    whole = repr([platform.machine(), version("onnxruntime"), *decides])
    return hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()


def _weights(copy: Path) -> Path:
    return copy.with_suffix(".bin")


def _manifest(copy: Path) -> Path:
    return copy.with_suffix(".json")


def _is_complete(copy: Path) -> bool:
    try:
        return bool(json.loads(_manifest(copy).read_text()) == manifest_of([copy], _weights(copy)))
    except (OSError, ValueError):
        return False


def _make(graph: Path, copy: Path) -> None:
    """Write the copy aside, and move its files to their place, last the one that says what they are."""
    aside = graph.parent / "packing"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        run_child("weir.text_models.runtime.prepacked", str(graph), str(aside / copy.name))
        written = aside / copy.name
        _weights(written).touch()  # a small model may have all of them in the graph
        _manifest(written).write_text(json.dumps(manifest_of([written], _weights(written))))
        for file in (_weights(written), written, _manifest(written)):
            file.rename(graph.parent / file.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def main(graph: str, copy: str) -> None:
    """Write the copy of a graph to a file, and its weights next to it."""
    from weir.text_models.runtime.onnx import write_prepacked

    write_prepacked(Path(graph), Path(copy))


if __name__ == "__main__":
    main(*sys.argv[1:])
