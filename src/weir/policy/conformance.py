"""Checks that a policy follows the rules of the contract. In a test: `check_policy(MyPolicy())`.

The rules:

- A policy answers every possible observation. Its response is a Decision with 0 rows or more.
- A wait ends later than now. At the end of a wait the policy dispatches or waits for a later instant; otherwise the
  server would ask it again and again without end.
- The same sequence of observations always gives the same decisions. A policy without a memory gives the same decision
  for the same observation, whatever it was asked in between.
- A policy with a memory has a method `fresh()`. The policy that it returns has observed nothing and shares nothing
  with the one that it came from.

A policy may decide to wait while the service drains: the batcher then dispatches all the same. It also limits all
other waits.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import isfinite, log
from typing import Any

from weir.messages import Reason
from weir.policy.decision import Decision, Observation, Policy, complete

# Seconds. At some of them `now - oldest >= delay` and `now >= oldest + delay` disagree because of rounding.
INSTANTS = (0.0, 0.1, 1.1, 1234.5678, 86_400.3, 1_700_000_000.7)
AGES = (0.0, 0.0001, 0.003, 0.1, 7.0)
# The arrival rates of `traffic`, in rows per second; and the golden section, whose multiples have evenly spread
# fractions.
RATES = (0.5, 40.0, 3000.0, 100.0)
GOLDEN = 0.6180339887498949


class BrokenRule(AssertionError):
    """A policy broke a rule. The message has the rule, the observation and the decision."""


def observations() -> Iterator[Observation]:
    """Yield observations of every kind: short and long queues, young and old rows, deadlines that are near, far or
    past.
    """
    sizes = ((1, 1), (1, 64), (7, 64), (63, 64), (64, 64), (65, 64), (5000, 64), (3, 2))
    for now, age, (waiting, largest), draining in product(INSTANTS, AGES, sizes, (False, True)):
        for time_left, (idle, workers) in zip((-1.0, 0.0, 0.002, 30.0), ((1, 1), (1, 4), (4, 4), (2, 1)), strict=True):
            yield Observation(
                now, waiting, now - age, now + time_left, waiting + 10, now, idle, workers, largest, 0.1, draining
            )


def traffic() -> Iterator[Observation]:
    """Yield a sequence of observations on one running clock, with arrival rates that change and pauses.

    It is for policies with a memory. The clock starts once at 0 and once at a present-day epoch time, in seconds.
    """
    for start in (0.0, 1_700_000_000.7):
        now, arrivals = start, 70
        for number in range(300):
            gap = -log((number + 1) * GOLDEN % 1.0) / RATES[number // 75]
            now += gap
            arrivals += 1 + number % 3
            waiting = 1 + number * number % 70
            yield Observation(now, waiting, now - gap, now + 30.0, arrivals, now, 1, 1, 64, 0.1, False)


def check_policy(policy: Policy, seen: Iterable[Observation] | None = None) -> None:
    """Raise BrokenRule at the first rule that `policy` breaks.

    Args:
        policy: the policy to check.
        seen: the observations to check it with. By default `observations()`; for a policy with a memory also
            `traffic()`.
    """
    remembers = complete(policy).remembers
    sequence = list(seen) if seen is not None else [*observations(), *(traffic() if remembers else ())]
    if remembers:
        _check_memory(_fresh(policy), sequence)
        return
    decisions = [_decide(policy, each) for each in sequence]
    for each, decision in zip(sequence, decisions, strict=True):
        _check_shape(each, decision)
        _check_wait(policy, each, decision)
    for each, decision in zip(reversed(sequence), reversed(decisions), strict=True):
        again = _decide(policy, each)
        if again != decision:
            _broken("the same observation gives the same decision", each, f"{decision}, and later {again}")


def _check_memory(policy: Policy, sequence: list[Observation]) -> None:
    history: list[tuple[Observation, Decision]] = []
    for each in sequence:
        decision = _decide(policy, each)
        _check_shape(each, decision)
        history.append((each, decision))
        history += _check_wait(policy, each, decision)
    copies = (_fresh(policy), _fresh(policy))
    for each, decision in history:
        for copy in copies:  # in turn: copies that share state would disturb each other
            again = _decide(copy, each)
            if again != decision:
                both = f"{decision}, and a fresh copy decided {again}"
                _broken("the same sequence of observations gives the same decisions", each, both)


def _fresh(policy: Policy) -> Policy:
    made = complete(policy).fresh()
    if made is policy or not isinstance(made, Policy):
        raise BrokenRule(f"fresh() returns another policy like this one, without its memory: it returned {made!r}")
    return made


def _decide(policy: Policy, seen: Observation) -> Decision:
    try:
        return policy.decide(seen)
    except Exception as error:
        raise BrokenRule(f"a policy answers every observation: for {seen} it raised {error!r}") from error


def _check_shape(seen: Observation, decision: Any) -> None:
    if not isinstance(decision, Decision):
        _broken("a policy returns a Decision", seen, decision)
    if not isinstance(decision.rows, int) or isinstance(decision.rows, bool) or decision.rows < 0:
        _broken("rows is a whole number, 0 or more", seen, decision)
    if not isinstance(decision.reason, Reason):
        _broken("reason is a Reason", seen, decision)
    if decision.limit is not None and (not isinstance(decision.limit, int) or decision.limit < 1):
        _broken("limit is None or a whole number, 1 or more", seen, decision)
    if decision.until is not None and not isfinite(decision.until):
        _broken("until is None or a finite instant", seen, decision)


def _check_wait(policy: Policy, seen: Observation, decision: Decision) -> list[tuple[Observation, Decision]]:
    """Check the end of a wait. Return the further observation that this took and the policy's decision."""
    until = decision.until
    if decision.rows or until is None:
        return []
    if until <= seen.now:
        _broken("a wait ends later than now", seen, decision)
    later = seen._replace(now=until)
    then = _decide(policy, later)
    _check_shape(later, then)
    if not then.rows and then.until is not None and then.until <= until:
        _broken("when the end of a wait has come, the policy dispatches or waits for a later instant", later, then)
    return [(later, then)]


def _broken(rule: str, seen: Observation, decision: Any) -> None:
    raise BrokenRule(f"{rule}: for {seen} it decided {decision}")
