"""Models that the tests of the command line serve."""

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import weir


class Square(weir.Model):
    """Squares numbers."""

    examples = (weir.Example(3, 9), 4)

    def predict(self, batch: list[Any]) -> list[Any]:
        return [x * x for x in batch]


class Steady(Square):
    """Takes as long each time, which is solved for in a moment."""

    max_batch_size = 8

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.001 + 0.0005 * len(batch))
        return super().predict(batch)


class Slow(weir.Model):
    """Takes half a second."""

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.5)
        return batch


class Lines(weir.Model):
    """Cannot be loaded, for a reason of several lines."""

    def load(self) -> None:
        raise ValueError("one\ntwo\x1b[2J")

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Cpus(weir.Model):
    """Tells on which CPUs it runs."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return [sorted(os.sched_getaffinity(0)) for _ in batch]


class SharedCpus(Cpus):
    """Is forked from a process that has loaded it."""

    def load_shared(self) -> None:
        self.loaded_on = sorted(os.sched_getaffinity(0))

    def predict(self, batch: list[Any]) -> list[Any]:
        return [self.loaded_on for _ in batch]


class Power(weir.Model):
    """Raises to a power that it is told."""

    max_batch_size = 7

    def __init__(self, exponent: int = 2) -> None:
        self.exponent = exponent

    def predict(self, batch: list[Any]) -> list[Any]:
        return [x**self.exponent for x in batch]


class Gated(weir.Model):
    """Says "begun" into one named pipe, then answers when the other is opened for writing."""

    def __init__(self, begun: str, gate: str) -> None:
        self.begun = Path(begun)
        self.gate = Path(gate)

    def predict(self, batch: list[Any]) -> list[Any]:
        self.begun.write_text("begun")
        self.gate.read_text()
        return batch


class SlowToLoad(Gated):
    """Waits in `load` for the gate."""

    def load(self) -> None:
        self.begun.write_text("begun")
        self.gate.read_text()


class Broken(weir.Model):
    """Cannot be loaded."""

    def load(self) -> None:
        raise FileNotFoundError("weights.bin is not there")

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Wrong(weir.Model):
    """Has an example whose expected answer is not what comes out, and one that fails."""

    examples = (weir.Example(3, 10), weir.Example("x"))
    warmup_sizes = ()

    def predict(self, batch: list[Any]) -> list[Any]:
        return [x * x for x in batch]


class Unwritable(weir.Model):
    """Answers what JSON has no form for."""

    examples = (1,)
    warmup_sizes = ()

    def predict(self, batch: list[Any]) -> list[Any]:
        return [object() for _ in batch]


class Environment(weir.Model):
    """Looks variables up in the worker's environment."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return [os.environ.get(name) for name in batch]


class Doubled(weir.Service):
    """A Service with a hook: squares the double."""

    model = Square

    async def before_batch(self, batch: list[Any]) -> list[Any]:
        return [2 * item for item in batch]


class Plain(weir.Model):
    """Has no examples."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Talks(weir.Model):
    """Says what it is told, in every way that there is."""

    def load(self) -> None:
        print("printed in load")

    def predict(self, batch: list[Any]) -> list[Any]:
        for item in batch:
            print("printed", item)
            print("complained", item, file=sys.stderr)
            logging.getLogger("talks").warning("logged %s", item)
            os.write(2, b"written by a library in C\n")
            if item == "fail":
                raise ValueError(item)
        return batch
