"""The models that are served in the simulation: each item says what shall become of it."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from weir import errors
from weir.model import Model, Tensor

# What a caller must get for what the model raises. This is not read from Weir: it is what Weir promises.
STATUS = {
    "InvalidRequest": 400, "ValidationFailed": 422, "NotFound": 404, "ModelNotFound": 404, "TooLarge": 413, "MethodNotAllowed": 405,
    "UnsupportedMediaType": 415, "Unsupported": 501, "Conflict": 409, "Unauthorized": 401, "Forbidden": 403, "DeadlineExceeded": 408,
    "Cancelled": 499, "Overloaded": 429, "ModelNotReady": 503, "Draining": 503, "WorkerLost": 503, "ModelError": 500,
    "ModelCrashed": 500,
}  # fmt: skip
KSERVE_STATUS = STATUS | {"ValidationFailed": 400, "Conflict": 400}
RAISED = (
    *STATUS,
    "ValueError",
    "KeyError",
)  # what a model may raise for an item; what is not Weir's becomes a ModelError
ASKED = "the item asked for"  # the beginning of the message of each of them
OTHERS = ("returns", "unwritable", "few", "many", "crash", "hang")


class Crash(BaseException):
    """Ends the worker."""


class Hang(BaseException):
    """The worker does nothing more."""


def answer_to(n: int) -> int:
    """Return the answer to item `n`."""
    return (n * n + 7 * n) % 1_000_003


def raised(name: str) -> Exception:
    """Return the exception of this name."""
    kind: Any = getattr(errors, name, None) or {"ValueError": ValueError, "KeyError": KeyError}[name]
    error: Exception = kind(f"{ASKED} {name}")
    return error


class Items(Model):
    """Answers dicts: `n` is the item, `do` what shall happen, `size` how long the answer is."""

    def preprocess(self, item: Any) -> Any:
        if item["do"].startswith("pre:"):
            raise raised(item["do"][4:])
        return item

    def predict(self, batch: list[Any]) -> list[Any]:
        wanted = [item["do"] for item in batch]
        for do in wanted:
            if do == "crash":
                raise Crash
            if do == "hang":
                raise Hang
            if do in RAISED:
                raise raised(do)
        answers = [self.answer(item) for item in batch]
        if "few" in wanted:
            return answers[:-1]
        return [*answers, 1] if "many" in wanted else answers

    def answer(self, item: Any) -> Any:
        if item["do"] == "returns":
            return errors.NotFound("the model returned it")
        if item["do"] == "unwritable":
            return object()
        return {"n": item["n"], "v": answer_to(item["n"]), "pad": "x" * item.get("size", 0)}


# What the second column of the tensor says.
CODES = {1: "crash", 2: "hang", **dict(enumerate(RAISED, 10))}


class Tensors(Model):
    """Answers rows of two numbers: the item, and the code of what shall happen."""

    inputs = (Tensor("x", "INT64", [-1, 2]),)
    outputs = (Tensor("y", "INT64", [-1, 2]),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = batch["x"]
        for code in np.unique(x[:, 1]):
            if code == 1:
                raise Crash
            if code == 2:
                raise Hang
            if code:
                raise raised(CODES[int(code)])
        n = x[:, 0]
        return {"y": np.stack([n, (n * n + 7 * n) % 1_000_003], axis=1)}


class Streamed(Model):
    """Answers a dict with `size` parts."""

    streaming = True

    def predict(self, batch: list[Any]) -> Iterator[dict[int, Any]]:
        for step in range(max((item.get("size", 1) for item in batch), default=0)):
            yield {
                index: {"n": item["n"], "part": step} for index, item in enumerate(batch) if step < item.get("size", 1)
            }
