"""Models whose worker processes the tests start, and end in every way there is."""

import atexit
import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from weir.errors import SettingsError
from weir.model import Model, Tensor


class Square(Model):
    def predict(self, batch: list[Any]) -> list[Any]:
        return [x * x for x in batch]


class Echo(Model):
    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Obedient(Model):
    """Does what each item says."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return [getattr(self, item)() if isinstance(item, str) else item for item in batch]

    def pid(self) -> int:
        return os.getpid()

    def exit(self) -> None:
        os._exit(3)

    def raise_system_exit(self) -> None:
        sys.exit(4)

    def abort(self) -> None:
        os.kill(os.getpid(), 6)

    def spin(self) -> None:
        """Never come back, in C, with the GIL held."""
        sum(range(10**15))

    def close_everything(self) -> None:
        os.closerange(3, 1000)
        time.sleep(1000)

    def start_a_program(self) -> int:
        return subprocess.Popen(["sleep", "1000"]).pid

    def fork(self) -> int:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"here")
            while True:
                time.sleep(1000)
        os.read(read, 4)  # a signal that comes before Python is done with forking is lost
        return child

    def fork_and_come_back(self) -> int:
        """A child that runs on in our own loop."""
        return os.fork()

    def fork_and_exit(self) -> int:
        """A child that ends as programs do."""
        if (child := os.fork()) == 0:
            sys.exit(0)
        return os.waitpid(child, 0)[1]

    def fork_unnoticed(self) -> int:
        """The same, of which Python does not know: its answer is one too many."""
        return ctypes.CDLL(None).fork()  # type: ignore[no-any-return]  # an int

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def affinity(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    def index(self) -> int:
        return self.worker_index

    def write(self) -> None:
        print("said by predict")
        print("complained by predict", file=sys.stderr)

    def read(self) -> str:
        return sys.stdin.read()

    def parent_death_signal(self) -> int:
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
        return number.value


class Begins(Model):
    """Makes a file when it computes."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def predict(self, batch: list[Any]) -> list[Any]:
        self.path.touch()
        return batch


class Noted(Model):
    """Notes in a file when it is unloaded."""

    def __init__(self, note: str) -> None:
        self.note = Path(note)

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch

    def unload(self) -> None:
        self.note.write_text(f"unloaded {self.worker_index}")


class ToldWhy(Noted):
    """Notes what has ended its worker."""

    def predict(self, batch: list[Any]) -> list[Any]:
        if "exit" in batch:
            raise SystemExit(7)
        return batch

    def unload(self, error: BaseException | None = None) -> None:
        self.note.write_text(repr(error))


class FailsInConstructor(Square):
    def __init__(self) -> None:
        raise ValueError("no weights for a constructor")


class FailsInLoad(Square):
    def __init__(self, worker: int = 0) -> None:
        self.worker = worker

    def load(self) -> None:
        if self.worker_index == self.worker:
            raise LookupError("no weights to load")


class ExitsInLoad(Square):
    def load(self) -> None:
        os._exit(5)


class NeverLoads(Square):
    def load(self) -> None:
        time.sleep(1000)


class LoadsWhile(Obedient):
    """Loads only while a file is there."""

    def __init__(self, file: str) -> None:
        self.file = file

    def load(self) -> None:
        if not os.path.exists(self.file):
            raise FileNotFoundError(self.file)


class Gated(Model):
    """Says through one FIFO that it has come to a step, and goes on when told through another."""

    def __init__(self, entered: str, go: str, step: str = "predict") -> None:
        self.entered, self.go, self.step = entered, go, step

    def pause(self, step: str) -> None:
        if step == self.step:
            Path(self.entered).write_text(step)
            Path(self.go).read_text()

    def preprocess(self, item: Any) -> Any:
        if item == "gate":
            self.pause("preprocess")
        return item

    def predict(self, batch: list[Any]) -> list[Any]:
        if "gate" in batch:
            self.pause("predict")
        return [(item, len(batch)) for item in batch]


