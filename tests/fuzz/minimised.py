"""Keeps of a corpus what adds something: the smallest inputs that together take every turn in our code that any of them takes."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Turn = tuple[CodeType, int, int]  # in this code from this line to that one

KEPT = ("seed-", "crash-")  # what was written by hand, or broke a target once, whatever it adds
OURS = "/weir/"


def minimise(target: Callable[[bytes], None], folder: Path) -> tuple[int, int]:
    """Remove from `folder` what adds nothing; return how many files there were and how many are left."""
    files = sorted(folder.iterdir(), key=lambda file: (not is_kept(file), file.stat().st_size, file.name))
    known: set[Turn] = set()
    left = 0
    for file in files:
        taken = turns(target, file.read_bytes())
        if is_kept(file) or not taken <= known:
            known |= taken
            left += 1
        else:
            file.unlink()
    return len(files), left


def is_kept(file: Path) -> bool:
    """Return whether a file stays whatever it adds."""
    return any(word in file.name for word in KEPT)


def turns(target: Callable[[bytes], None], data: bytes) -> set[Turn]:
    """Return the turns that `target` takes in our code when it is given `data`."""
    taken: set[Turn] = set()

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        code, before = frame.f_code, 0
        if OURS not in code.co_filename:
            return None

        def step(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal before
            line = -1 if event == "exception" else frame.f_lineno
            taken.add((code, before, line))
            before = line
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        target(data)
    finally:
        sys.settrace(before)
    return taken
