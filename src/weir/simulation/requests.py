"""The simulator's request."""

from collections.abc import Hashable
from math import inf
from typing import Any

from weir.batching.request_state import begin
from weir.errors import WeirError
from weir.messages import OBJECT, Dispatch, Kind

ITEM, TENSORS = Kind.ITEM, Kind.TENSORS


class _Alike:
    """What all simulated requests have in common."""

    __slots__ = ()
    payload: Any = None
    content_type: str = OBJECT
    accept: str = OBJECT
    cost: float = 1.0
    key: Hashable = None
    priority: int = 0
    tag: float = 0.0
    brief: bool = False
    door: str = "simulation"
    trace: Any = None


class SimulatedRequest(_Alike):
    """A request of the simulator: as slim as the Batcher allows. `index` is its place in the order of arrival.

    One row is an item; more are a tensor, which may be divided.
    """

    __slots__ = (
        "arrival", "deadline", "index", "kind", "large", "overtaken", "partial", "rows", "settled", "taken", "timeout",
    )  # fmt: skip

    settled: bool
    taken: int
    overtaken: int
    partial: Any

    def __init__(self, index: int, arrival: float, timeout: float = inf, rows: int = 1) -> None:
        self.index = index
        self.arrival = arrival
        self.timeout = timeout
        self.deadline = arrival + timeout
        self.rows = rows
        self.kind = ITEM if rows == 1 else TENSORS
        self.large = False
        begin(self)

    def part(self, output: Any, dispatch: Dispatch) -> None:
        """No simulated model gives several answers."""

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Nobody waits for the answer."""

    def fail(self, error: WeirError) -> None:
        """Nobody waits for the answer."""
