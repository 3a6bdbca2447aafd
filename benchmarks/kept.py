"""What a long measurement has found so far, in a file: whoever stops it and starts it again goes on where it was."""

import json
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.servers import ROOT

FOLDER = ROOT / "build"


def resumed(name: str, sources: Iterable[Path], find: Callable[[int], Iterable[Any]]) -> Iterator[Any]:
    """Yield the results of `find(0)` in their order, as JSON has them: those that an earlier run with the very same `sources`
    (files, and folders of Python) has found are read, `find(number)` finds the others from that number on."""
    path = FOLDER / f"{name}-{_digest(sources)}.jsonl"
    FOLDER.mkdir(exist_ok=True)
    known = path.read_text().split("\n")[:-1] if path.exists() else []  # a run that was killed may leave half a line
    path.write_text("".join(f"{line}\n" for line in known))
    yield from map(json.loads, known)
    with path.open("a") as file:
        for each in find(len(known)):
            file.write(json.dumps(each) + "\n")
            file.flush()
            yield json.loads(json.dumps(each))


def _digest(sources: Iterable[Path]) -> str:
    found = sha256()
    for source in sources:
        for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            found.update(path.read_bytes())
    return found.hexdigest()[:12]
