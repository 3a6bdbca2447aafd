"""The rules that every policy keeps, to be held against one's own: `check_policy(MyPolicy())` in a test.

A policy answers every possible observation; its answer is a Decision of 0 rows or more; the same observation always
gives the same decision, whatever it was asked in between; a wait ends later than now; and when the instant has come
until which it wanted to wait, it says something else than that same instant, else the server would spin.

A policy may say *wait* while draining: the batcher then dispatches all the same, and clamps every other wait too.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import isfinite
from typing import Any

from weir.messages import Reason
from weir.policy.decision import Decision, Observation, Policy

# Instants at which `now - oldest >= delay` and `now >= oldest + delay` are known to disagree, besides plain ones.
INSTANTS = (0.0, 0.1, 1.1, 1234.5678, 86_400.3, 1_700_000_000.7)
AGES = (0.0, 0.0001, 0.003, 0.1, 7.0)


class BrokenRule(AssertionError):
    """A policy broke a rule: the message names the rule, the observation and the decision."""


def observations() -> Iterator[Observation]:
    """Yield observations of every kind: short and long lines, young and old ones, deadlines near, far and past."""
    sizes = ((1, 1), (1, 64), (7, 64), (63, 64), (64, 64), (65, 64), (5000, 64), (3, 2))
    for now, age, (waiting, largest), draining in product(INSTANTS, AGES, sizes, (False, True)):
        for time_left, (idle, workers) in zip((-1.0, 0.0, 0.002, 30.0), ((1, 1), (1, 4), (4, 4), (2, 1)), strict=True):
            yield Observation(
                now, waiting, now - age, now + time_left, waiting + 10, now, idle, workers, largest, 0.1, draining
            )


def check_policy(policy: Policy, seen: Iterable[Observation] | None = None) -> None:
    """Ask `policy` about each of `seen` (by default, `observations()`) and hold its answers against the rules.

    Raises BrokenRule at the first that breaks one.
    """
    asked = list(observations() if seen is None else seen)
    answers = [_ask(policy, each) for each in asked]
    for each, answer in zip(asked, answers, strict=True):
        _check_shape(each, answer)
        if not answer.rows and answer.until is not None:
            _check_wait(policy, each, answer, answer.until)
    for each, answer in zip(reversed(asked), reversed(answers), strict=True):
        again = _ask(policy, each)
        if again != answer:
            _broken("the same observation gives the same decision", each, f"{answer}, and later {again}")


def _ask(policy: Policy, seen: Observation) -> Decision:
    try:
        return policy.decide(seen)
    except Exception as error:
        raise BrokenRule(f"a policy answers every observation: asked about {seen}, it raised {error!r}") from error


def _check_shape(seen: Observation, answer: Any) -> None:
    if not isinstance(answer, Decision):
        _broken("a policy returns a Decision", seen, answer)
    if not isinstance(answer.rows, int) or isinstance(answer.rows, bool) or answer.rows < 0:
        _broken("rows is a whole number, 0 or more", seen, answer)
    if not isinstance(answer.reason, Reason):
        _broken("reason is a Reason", seen, answer)
    if answer.limit is not None and (not isinstance(answer.limit, int) or answer.limit < 1):
        _broken("limit is None or a whole number, 1 or more", seen, answer)
    if answer.until is not None and not isfinite(answer.until):
        _broken("until is None or a finite instant", seen, answer)


def _check_wait(policy: Policy, seen: Observation, answer: Decision, until: float) -> None:
    if until <= seen.now:
        _broken("a wait ends later than now", seen, answer)
    later = seen._replace(now=until)
    then = _ask(policy, later)
    if not then.rows and then.until is not None and then.until <= until:
        _broken("when the end of a wait has come, the policy dispatches or waits for a later instant", later, then)


def _broken(rule: str, seen: Observation, answer: Any) -> None:
    raise BrokenRule(f"{rule}: asked about {seen}, it said {answer}")
