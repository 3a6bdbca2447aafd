"""The models that are served in the simulation: each item says what shall become of it."""

from collections.abc import Generator
from typing import Any

import numpy as np

from weir import errors
from weir.model import Last, Model, Tensor

# What a caller must get for what the model raises. This is not read from Weir: it is what Weir promises.
STATUS = {
    "InvalidRequest": 400, "ValidationFailed": 422, "NotFound": 404, "ModelNotFound": 404, "TooLarge": 413, "MethodNotAllowed": 405,
    "UnsupportedMediaType": 415, "Unsupported": 501, "Conflict": 409, "Unauthorized": 401, "Forbidden": 403, "DeadlineExceeded": 504,
    "Cancelled": 499, "Overloaded": 429, "ModelNotReady": 503, "Draining": 503, "WorkerLost": 503, "ModelError": 500,
    "ModelCrashed": 500,
}  # fmt: skip
KSERVE_STATUS = STATUS | {"ValidationFailed": 400, "Conflict": 400}
RAISED = (*STATUS, "ValueError", "KeyError")  # by a model for an item; what is not Weir's becomes a ModelError
ASKED = "the item asked for"  # the beginning of the message of each of them
OTHERS = ("returns", "unwritable", "few", "many", "crash", "hang")


_LONGEST = 1_000_000  # damaged requests may ask for any size


class Crash(BaseException):
    """Ends the worker."""


class Hang(BaseException):
    """The worker does nothing more."""


def answer_to(n: int) -> int:
    """Return the answer to item `n`."""
    return (n * n + 7 * n) % 1_000_003


def happen(do: str) -> None:
    """Raise what is to be raised."""
    if do in ("crash", "hang"):
        raise Crash if do == "crash" else Hang
    if do in RAISED:
        kind: type[Exception] = getattr(errors, do, None) or {"ValueError": ValueError, "KeyError": KeyError}[do]
        raise kind(f"{ASKED} {do}")


class Items(Model):
    """Answers dicts: `n` is the item, `do` what shall happen, `size` how long the answer is."""

    def preprocess(self, item: Any) -> Any:
        if item["do"].startswith("pre:"):
            happen(item["do"][4:])
        return item

    def predict(self, batch: list[Any]) -> list[Any]:
        wanted = [item["do"] for item in batch]
        for do in wanted:
            happen(do)
        answers = [self.answer(item) for item in batch]
        if "few" in wanted:
            return answers[:-1]
        return [*answers, 1] if "many" in wanted else answers

    def answer(self, item: Any) -> Any:
        if item["do"] == "returns":
            return errors.NotFound("the model returned it")
        if item["do"] == "unwritable":
            return object()
        return {"n": item["n"], "v": answer_to(item["n"]), "pad": "x" * min(item.get("size", 0), _LONGEST)}


# What the second column of the tensor says.
CODES = {0: "ok", 1: "crash", 2: "hang", **dict(enumerate(RAISED, 10))}


class Tensors(Model):
    """Answers rows of two numbers: the item, and the code of what shall happen."""

    inputs = (Tensor("x", "INT64", [-1, 2]),)
    outputs = (Tensor("y", "INT64", [-1, 2]),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = batch["x"]
        for code in np.unique(x[:, 1]):
            happen(CODES[int(code)])
        n = x[:, 0] % 1_000_003  # so that its square is no larger than an INT64
        return {"y": np.stack([x[:, 0], (n * n + 7 * n) % 1_000_003], axis=1)}


# What an item of a stream may ask for at its part `at`, besides what may be raised.
STREAMED = ("returns", "unwritable", "outside", "crash", "hang")


class Streams(Model):
    """Answers a dict with `size` parts, whose last is marked if it says so; at part `at` happens what `do` says."""

    streaming = True

    def predict(self, batch: list[Any]) -> Generator[dict[int, Any], Any, None]:
        left: Any = ()
        for part in range(min(max(item["size"] for item in batch), _LONGEST)):
            going = {index: item for index, item in enumerate(batch) if part < item["size"] and index not in left}
            left = (yield self._parts(going, part)) or ()

    def _parts(self, going: dict[int, Any], part: int) -> dict[int, Any]:
        parts: dict[int, Any] = {}
        for index, item in going.items():
            do = item["do"] if part == item["at"] else "ok"
            happen(do)
            answer: Any = {"n": item["n"], "part": part, "pad": "x" * min(item["pad"], _LONGEST)}
            if do == "outside":
                parts[1000] = answer
            elif do == "returns":
                parts[index] = errors.NotFound(f"{ASKED} to return it")
            elif do == "unwritable":
                parts[index] = object()
            else:
                parts[index] = Last(answer) if item["mark"] and part == item["size"] - 1 else answer
        return parts
