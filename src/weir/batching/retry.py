"""The entries that a worker had when it died, and that run again.

One of them may have ended the worker, so they run again in halves, each half alone on a worker, until that one is found: at most
ceil(log2 n) + 1 rounds for n entries. An entry whose worker died while it ran alone gets one more try, alone.
"""

from collections import deque
from math import ceil, inf
from typing import NamedTuple

from weir.batching.collate import Entry, Lost, entries_of, is_done
from weir.batching.compose import BatchDraft
from weir.batching.padded import length_of
from weir.messages import Dispatch, Kind, Request


class RetryBatch(NamedTuple):
    """Entries that run again together. `last`: it is the last try of a single entry."""

    entries: list[Entry]
    attempt: int
    last: bool


class CrashRetry:
    """The `parts` that are to run again, in the order in which their workers died."""

    def __init__(self) -> None:
        self.parts: deque[RetryBatch] = deque()
        self.last_tries: set[int] = (
            set()
        )  # ids of batches that are the last try of their entry; one that comes back is removed

    def __len__(self) -> int:
        return len(self.parts)

    def died(self, dispatch: Dispatch) -> Lost:
        """Note that the worker of `dispatch` died: queue the entries that can run again, and return the others."""
        entries = entries_of(dispatch)
        begun = dispatch.begun or ()
        left = [(index, entry) for index, entry in enumerate(entries) if not is_done(entry)]
        interrupted = [entry for index, entry in left if index in begun]
        suspects = [entry for index, entry in left if index not in begun]
        if dispatch.batch_id in self.last_tries:
            self.last_tries.discard(dispatch.batch_id)
            return Lost(dispatch, suspects, interrupted)
        self._halve(suspects, dispatch.attempt + 1, last=len(entries) == 1)
        return Lost(dispatch, [], interrupted)

    def _halve(self, entries: list[Entry], attempt: int, *, last: bool) -> None:
        middle = (len(entries) + 1) // 2
        for half in (entries[:middle], entries[middle:]):
            if half:
                self.parts.append(RetryBatch(half, attempt, last))

    def pop(self) -> RetryBatch | None:
        """Return the next part, without the entries that are done by now; None if nothing is left."""
        while self.parts:
            entries, attempt, last = self.parts.popleft()
            left = [entry for entry in entries if not is_done(entry)]
            if left:
                return RetryBatch(left, attempt, last)
        return None

    def started(self, batch_id: int, part: RetryBatch) -> None:
        """Note that `part` runs as batch `batch_id`."""
        if part.last:
            self.last_tries.add(batch_id)

    def entries(self) -> list[Entry]:
        """Return all entries that are to run again and are not done."""
        return [entry for part in self.parts for entry in part.entries if not is_done(entry)]

    @property
    def rows(self) -> int:
        """The number of rows that must run again and are not done."""
        rows = sum(
            request.form.rows * (stop - start) / _entry_range(request) for request, start, stop in self.entries()
        )
        return ceil(rows - 1e-9)

    def earliest_deadline(self) -> float:
        """Return the earliest deadline among them; infinity if there is none."""
        return min((entry[0].deadline for entry in self.entries()), default=inf)

    def passed(self, now: float) -> list[Request]:
        """Return the unsettled requests whose deadline is not after `now`."""
        return [entry[0] for entry in self.entries() if entry[0].deadline <= now]

    def clear(self) -> None:
        """Forget all entries."""
        self.parts.clear()
        self.last_tries.clear()


def draft_of(entries: list[Entry], padding_cost: float | None = None) -> BatchDraft:
    """Return a draft of `entries`; adjacent entries of one request become one slice. With a `padding_cost` the batch is padded, and costs what a
    PaddedDraft does."""
    draft = BatchDraft(0, inf, 0.0)
    draft.slices = []
    rows = 0.0
    for request, start, stop in entries:
        draft.undivided = draft.undivided and request.form.kind is Kind.ITEM
        share = (stop - start) / _entry_range(request)
        rows += request.form.rows * share
        draft.cost += request.form.cost * share
        last = draft.slices[-1] if draft.slices else None
        if last is not None and draft.requests[-1] is request and last[1] == start:
            draft.slices[-1] = (last[0], stop)
        else:
            draft.requests.append(request)
            draft.slices.append((start, stop))
    draft.rows = ceil(rows - 1e-9)
    if padding_cost is not None:
        draft.padding = padding_cost * (draft.rows * max(map(length_of, draft.requests)) - draft.cost)
        draft.cost += draft.padding
    if draft.undivided:
        draft.slices = None
    return draft


def _entry_range(request: Request) -> int:
    """Return where the ranges of the entries of `request` end."""
    if request.form.kind is Kind.TENSORS:
        return request.form.rows
    return len(request.payload) if request.form.kind is Kind.ITEMS else 1
