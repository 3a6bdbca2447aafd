"""The settings of batching, each stated once with its rule and its help text."""

from dataclasses import dataclass
from typing import Any

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, ROWS, SHARE, check, setting


@dataclass(frozen=True)
class BatchingSettings:
    """How requests become batches. Durations are in seconds, sizes in rows."""

    max_batch_size: int = setting(64, "largest batch, in rows; 1 switches batching off", rule=ROWS)
    policy: Any = setting(
        "greedy",
        "when a batch is cut: greedy, size-or-delay:size=32,delay=5ms, full, control-limit:8, auto, FILE.npz, or module:Class",
        metavar="POLICY",
    )
    max_queue_delay: float = setting(0.1, "longest wait that any policy may impose, in seconds", rule=AT_LEAST_ZERO)
    max_queue_size: int = setting(1024, "rows that may wait; more are refused or wait outside", rule=AT_LEAST_ONE)
    max_queue_cost: float | None = setting(
        None,
        "largest sum of costs that may wait, such as tokens (see Model.measure); more is refused or waits outside",
        rule=POSITIVE,
    )
    bulk_delay: float | None = setting(
        None,
        "seconds that bulk requests (priority below 0) may add to others: a batch of bulk work takes at most so long. Unless said, a "
        "twentieth of the latency objective, or 0.005 without one",
        rule=AT_LEAST_ZERO,
    )
    capacity: int | None = setting(
        None,
        "rows that may be under way at once, waiting and with workers; more are refused or wait outside. Of a chain: in all its "
        "steps together (4096 unless said)",
        rule=AT_LEAST_ONE,
    )
    max_batch_cost: float | None = setting(None, "largest sum of costs in a batch (see Model.measure)", rule=POSITIVE)
    padded: bool = setting(
        False, "the model pads a batch to its longest: costs are lengths, a batch costs its rows times its longest"
    )
    max_padding: float | None = setting(
        None,
        "where padded: most padding in a batch, in units of cost; best half of what a batch costs beyond them",
        rule=AT_LEAST_ZERO,
    )
    padding_cost: float = setting(
        1.0,
        "where padded: what padding costs, as a share of what as many tokens do; less than 1 where the model computes less for it",
        rule=SHARE,
    )
    small_request_size: int = setting(
        16,
        "0 keeps arrival order; with any other number requests wait in proportion to their rows, or, where padded, to their costs",
        rule=AT_LEAST_ZERO,
    )
    max_overtakes: int = setting(
        4, "batches that may go before the oldest of the requests larger than a row", rule=AT_LEAST_ZERO
    )

    def __post_init__(self) -> None:
        check(self)
