"""The report of a policy: its predictions next to what was measured."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from weir.batching.batcher import Batcher
from weir.batching.workers import WorkerKinds
from weir.telemetry.recorder import RollingWindow, WindowSummary

if TYPE_CHECKING:
    from weir.policy.cost.profile import Profile
    from weir.tuning.policy_tuner import PolicyTuner


def explain_policy(
    model: str,
    policy: Any,
    batcher: Batcher,
    measured: RollingWindow,
    tuner: "PolicyTuner | None" = None,
    kind_names: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the report of a policy as a JSON-able dict. What is unknown is None.

    Rates are in rows per second and times in the unit of their names. `measured` covers its last `seconds`; its power
    assumes that batches take the energy of the profile.

    Args:
        model: the label of the model.
        policy: the value of the setting.
        batcher: which the policy decides for.
        measured: the recent batches.
        tuner: keeps the tables, if the policy is a solved one.
        kind_names: the names of the kinds of workers, by number.
    """
    reading = measured.read()
    recent = batcher.recent
    document: dict[str, Any] = {
        "model": model,
        "policy": policy if isinstance(policy, str) else repr(policy),
        "rate": reading.rate,
        "capacity": None,
        "table": {"index": None, "rate": None, "limit": recent[-1]["limit"] if recent else None},
        "prices": None,
        "objective": None,
        "workers": batcher.workers,
        "predicted": {"response_time_ms": None, "p99_ms": None, "power_w": None, "cost": None},
        "measured": _measured(reading),
        "profile": None,
        "drift": None,
        "device": None,
        "kinds": None,
        "solved": None,
        "learning": False,
    }
    if tuner is not None:
        document |= _solved(tuner, reading, batcher.workers)
    if batcher.kinds is not None:
        document["kinds"] = (document["kinds"] or {}) | {"workers": by_kind(kind_names, batcher.kinds)}
    return document


def by_kind(names: Sequence[str], kinds: WorkerKinds | None) -> list[dict[str, Any]]:
    """Return what the workers of each kind have done, as a JSON-able list; an empty one if all are alike."""
    if kinds is None:
        return []
    counts = zip(names, kinds.workers(), kinds.batches, kinds.rows, strict=True)
    return [{"kind": name, "ready": ready, "batches": batches, "rows": rows} for name, ready, batches, rows in counts]


def _measured(reading: WindowSummary) -> dict[str, Any]:
    measured = reading._asdict() | {"power_w": None, "cost": None}
    del measured["sizes"]
    return measured


def _solved(tuner: "PolicyTuner", reading: WindowSummary, workers: int) -> dict[str, Any]:
    """Return the part of the report that only a solved policy has, also while it is still greedy."""
    prices, objective, profile, bank = tuner.prices, tuner.objective, tuner.profile, tuner.policy.bank
    solved_for = tuner.solved_for
    explained = tuner.policy.explain() | {
        "workers": workers,
        "prices": asdict(prices),
        "objective": None if objective is None else objective.to_dict(),
        "measured": _measured(reading),
        "solved": {
            "count": sum(tuner.counts.values()),
            "reasons": dict(tuner.counts),
            "reason": tuner.reason,
            "seconds": tuner.seconds,
            "workers": None if solved_for is None else solved_for.workers,
            "rates": None if bank is None else bank.rates.tolist(),
            "limits": None if bank is None else bank.limits().tolist(),
            "solving": tuner.solving,
            "failures": tuner.failures,
            "error": tuner.error or None,
        },
    }
    if len(tuner.kinds) > 1:
        explained["kinds"] = (explained["kinds"] or {}) | {
            "profiles": {kind.name: None if kind.profile is None else _profile(kind.profile) for kind in tuner.kinds},
            "drift": {kind.name: kind.drift for kind in tuner.kinds},
        }
    elif profile is not None:
        explained["measured"] |= {"power_w": reading.power_w(profile), "cost": reading.cost(profile, prices)}
        explained["profile"] = _profile(profile)
        explained["drift"] = {"factor": tuner.kinds[0].drift}
    return explained


def _profile(profile: "Profile") -> dict[str, Any]:
    names = ("max_batch_size", "best_batch_size", "max_rate", "energy_source", "pipeline_depth", "latency_offset_ms")
    tables = {"service_time_ms": profile.service_time_ms.tolist(), "energy_mj": profile.energy_mj.tolist()}
    return {name: getattr(profile, name) for name in names} | tables
