"""A claim of the paper, and what our own computation says of it."""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from reproduction.findings import Findings


class Verdict(Enum):
    """What became of a claim."""

    HELD = "held"
    LIMITED = "held with limits"
    NOT_HELD = "not held"
    ARGUED = "argued, not computed"
    NOT_COMPUTED = "not a matter of computation"


class Judgement(NamedTuple):
    """A verdict, and the numbers that it follows from, in words."""

    verdict: Verdict
    numbers: str


class Claim(NamedTuple):
    """Where the paper makes the claim, what it says in our words, how it is checked, and what to add on the page if it is not simply held."""

    where: str
    says: str
    check: Callable[[Findings], Judgement]
    limits: str = ""


def held_if(holds: bool, numbers: str, *, otherwise: Verdict = Verdict.NOT_HELD) -> Judgement:
    """Return HELD if it does, else `otherwise`, with those numbers."""
    return Judgement(Verdict.HELD if holds else otherwise, numbers)
