"""What there is to see of a running service, as a JSON-able dict."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weir.manager.driver import Driver
    from weir.manager.service import Service


def snapshot(service: "Service", driver: "Driver") -> dict[str, Any]:
    """Return the state of `service`. Sizes are in rows unless the name says otherwise, ages in seconds."""
    batcher = driver.batcher
    return present(service, driver) | {
        "settings": settings_of(service),
        "batches": {reason.name.lower(): count for reason, count in batcher.counts.items()},
        "recent": list(batcher.recent),
        "policy": brief(service.explain_policy()),
    }


def present(service: "Service", driver: "Driver") -> dict[str, Any]:
    """Return of the state what can be looked at every second: neither settings nor history, and nothing of the policy."""
    batcher, now = driver.batcher, service.now()
    return {
        "model": service.name,
        "ready": service.ready,
        "reason": service.not_ready_reason,
        "draining": service.draining,
        "waiting": batcher.waiting_rows,
        "waiting_requests": batcher.waiting_requests,
        "waiting_outside": len(driver.outside),
        "oldest_age": batcher.oldest_age(now),
        "in_flight": sum(dispatch.rows for dispatch in batcher.running.values()),
        "in_flight_batches": len(batcher.running),
        "workers": [worker_line(state) for state in driver.executor.states()],
        "gauges": driver.executor.gauges(),
    }


def brief(explained: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a policy's explanation, without tables and settings."""
    predicted, measured, solved = explained["predicted"], explained["measured"], explained["solved"]
    return {
        "rate": explained["rate"],
        "limit": explained["table"]["limit"],
        "predicted_response_time_ms": predicted["response_time_ms"],
        "measured_response_time_ms": measured["response_time_ms"],
        "predicted_power_w": predicted["power_w"],
        "measured_power_w": measured["power_w"],
        "learning": explained["learning"],
        "resolves": {} if solved is None else solved["reasons"],
        "failed_resolves": 0 if solved is None else solved["failures"],
        "drift": None if explained["drift"] is None else explained["drift"]["factor"],
    }


def settings_of(service: "Service") -> dict[str, Any]:
    """Return the settings of all three kinds; values that JSON cannot carry are shown by their repr."""
    merged = asdict(service.batching) | asdict(service.workers) | asdict(service.settings)
    # Variables are often secrets: only their names are shown.
    merged["env"] = [sorted(variables) for variables in service.workers.env]
    return {key: value if isinstance(value, PLAIN) else repr(value) for key, value in merged.items()}


PLAIN = (bool, int, float, str, list, dict, type(None))


def worker_line(state: Any) -> dict[str, Any]:
    """Return one worker's state."""
    return {name: getattr(state, name) for name in ("index", "state", "pid", "in_flight", "restarts", "reason")}
