"""How much of what workers computed was padding, for /metrics."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from weir.embedding.texts import Tokens
from weir.messages import Dispatch, Timing
from weir.telemetry.silent import SilentObserver

Runs = Callable[[Sequence[int]], Iterable[Sequence[int]]]


class Computing(NamedTuple):
    """How the workers of a model make rectangles of a batch: `runs` says, of the lengths of its texts, which run together (None: all do);
    each is filled up to the longest of a run, and to `fixed_length`. Padding takes `padding_cost` of a token's time."""

    runs: Runs | None = None
    fixed_length: int = 0
    padding_cost: float = 1.0


class Waste(SilentObserver, Collector):
    """An Observer that counts the tokens that were computed, and the padding beside them, as tokens that would have taken as long, when a batch is
    back from its worker.

    `models` says how each model of texts computes, by label; others are not counted.
    """

    def __init__(self) -> None:
        self.models: dict[str, Computing] = {}
        self.tokens: defaultdict[str, int] = defaultdict(int)
        self.padding: defaultdict[str, float] = defaultdict(float)

    def computed(self, model: str, dispatch: Dispatch, timing: Timing, now: float) -> None:
        """Count a batch."""
        computing = self.models.get(model)
        if computing is None:
            return
        lengths = [length_of(request) for request in dispatch.requests]
        runs = [range(len(lengths))] if computing.runs is None else computing.runs(lengths)
        area = sum(len(run) * max(computing.fixed_length, *(lengths[place] for place in run)) for run in runs)
        self.tokens[model] += sum(lengths)
        self.padding[model] += computing.padding_cost * (area - sum(lengths))

    def collect(self) -> Iterator[Metric]:
        """Yield both families."""
        for name, text, counted in (
            ("weir_tokens", "Tokens of texts that workers have computed.", self.tokens),
            (
                "weir_padding_tokens",
                "Padding that workers have computed beside them, as tokens that take as long.",
                self.padding,
            ),
        ):
            family = CounterMetricFamily(name, text, labels=["model"])
            for model, count in list(counted.items()):
                family.add_metric([model], count)
            yield family


def length_of(request: Any) -> int:
    """Return how many tokens the text of `request` has; of one that only the worker reads, what it was thought to have."""
    payload = request.payload
    return len(payload.ids) // 4 if isinstance(payload, Tokens) else max(1, round(request.cost))
