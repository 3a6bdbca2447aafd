"""The wall clock of a simulated server, which jumps while requests wait: by the hand of somebody, by NTP, or as the machine was suspended. By it the server
tells times, and waits for nothing."""

import random
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulated.loop import SimulatedLoop
    from tests.simulated.plans import Plan

SHARE = 0.3  # of the plans have jumps
JUMPS = (-3600.0, -5.0, -0.5, -0.02, 0.02, 0.5, 5.0, 40.0, 3600.0)  # seconds
TOLD = 2.1  # seconds within which a date is right: it is a whole one, and read each second


@dataclass(frozen=True)
class Jump:
    """The wall clock jumps by so many seconds."""

    at: float
    seconds: float


def draw_jumps(plan: "Plan", length: float) -> list[Jump]:
    """Return the jumps of a plan of about `length` seconds, some of which come soon one after another."""
    draw = random.Random(f"{plan.seed} clocks")
    if draw.random() >= SHARE:
        return []
    count = draw.choice((1, 5, 30))
    return sorted((Jump(draw.uniform(0.0, length), draw.choice(JUMPS)) for _ in range(count)), key=lambda each: each.at)


def fault_of_date(loop: "SimulatedLoop", date: str, since: float) -> str:
    """Return what is wrong with the date of a response to a request that was sent at this instant; "" if nothing is."""
    ahead = parsedate_to_datetime(date).timestamp() - loop.wall()
    if since - loop.now - TOLD < ahead < TOLD or since < loop.jumped_at + TOLD:
        return ""
    return f"its date is {ahead:.1f} s ahead of the wall clock"
