"""collate.py: dispatches to batches, events to answers."""

from weir.batching.batcher import Batcher
from weir.batching.collate import deliver, to_batch
from weir.batching.settings import BatchingSettings
from weir.messages import Events, Kind, RequestBase, Wakeup
from weir.policy.rules import Greedy


class Asked(RequestBase):
    """A request that does nothing with its answer."""

    def finish(self, output: object, dispatch: object) -> None:
        """Never called here."""

    def fail(self, error: Exception) -> None:
        """Never called here."""


def test_a_list_larger_than_a_batch_is_divided_and_gathered_in_order() -> None:
    batcher = Batcher(BatchingSettings(max_batch_size=4), Greedy())
    request = Asked(list(range(10)), 0.0, 30.0, kind=Kind.ITEMS, rows=10)
    batcher.submit(request, 0.0)
    batcher.worker_ready(0, 1, 0.0)
    sizes, ends = [], []
    while not batcher.is_empty:
        for dispatch in batcher.poll(0.0, Wakeup.WORKER):
            batch = to_batch(dispatch)
            sizes.append(len(batch.payloads))
            ends += deliver(dispatch, Events(dispatch.batch_id, [x * x for x in batch.payloads]))
            batcher.finished(dispatch.batch_id, 0.0)
    assert sizes == [4, 4, 2]
    assert ends == [(request, [x * x for x in range(10)])]
