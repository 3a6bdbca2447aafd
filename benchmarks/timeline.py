"""What happened when: rounds of reading texts and batches of computing them, as a picture that browsers show.

Give `read` to an Encoder and the whole to its service as an observer, and open what `write` writes in chrome://tracing or
ui.perfetto.dev. Both clocks must be time.monotonic, which is what they are unless somebody says otherwise.
"""

import json
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from weir.messages import Dispatch, Timing
from weir.telemetry.recorder import SilentObserver

MOST = 100_000  # spans that are kept, the last ones


class Span(NamedTuple):
    """From when to when, in seconds, and how many texts."""

    began: float
    ended: float
    texts: int
    worker: int = 0


class Timeline(SilentObserver):
    """Remembers spans: `reading` of the front, `predicting` of the workers."""

    def __init__(self) -> None:
        self.reading: deque[Span] = deque(maxlen=MOST)
        self.predicting: deque[Span] = deque(maxlen=MOST)

    def read(self, began: float, ended: float, texts: int) -> None:
        """A round of reading is over."""
        self.reading.append(Span(began, ended, texts))

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """A batch is back."""
        ended = now - timing.postprocess
        self.predicting.append(Span(ended - timing.predict, ended, dispatch.rows, dispatch.worker))

    def overlap(self) -> float:
        """Return for how many seconds texts were read while some worker computed."""
        return sum(
            max(0.0, min(span.ended, end) - max(span.began, begin))
            for span in self.reading
            for begin, end in self._busy()
        )

    def _busy(self) -> list[tuple[float, float]]:
        """Return from when to when some worker computed."""
        busy: list[tuple[float, float]] = []
        for span in sorted(self.predicting):
            if busy and span.began <= busy[-1][1]:
                busy[-1] = busy[-1][0], max(busy[-1][1], span.ended)
            else:
                busy.append((span.began, span.ended))
        return busy

    def write(self, path: Path) -> None:
        """Write the picture: a row for the front, and one for each worker."""
        events = [_event("read", 0, span) for span in self.reading]
        events += [_event("predict", 1 + span.worker, span) for span in self.predicting]
        rows = {0: "front: reading texts"} | {1 + span.worker: f"worker {span.worker}" for span in self.predicting}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
            for row, name in rows.items()
        ]
        path.write_text(json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}))


def _event(name: str, row: int, span: Span) -> dict[str, Any]:
    """Return a span as the trace event format has it: microseconds."""
    lasts = round(1e6 * (span.ended - span.began), 1)
    return {
        "ph": "X", "name": name, "pid": 0, "tid": row, "ts": round(1e6 * span.began, 1), "dur": lasts, "args": {"texts": span.texts}
    }  # fmt: skip
