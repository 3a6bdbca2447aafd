"""A class of work, interactive or bulk: what waits, the workers that run it, and what these had when they died."""

from weir.batching.group import FifoQueue
from weir.batching.queue import RequestQueue
from weir.batching.retry import CrashRetry
from weir.batching.settings import BatchingSettings
from weir.batching.workers import Places
from weir.messages import Request


class WorkClass:
    """One class of work. `queue` has the requests that wait, `places` the workers that are ready, and `suspects` the entries that such a worker had when
    it died."""

    __slots__ = ("places", "queue", "suspects")

    def __init__(self, settings: BatchingSettings, queue_type: type[FifoQueue]) -> None:
        self.queue = RequestQueue(settings.max_queue_size, queue_type, settings.capacity, settings.max_queue_cost)
        self.places = Places()
        self.suspects = CrashRetry()

    def count_suspects(self, *, changed: bool = False) -> None:
        """Tell the queue how many rows are to run again: they count as under way. Without `changed`, only if there are any."""
        if changed or self.suspects.parts:
            self.queue.run_again(self.suspects.rows)

    def unsettled(self) -> list[Request]:
        """Return the requests that wait or are to run again. A request may be there several times."""
        return [
            *(request for group in self.queue.groups.values() for request in group),
            *(entry[0] for entry in self.suspects.entries()),
        ]

    def clear(self) -> None:
        """Forget what waits and what is to run again."""
        self.queue.clear()
        self.suspects.clear()
