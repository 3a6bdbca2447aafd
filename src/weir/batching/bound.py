"""How many rows may wait, where the policy has a say in it."""

from weir.batching.queue import RequestQueue
from weir.policy.decision import Policy


class Bound:
    """The policy's bound on the line; the settings' own stays above it. `rows` is None while the policy has none."""

    __slots__ = ("_largest", "_line", "rows")

    def __init__(self, line: RequestQueue) -> None:
        self._line = line
        self._largest = line.max_rows
        self.rows: int | None = None

    def move(self, rows: int | None) -> None:
        """Let no more than `rows` wait, one at least, or (None) as many as the settings do."""
        self._line.resize(self._largest if rows is None else min(max(1, rows), self._largest))
        self.rows = rows

    def ask(self, policy: Policy, now: float) -> None:
        """The line is full: let more wait if the policy that bounds it says so by now. Raises whatever it raises."""
        full = getattr(policy, "full", None)
        if full is not None and self.rows is not None:
            self.move(full(now))