class Overlapping(Model):
    """Its first batch comes back only once its second one is being prepared."""

    def __init__(self) -> None:
        self.second = threading.Event()

    def preprocess(self, item: Any) -> Any:
        if item == "second":
            self.second.set()
        return item

    def predict(self, batch: list[Any]) -> list[Any]:
        return [self.second.wait(60) if item == "first" else item for item in batch]


class SlowAndPicky(Model):
    """Takes half a second for any batch, and raises for one with a bad item."""

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.5)
        if "bad" in batch:
            raise ValueError("bad")
        return batch


class Forked(Model):
    """Shares what it has loaded, and tells of it."""

    def __init__(self, slow: str = "") -> None:
        self.slow = slow

    def load_shared(self) -> None:
        if self.slow:
            Path(self.slow).write_text("begun")
            threading.Event().wait()
        self.loaded_by = os.getpid()
        self.weights = bytearray(100)

    def load(self) -> None:
        self.own = os.getpid()

    def predict(self, batch: list[Any]) -> list[Any]:
        return [getattr(self, item)() for item in batch]

    def tell(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(), "index": self.worker_index, "own": self.own, "loaded_by": self.loaded_by,
            "address": id(self.weights), "cpus": sorted(os.sched_getaffinity(0)),
        }  # fmt: skip

    def exit(self) -> None:
        os._exit(7)


class SharesNothing(Forked):
    """Cannot load before it is a worker."""

    def load_shared(self) -> None:
        if "template" in sys.argv:
            raise RuntimeError("not here")
        super().load_shared()


def forked_from(pid: int) -> int:
    """Return the number of the parent of this process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Reports(Model):
    """Says which model and process it is and which process loaded what is shared, or does what the item says: it ends, or reads a file."""

    def load_shared(self) -> None:
        self.loaded_in = os.getpid()

    def predict(self, batch: list[Any]) -> list[Any]:
        return [self.obey(item) for item in batch]

    def obey(self, item: Any) -> Any:
        if item == "exit":
            os._exit(3)
        if isinstance(item, str):
            Path(item).read_bytes()
        return type(self).__name__, os.getpid(), self.loaded_in


class SecondWaits(Model):
    """Its second worker loads when something is written to the FIFO."""

    def __init__(self, fifo: str) -> None:
        self.fifo = Path(fifo)

    def load(self) -> None:
        if self.worker_index == 1:
            self.fifo.read_text()

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Draws(Model):
    """Answers with a random number, and writes to the file that it got when its process ends."""

    def predict(self, batch: list[str]) -> list[float]:
        import numpy as np  # the other models here do without it

        atexit.register(Path(batch[0]).write_text, "ended")
        return [float(np.random.random()) for _ in batch]


class ReportsToo(Reports):
    """Another model."""


class Unloadable(Reports):
    """Cannot be loaded."""

    def load(self) -> None:
        raise LookupError("no weights")


class WithoutWeights(Reports):
    """Says itself that it cannot be loaded."""

    def load_shared(self) -> None:
        raise SettingsError("weights.bin: is missing")


class ForAllWorkOnly(Obedient):
    """Does not load in workers for bulk work."""

    def load(self) -> None:
        if self.worker_index > 0:
            raise ValueError("no bulk work here")


class Doubles(Model):
    """A tensor model, which adds the number of its process."""

    inputs = (Tensor("x", "FP32", [-1, -1]),)
    outputs = (Tensor("y", "FP32", [-1, -1]), Tensor("pid", "INT64", [-1]))

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"] * 2, "pid": [os.getpid()] * len(batch["x"])}


class DoublesInPlace(Doubles):
    """Writes to its inputs."""

    owns_inputs = True

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch["x"] *= 2
        return {"y": batch["x"], "pid": [os.getpid()] * len(batch["x"])}
