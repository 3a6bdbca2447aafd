"""Makes the plan of a failing seed smaller while it still fails: fewer clients, faults and turns."""

import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tests.simulated.plans import Plan
from tests.simulated.world import Result, simulate

T = TypeVar("T")
SEEDS = Path(__file__).parent / "seeds"
_LONGEST = 60.0  # seconds
_WHEN, _VARIES = (
    re.compile(r"^at \S+ s: "),
    re.compile(r"[0-9]+(?:[.e][-+0-9]+)*|(?<=: )b?['\"{(].*$|ready is (?:True|False)"),
)


def narrowed(plan: Plan, kept: dict[str, Any]) -> Plan:
    """Return `plan` with only these clients and faults, by their numbers, and so many turns."""
    faults = [plan.faults[number] for number in kept["faults"]]
    return replace(plan, clients=kept["clients"], faults=faults, kept_faults=kept["faults"], turns=kept["turns"])


def kept_of(plan: Plan) -> dict[str, Any]:
    """Return what is left of `plan`, as `narrowed` takes it."""
    return {"clients": plan.clients, "faults": plan.kept_faults, "turns": plan.turns}


def keep(failed: Result) -> None:
    """Write a file of the folder SEEDS: the tests run it from now on."""
    command = ("git", "rev-parse", "HEAD")
    commit = subprocess.run(command, cwd=SEEDS, capture_output=True, text=True, check=False).stdout.strip()
    found = {"seed": failed.plan.seed, "kept": kept_of(failed.plan), "fault": failed.fault, "commit": commit}
    (SEEDS / f"{failed.plan.seed}.json").write_text(f"{json.dumps(found, indent=1)}\n")


def command(plan: Plan, mutant: str | None = None) -> str:
    """Return the command that replays `plan`."""
    kept = json.dumps(kept_of(plan))
    planted = f" --mutant {mutant}" if mutant else ""
    return f".venv/bin/python -m tests.simulated{planted} --seed {plan.seed} --kept '{kept}'"


def promise_of(fault: str) -> str:
    """Return which promise `fault` breaks: its text without instants, numbers, and what was received."""
    return _VARIES.sub("…", _WHEN.sub("", fault))


def shrunk(plan: Plan) -> Result:
    """Return the result of the smallest plan that was found to break the same promise: another fault must not take its place."""
    until = time.monotonic() + _LONGEST
    plan = replace(plan, kept_faults=list(range(len(plan.faults))))
    kept = kept_of(plan)
    best = simulate(plan)
    promise = promise_of(best.fault)

    def fails(**change: Any) -> bool:
        nonlocal best, kept
        if time.monotonic() > until:
            return False
        result = simulate(narrowed(plan, kept | change))
        same = bool(result.fault) and promise_of(result.fault) == promise
        if same:
            best, kept = result, kept | change
        return same

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
