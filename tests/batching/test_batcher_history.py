"""history.py: counts by reason, and the last 100 explanations."""

import json

from tests.batching.mill import Mill, many

from weir.batching.batcher import RECENT, History
from weir.messages import Dispatch, Reason, Wakeup


def test_the_last_hundred_are_explained() -> None:
    history = History()
    cuts = [
        Dispatch(number, 1, [], None, 3, 4.5, Reason(number % 7), 9, 0.25, 8, Wakeup.TIMER, 2.0, number % 2)
        for number in range(250)
    ]
    for cut in cuts:
        history.note(cut)
    assert history.recent() == [cut.explain() for cut in cuts[-RECENT:]]
    assert sum(history.counts.values()) == 250
    assert set(history.counts) == set(Reason)
    json.dumps(history.recent())


def test_an_explanation_says_what_was_seen() -> None:
    mill = Mill(max_batch_size=4)
    first, second = (mill.submit(*many(3)), mill.submit(*many(6)))
    assert second == []
    mill.now = 0.5
    mill.finish(first[0])
    assert mill.batcher.recent == [
        {
            "batch_id": 1, "worker": 0, "rows": 3, "cost": 3.0, "padding": 0.0, "reason": "idle", "waiting": 3,
            "oldest_age": 0.0, "limit": None, "wakeup": "arrival", "at": 0.0, "attempt": 0,
        },
        {
            "batch_id": 2, "worker": 0, "rows": 4, "cost": 4.0, "padding": 0.0, "reason": "size", "waiting": 6,
            "oldest_age": 0.5, "limit": 4, "wakeup": "worker", "at": 0.5, "attempt": 0,
        },
    ]  # fmt: skip
