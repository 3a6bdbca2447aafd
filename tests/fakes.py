"""A request and an observer that record what happens to them."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from weir.batching.request_state import RequestBase
from weir.errors import ModelError, WeirError
from weir.messages import OBJECT, Dispatch, Form, Kind, Observer, Request, Timing


class FakeRequest(RequestBase):
    """A request without a caller, which records how it ended.

    `parts` are the parts delivered before the end. The end sets `output` and `dispatch`, or `error`. `ends` counts the ends; it must
    never be more than 1.
    """

    __slots__ = ("dispatch", "ends", "error", "output", "parts")

    def __init__(
        self, payload: Any, *, arrival: float = 1000.0, timeout: float = 30.0, kind: Kind = Kind.ITEM,
        content_type: str = OBJECT, accept: str = OBJECT, rows: int = 1, cost: float = 1.0, key: Hashable = None,
        priority: int = 0, frontend: str = "fake",
    ) -> None:  # fmt: skip
        super().__init__(
            Form(timeout, kind, content_type, accept, rows, cost, key, priority, frontend), payload, arrival
        )
        self.parts: list[Any] = []
        self.output: Any = None
        self.dispatch: Dispatch | None = None
        self.error: WeirError | None = None
        self.ends = 0

    def part(self, output: Any, dispatch: Dispatch) -> None:
        """Record one of several responses."""
        self.parts.append(output)

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Record the response."""
        self.output, self.dispatch = output, dispatch
        self.ends += 1

    def fail(self, error: WeirError) -> None:
        """Record the error."""
        self.error = error
        self.ends += 1


class RecordingObserver(Observer):
    """An observer that records the arguments of all calls, in one list per method."""

    def __init__(self) -> None:
        self.refusals: list[tuple[str, str, WeirError]] = []
        self.dispatches: list[Dispatch] = []
        self.responses: list[tuple[list[Request], WeirError | None, float]] = []
        self.streams: list[tuple[list[Request], list[Request], float]] = []
        self.timings: list[tuple[Dispatch, Timing]] = []
        self.failures: list[tuple[str, list[ModelError]]] = []
        self.worker_changes: list[tuple[int, str, str]] = []
        self.transfers: list[tuple[str, str, int, int]] = []

    def refused(self, model: str, frontend: str, error: WeirError) -> None:
        self.refusals.append((model, frontend, error))

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        self.dispatches.append(dispatch)

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        self.responses.append((list(requests), error, now))

    def streamed(self, model: str, requests: Sequence[Request], firsts: Sequence[Request], now: float) -> None:
        self.streams.append((list(requests), list(firsts), now))

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        self.timings.append((dispatch, timing))

    def failed(self, model: str, errors: Sequence[ModelError], now: float) -> None:
        self.failures.append((model, list(errors)))

    def worker_changed(self, model: str, worker: int, state: str, reason: str) -> None:
        self.worker_changes.append((worker, state, reason))

    def transferred(self, model: str, frontend: str, received_bytes: int, sent_bytes: int) -> None:
        self.transfers.append((model, frontend, received_bytes, sent_bytes))

    @property
    def kinds(self) -> Counter[str]:
        """How many requests have ended with each type of error, or with a response (""), those that were refused included."""
        kinds = Counter(type(error).__name__ for _, _, error in self.refusals)
        for requests, error, _ in self.responses:
            kinds["" if error is None else type(error).__name__] += len(requests)
        return kinds

    @property
    def ends(self) -> int:
        """The number of requests that have ended."""
        return sum(len(requests) for requests, _, _ in self.responses)
