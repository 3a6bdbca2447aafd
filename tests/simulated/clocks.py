"""The clocks of a simulated server. The wall clock jumps while requests wait: by the hand of somebody, by NTP, or as the machine was suspended. By it the server
tells times, and waits for nothing. Both clocks leap when nothing of the server has run for a while, as after SIGSTOP: what was due meanwhile is late."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulated.loop import SimulatedLoop
    from tests.simulated.plans import Plan

SHARE = 0.3  # of the plans have jumps
JUMPS = (-3600.0, -5.0, -0.5, -0.02, 0.02, 0.5, 5.0, 40.0, 3600.0)  # seconds
LEAPS = (0.02, 0.5, 3.0, 12.0, 70.0)  # seconds
TOLD = 2.1  # seconds within which a date is right: it is a whole one, and read each second


@dataclass(frozen=True)
class Jump:
    """A clock jumps by so many seconds."""

    at: float
    seconds: float


def draw_jumps(plan: "Plan", length: float) -> list[Jump]:
    """Return the jumps of the wall clock in a plan of about `length` seconds, some of which come soon one after another."""
    return _drawn(random.Random(f"{plan.seed} clocks"), length, SHARE, (1, 5, 30), JUMPS)


def draw_leaps(plan: "Plan", length: float) -> list[Jump]:
    """Return the leaps of all clocks in a plan of about `length` seconds."""
    share = 0.4 if plan.zeromq else 0.12  # it has limits of its own
    return _drawn(random.Random(f"{plan.seed} both clocks"), length, share, (1, 3, 10), LEAPS)


def _drawn(
    draw: random.Random, length: float, share: float, counts: Sequence[int], seconds: Sequence[float]
) -> list[Jump]:
    if draw.random() >= share:
        return []
    jumps = [Jump(draw.uniform(0.0, length), draw.choice(seconds)) for _ in range(draw.choice(counts))]
    return sorted(jumps, key=lambda each: each.at)


def fault_of_date(loop: "SimulatedLoop", date: str, since: float) -> str:
    """Return what is wrong with the date of a response to a request that was sent at this instant; "" if nothing is."""
    ahead = parsedate_to_datetime(date).timestamp() - loop.wall()
    if since - loop.now - TOLD < ahead < TOLD or since < loop.jumped_at + TOLD:
        return ""
    return f"its date is {ahead:.1f} s ahead of the wall clock"
