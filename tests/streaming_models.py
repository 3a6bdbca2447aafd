"""Streaming models for the tests of every part: small, and told by their items what to do."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from weir import InvalidRequest, Last, Model, Tensor

Given = Iterator[dict[int, Any]]


class Count(Model):
    """Counts to each item, all items of the batch in step: 3 gives 1, 2, 3."""

    streaming = True
    max_batch_size = 8
    examples = (2,)

    def predict(self, batch: list[int]) -> Any:
        for number in range(1, max(batch) + 1):
            yield {index: number for index, item in enumerate(batch) if number <= item}


class Tick(Model):
    """Gives each item back again and again, 100 times a second, as long as anybody waits for it; a negative one once."""

    streaming = True
    max_batch_size = 1
    examples = (-1,)

    def predict(self, batch: list[int]) -> Any:
        yield dict(enumerate(batch))
        while batch[0] >= 0:
            time.sleep(0.01)
            yield dict(enumerate(batch))


class Script(Model):
    """An item is a list of what to do, a step for each yield: a value to give, {"last": value}, {"error": text}, None for
    nothing, or {"until": path} to wait for a file. The yields, and what came back of them, are in the file `ledger` if
    there is one."""

    streaming = True
    max_batch_size = 8

    def __init__(self, ledger: str = "") -> None:
        self._ledger = Path(ledger) if ledger else None

    def predict(self, batch: list[list[Any]]) -> Any:
        self._note(f"batch {len(batch)}")
        try:
            for step in range(max(map(len, batch))):
                given = {index: script[step] for index, script in enumerate(batch) if step < len(script)}
                _wait_for([said["until"] for said in given.values() if isinstance(said, dict) and "until" in said])
                left = yield {
                    index: _meant(said)
                    for index, said in given.items()
                    if said is not None and not (isinstance(said, dict) and "until" in said)
                }
                self._note(f"left {sorted(left)}")
        except GeneratorExit:
            self._note("closed")
            raise
        self._note("done")

    def _note(self, line: str) -> None:
        if self._ledger is not None:
            with self._ledger.open("a") as ledger:
                ledger.write(line + "\n")


def _wait_for(paths: list[str]) -> None:
    while not all(Path(path).exists() for path in paths):
        time.sleep(0.002)


def _meant(said: Any) -> Any:
    if isinstance(said, dict) and "last" in said:
        return Last(said["last"])
    if isinstance(said, dict) and "error" in said:
        return InvalidRequest(said["error"])
    return said


class Ticking(Model):
    """Gives the numbers from 0, `seconds` apart, until nobody is left; writes "closed" into `ledger` then. No number is more than
    the bytes of the file `pace`, if there is one."""

    streaming = True
    max_batch_size = 8
    retry_in_halves = False

    def __init__(self, ledger: str = "", seconds: float = 0.005, size: int = 0, pace: str = "") -> None:
        self._ledger = ledger
        self._pace = pace
        self._seconds = seconds
        self._size = size

    def predict(self, batch: list[Any]) -> Any:
        number = 0
        try:
            while True:
                yield dict.fromkeys(range(len(batch)), (number, "x" * self._size) if self._size else number)
                number += 1
                time.sleep(self._seconds)
                while self._pace and Path(self._pace).stat().st_size < number:
                    yield {}
                    time.sleep(self._seconds)
        finally:
            if self._ledger:
                Path(self._ledger).write_text("closed")


class Dying(Model):
    """Kills its worker after one part, if told so by an item."""

    streaming = True

    def predict(self, batch: list[str]) -> Any:
        import os
        import signal

        yield {index: "begun" for index, item in enumerate(batch) if item != "silent"}
        if "die" in batch:
            os.kill(os.getpid(), signal.SIGKILL)
        yield {index: Last("whole") for index in range(len(batch))}


class Raising(Model):
    """Raises at once for "now", after one part for "later"; gives everybody else two answers."""

    streaming = True
    max_batch_size = 8

    def predict(self, batch: list[str]) -> Any:
        if "now" in batch:
            raise RuntimeError("not today")
        yield dict(enumerate(batch))
        if "later" in batch:
            raise RuntimeError("not tomorrow")
        yield {index: item.upper() for index, item in enumerate(batch)}


class Prefixes(Model):
    """A tensor model: gives the sum of the first row, of the first two, and so on."""

    streaming = True
    max_batch_size = 8
    inputs = (Tensor("x", "FP32", [-1, 2]),)
    outputs = (Tensor("sum", "FP32", [-1, 2]), Tensor("rows", "INT32", [-1]))

    def predict(self, batch: list[dict[str, Any]]) -> Any:
        for count in range(1, max(len(item["x"]) for item in batch) + 1):
            yield {
                index: {"sum": item["x"][:count].sum(axis=0, keepdims=True), "rows": numpy.array([count], "int32")}
                for index, item in enumerate(batch)
                if count <= len(item["x"])
            }


class Fire(Model):
    """An item is [how many numbers to give, how large each answer is, after how many to kill the worker (-1: never)]."""

    streaming = True
    max_batch_size = 8

    def predict(self, batch: list[list[int]]) -> Any:
        import os
        import signal

        for number in range(max(count for count, _, _ in batch)):
            left = yield {index: [number, "x" * size] for index, (count, size, _) in enumerate(batch) if number < count}
            if any(number == death for index, (_, _, death) in enumerate(batch) if index not in left):
                os.kill(os.getpid(), signal.SIGKILL)
