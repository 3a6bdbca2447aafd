"""What computes vectors of tokens: the onnx runtime, or torch; on this device or that."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weir.errors import SettingsError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weir.embedding.checkpoint.reading import Checkpoint
    from weir.embedding.recipe import Recipe

RUNTIMES = ("onnx", "torch")


class Runtime(Protocol):
    """A model of texts on a device."""

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""

    @property
    def device(self) -> str:
        """Where it computes: cpu, or cuda and a number."""

    def run(
        self, ids: "NDArray[Any]", mask: "NDArray[Any]", types: "NDArray[Any]", pool: "NDArray[Any]"
    ) -> "NDArray[Any]":
        """Return float32 vectors, [texts, dimensions], or [texts, length, dimensions] if each token has one.

        All arguments are [texts, length]: token ids, 1 for a token and 0 for what is filled up, 1 for the second text of a pair (all int32), and how much a token
        counts in the pooling (float32).
        """


class Computing(NamedTuple):
    """On what vectors are computed, besides the device.

    `kind` is the runtime's name; `threads` are for one run on a CPU; `cache` is where graphs are kept (None: the user's cache directory);
    `compiled` has torch compile the model; `gpu_memory_fraction` is the largest part of a GPU's memory that a worker takes.
    """

    kind: str = "onnx"
    threads: int = 1
    cache: Path | None = None
    compiled: bool = False
    gpu_memory_fraction: float | None = None


def open_runtime(checkpoint: "Checkpoint", recipe: "Recipe", computing: Computing, device: str = "cpu") -> Runtime:
    """Return the runtime that computes what `recipe` says of `checkpoint` on `device`.

    Raises SettingsError: unknown, not installed, or it cannot do what the recipe says.
    """
    if computing.kind == "onnx":
        from weir.embedding.runtime.onnx import open_onnx

        return open_onnx(checkpoint, recipe, computing, device)
    if computing.kind == "torch":
        from weir.embedding.runtime.torch import open_torch

        return open_torch(checkpoint, recipe, computing, device)
    raise SettingsError(f"runtime={computing.kind!r}: must be one of {', '.join(RUNTIMES)}")
