"""Tables near optimal ones: does one of them dominate a policy that no optimal one dominates?"""

from collections.abc import Iterator, Sequence

from reproduction.published import PROFILE
from weir.policy.solve.smdp import Performance, evaluate, is_stable
from weir.policy.solve.tables import Table, extended

STATES = 60  # rows waiting up to which an action is changed: beyond, states are visited too rarely to matter


def neighbours(table: Table) -> Iterator[tuple[str, Table]]:
    """Yield every table that has another action in one state, with what is other about it."""
    base = extended(table, max(len(table), STATES + 2))
    for state in range(1, STATES + 1):
        for action in range(min(state, PROFILE.max_batch_size) + 1):
            if action != base[state]:
                changed = base.copy()
                changed[state] = action
                yield f"{action or 'wait'} instead of {base[state] or 'wait'} with {state} waiting", changed


def dominating(load: float, tables: Sequence[Table], other: Performance) -> tuple[list[tuple[str, Performance]], int]:
    """Return those neighbours of `tables` that are no slower than `other` and use no more power, the thriftiest first, each
    in words; and how many were tried."""
    rate, tried, found = load * PROFILE.max_rate, 0, []
    for table in tables:
        for about, changed in neighbours(table):
            if not is_stable(PROFILE, rate, changed):
                continue
            tried += 1
            seen = evaluate(PROFILE, rate, changed)
            if seen.response_time_ms <= other.response_time_ms and seen.power_w <= other.power_w:
                found.append((about, seen))
    return sorted(found, key=lambda each: each[1].power_w), tried
