"""Queues of requests and the batches that are cut from them, without I/O and without a clock; and the settings, each with its rule and help."""

from dataclasses import dataclass
from typing import Any

from weir.config import AT_LEAST_ONE, AT_LEAST_ZERO, POSITIVE, ROWS, SHARE, Checked, setting


@dataclass(frozen=True)
class BatchingSettings(Checked):
    """The settings by which requests become batches. Durations are in seconds, sizes in rows."""

    max_batch_size: int = setting(64, "largest batch, in rows; 1 disables batching", rule=ROWS)
    policy: Any = setting(
        "greedy",
        "when to dispatch a batch: greedy, size-or-delay:size=32,delay=5ms, full, control-limit:8, auto, FILE.npz, or module:Class",
        metavar="POLICY",
    )
    max_queue_delay: float = setting(
        0.1, "maximum wait: seconds that a policy may hold a request back", rule=AT_LEAST_ZERO
    )
    max_queue_size: int = setting(
        1024,
        "maximum queue length, in rows; when it is full, requests are refused or in-process callers wait",
        rule=AT_LEAST_ONE,
    )
    max_queue_cost: float | None = setting(
        None, "maximum total cost of waiting requests (see Model.measure)", rule=POSITIVE
    )
    bulk_delay: float | None = setting(
        None,
        "seconds by which bulk work may delay other requests (default: a twentieth of the latency objective, or 0.005)",
        rule=AT_LEAST_ZERO,
    )
    capacity: int | None = setting(
        None, "maximum number of rows waiting and running (default for chains: 4096)", rule=AT_LEAST_ONE
    )
    max_batch_cost: float | None = setting(None, "maximum total cost of a batch (see Model.measure)", rule=POSITIVE)
    padded: bool = setting(False, "the model pads batches, so costs are lengths")
    max_padding: float | None = setting(
        None, "for padded batches: maximum padding, in units of cost", rule=AT_LEAST_ZERO
    )
    padding_cost: float = setting(1.0, "for padded batches: cost of a padding token relative to a real one", rule=SHARE)
    small_request_size: int = setting(
        16,
        "0 keeps arrival order; otherwise requests wait in proportion to their rows, or to their costs if padded",
        rule=AT_LEAST_ZERO,
    )
    max_overtakes: int = setting(
        4, "maximum number of batches that may overtake the oldest large request", rule=AT_LEAST_ZERO
    )
