"""Makes the plan of a failing seed smaller while it still fails: fewer clients, faults and turns."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from tests.simulated.world import Plan, Result, simulate

T = TypeVar("T")
_LONGEST = 60.0  # seconds


def narrowed(plan: Plan, kept: dict[str, Any]) -> Plan:
    """Return `plan` with only these clients and faults, by their numbers, and so many turns."""
    faults = [plan.faults[number] for number in kept["faults"]]
    return replace(plan, clients=kept["clients"], faults=faults, kept_faults=kept["faults"], turns=kept["turns"])


def command(plan: Plan, mutant: str | None = None) -> str:
    """Return the command that replays `plan`."""
    kept = json.dumps({"clients": plan.clients, "faults": plan.kept_faults, "turns": plan.turns})
    planted = f" --mutant {mutant}" if mutant else ""
    return f".venv/bin/python -m tests.simulated{planted} --seed {plan.seed} --kept '{kept}'"


def shrunk(plan: Plan) -> Result:
    """Return the result of the smallest plan that was found to fail."""
    until = time.monotonic() + _LONGEST
    plan = replace(plan, kept_faults=list(range(len(plan.faults))))
    kept: dict[str, Any] = {"clients": plan.clients, "faults": plan.kept_faults, "turns": plan.turns}
    best = simulate(plan)

    def fails(**change: Any) -> bool:
        nonlocal best, kept
        if time.monotonic() > until:
            return False
        result = simulate(narrowed(plan, kept | change))
        if result.fault:
            best, kept = result, kept | change
        return bool(result.fault)

    for name in ("clients", "faults", "clients"):
        _fewer(kept[name], lambda some, name=name: fails(**{name: some}))  # type: ignore[misc]  # the name of this round
    turns = int(kept["turns"])
    while turns > 1 and fails(turns=(turns := turns - max(1, turns // 4))):
        pass
    return best


def _fewer(items: list[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """Leave out halves of `items`, then quarters, and so on, as long as `fails` (Zeller's delta debugging)."""
    size = max(1, len(items) // 2)
    while items:
        at = 0
        while at < len(items):
            some = items[:at] + items[at + size :]
            if fails(some):
                items = some
            else:
                at += size
        if size == 1:
            break
        size //= 2
    return items
