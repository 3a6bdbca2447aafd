"""What was decided: batches by reason, and the explanations of the last ones."""

from collections import deque
from typing import Any

from weir.messages import Dispatch, Reason

RECENT = 100


class History:
    """Remembers dispatches without their requests. `counts` adds up to the number of batches."""

    __slots__ = ("_recent", "counts")

    def __init__(self) -> None:
        self.counts = dict.fromkeys(Reason, 0)
        self._recent: deque[tuple[Any, ...]] = deque(maxlen=RECENT)

    def note(self, cut: Dispatch) -> None:
        """Remember a dispatch."""
        self.counts[cut.reason] += 1
        self._recent.append((
            cut.batch_id, cut.worker, cut.rows, cut.cost, cut.reason, cut.waiting, cut.oldest_age, cut.limit, cut.wakeup,
            cut.at, cut.attempt, False, cut.padding,
        ))  # fmt: skip

    def recent(self) -> list[dict[str, Any]]:
        """Return the explanations of the last 100 dispatches, oldest first."""
        return [
            Dispatch(batch_id, worker, [], None, rows, cost, *explanation).explain()
            for batch_id, worker, rows, cost, *explanation in self._recent
        ]
