"""What a service's policy does, beside what it was predicted to do: one document for every kind of policy."""

from typing import Any

from weir.batching.batcher import Batcher
from weir.manager.measured import Measured


def explain_policy(model: str, policy: Any, batcher: Batcher, measured: Measured) -> dict[str, Any]:
    """Return the document about a policy that was not solved, as a JSON-able dict: what it knows nothing of is None.

    `policy` is the setting. Rates are rows per second; `measured` covers its `seconds`.
    """
    reading = measured.read()
    recent = batcher.recent
    return {
        "model": model,
        "policy": policy if isinstance(policy, str) else repr(policy),
        "rate": reading.rate,
        "capacity": None,
        "table": {"index": None, "rate": None, "limit": recent[-1]["limit"] if recent else None},
        "prices": None,
        "objective": None,
        "workers": batcher.workers,
        "predicted": {"response_time_ms": None, "p99_ms": None, "power_w": None, "cost": None},
        "measured": {
            "response_time_ms": reading.response_time_ms,
            "p99_ms": reading.p99_ms,
            "power_w": None,
            "cost": None,
            "rate": reading.rate,
            "seconds": reading.seconds,
            "requests": reading.requests,
            "rows": reading.rows,
            "batches": reading.batches,
        },
        "profile": None,
        "drift": None,
        "solved": None,
        "learning": False,
    }
