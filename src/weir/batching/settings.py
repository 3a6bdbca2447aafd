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
        "when to cut a batch: greedy, size-or-delay:size=32,delay=5ms, full, control-limit:8, auto, FILE.npz, or module:Class",
        metavar="POLICY",
    )
    max_queue_delay: float = setting(0.1, "longest wait that a policy may impose, in seconds", rule=AT_LEAST_ZERO)
    max_queue_size: int = setting(
        1024, "maximum queue length, in rows; beyond it, requests are refused or callers wait", rule=AT_LEAST_ONE
    )
    max_queue_cost: float | None = setting(
        None,
        "largest sum of costs (see Model.measure) that may wait",
        rule=POSITIVE,
    )
    bulk_delay: float | None = setting(
        None,
        "seconds that bulk work may delay others (default: a twentieth of the latency objective, or 0.005)",
        rule=AT_LEAST_ZERO,
    )
    capacity: int | None = setting(
        None,
        "rows that may wait and run together (default for chains: 4096)",
        rule=AT_LEAST_ONE,
    )
    max_batch_cost: float | None = setting(None, "largest sum of costs in a batch (see Model.measure)", rule=POSITIVE)
    padded: bool = setting(False, "the model pads batches: costs are lengths")
    max_padding: float | None = setting(
        None,
        "where padded: most padding in a batch, in units of cost",
        rule=AT_LEAST_ZERO,
    )
    padding_cost: float = setting(
        1.0,
        "where padded: cost of a padding token as a share of a real one's",
        rule=SHARE,
    )
    small_request_size: int = setting(
        16,
        "0 keeps the order of arrival; else requests wait in proportion to rows, or costs if padded",
        rule=AT_LEAST_ZERO,
    )
    max_overtakes: int = setting(4, "batches that may overtake the oldest large request", rule=AT_LEAST_ZERO)

    def __post_init__(self) -> None:
        check(self)
