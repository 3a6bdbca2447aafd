"""What a simulated server is like: each seed leaves most things out, and what is left happens often (swarm testing: Groce et al., ISSTA 2012).

A server that has a little of everything hardly ever has two rare things at once. So a seed draws a theme before all else: who calls, how, for what, and what
befalls the server. What is added to the simulation is one more thing that a theme may have; it takes nothing from those that have others.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from tests.simulated.asking import Mix, draw_mix

T = TypeVar("T")

_OFTEN = {"whole": 8, "pieces": 2, "bytes": 1, "pipeline": 6, "mixed": 2, "leave": 2, "half-close": 2, "slow": 2}
STYLES = (*(style for style, times in _OFTEN.items() for _ in range(times)), "stall", "garbage")
KINDS = ("kill", "reload", "add", "remove", "callers_leave")
OF_STREAMS = (*("read",) * 4, "leave", "leave soon", "half-close", *("slow",) * 2)
OF_FRONTS = ("front_kill", "front_stop")
OF_LINKS = ("front_cut", "front_slow")
PLAIN = "plain"
EVERYTHING = 0.15  # the share of seeds whose theme leaves nothing out
WORK = (40, 120, 120, 400)  # turns of all clients together: a world is short, so that there are many


# In how many themes each channel is, in the order of the numbers of their clients (see channels.FIRST).
CHANNELS = {PLAIN: 0.8, "streams": 0.25, "messages": 0.25, "fuzz": 0.2, "calls": 0.25, "texts": 0.25, "changes": 0.3}


@dataclass(frozen=True)
class Theme:
    """What a server has, and how often. `clients`: how many, by their channel."""

    styles: tuple[str, ...]
    mix: Mix
    faults: tuple[str, ...]
    of_fronts: tuple[str, ...]
    clients: dict[str, int] = field(default_factory=dict)
    turns: int = 10
    of_streams: tuple[str, ...] = OF_STREAMS


def some(draw: random.Random, things: Sequence[T]) -> tuple[T, ...]:
    """Return some of `things`, at least one."""
    kinds = list(dict.fromkeys(things))
    kept = [kind for kind in kinds if draw.random() < 0.5] or [draw.choice(kinds)]
    return tuple(thing for thing in things if thing in kept)


def draw_theme(seed: int) -> Theme:
    """Return the theme of `seed`."""
    draw = random.Random(f"{seed} theme")
    keeps: Callable[[Sequence[str]], tuple[str, ...]]
    keeps = tuple if draw.random() < EVERYTHING else partial(some, draw)
    styles, faults, of_fronts = keeps(STYLES), keeps(KINDS), keeps(OF_FRONTS)
    mix = Mix() if keeps is tuple else draw_mix(draw)
    number = draw.choice((1, 4, 12, 12, 30))
    channels = [name for name, share in CHANNELS.items() if draw.random() < share] or [PLAIN]
    clients = {name: max(1, round(number / len(channels))) for name in channels}
    turns = min(60, max(4, draw.choice(WORK) // number))
    return Theme(styles, mix, faults, of_fronts, clients, turns, keeps(OF_STREAMS))
