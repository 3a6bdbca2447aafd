"""The solved policy: it estimates the arrival rate, takes the table that was solved for it, and looks up.

A table's *wait* means "until the next arrival", which is right for Poisson arrivals at the rate it was solved for, and
nothing else is certain of. So each wait ends at the earliest of these instants:

- the last arrival + ln(1000)/rate: a silence that long has a probability of 0.001, so the traffic has most likely stopped;
- the oldest arrival + (k + sqrt(2·k·x) + x)/rate, x = ln(1000), with k the arrivals the table waits for: they take
  longer only with that probability, so they do not come to this line;
- with a promise about latency, the oldest arrival + the deadline - the service time of what waits - a margin.

The batcher's own bounds (max_queue_delay, the requests' deadlines) hold on top of these.
"""

from typing import Any

from weir.messages import Reason
from weir.policy.account import Account
from weir.policy.bank import Bank
from weir.policy.decision import Decision, Observation
from weir.policy.explanation import explain
from weir.policy.latency_slo import trimmed
from weir.policy.mixing import Mixing
from weir.policy.overload import OPEN, Gate
from weir.policy.rate import Rate
from weir.policy.rate_bands import SILENCE, RateBand, Stages
from weir.policy.rules import Greedy

GREEDY = Greedy()
POLICY = Reason.POLICY  # a member of an enum is looked up slowly


class SolvedPolicy:
    """Decides by the tables of a bank, following the arrival rate. Without a bank, and until the rate is known, it is greedy.

        bank = Bank.from_bytes(Path("square.policy.npz").read_bytes())
        service = weir.Service(Square, policy=weir.SolvedPolicy(bank), max_batch_size=bank.profile.max_batch_size)

    Rates are in rows per second, of the whole service, and so are the tables': with requests of several groups (keys,
    shapes) each line is looked up as if all arrivals came to it. A group that gets but a part of them reaches its limit
    later than the table expects; it is then served by the second of the guards above, which no arrival elsewhere
    puts off. That costs latency and no more; a service of very many groups is better served by `greedy`.

    It may run with a smaller `max_batch_size` than the bank was solved for: batches are cut at that size, and a full one is
    never held back. Larger ones are never asked for than the bank's profile has.

    `max_waiting` is the number of rows beyond which arrivals are to be refused, until the next decision; None for no bound.
    """

    def __init__(self, bank: Bank | None = None) -> None:
        self.max_waiting: int | None = None
        self._estimate = Rate()
        self._mixing = Mixing()
        self._account: Account | None = None  # of `_of`, where there is no promise
        self._stages: Stages | None = None if bank is None else Stages(bank)
        self._stage: RateBand | None = None  # of `_stages`, or of those before
        self._of: Stages | None = None  # what `_stage` belongs to
        self._gate = OPEN
        self._rows = 0  # that were dispatched last; 0 if none were, or more have been let in since
        self._since = 0.0  # when
        self._ahead = 0  # rows before those who were let in late, 0 if none were
        self._late = 0.0  # when the first of them came

    # Decisions.

    def decide(self, seen: Observation) -> Decision:
        """Look up how many rows to dispatch; see Policy."""
        waiting = seen.waiting
        rate = self._estimate.observe(seen.now, seen.arrivals)
        stage = self._stage
        if stage is None or self._of is not self._stages or not stage.falls <= rate <= stage.rises:
            stage = self._move(rate)
            if stage is None:
                return GREEDY.decide(seen)
        largest = seen.max_batch_size if seen.max_batch_size < stage.largest else stage.largest
        second = self._mixing.second
        answers = stage.second if second else stage.first
        if self._account is not None and self._account.observe(seen, stage, answers, rate):
            return GREEDY.decide(seen)
        answer = answers[waiting] if waiting < len(answers) else answers[-1]
        if answer is None:
            limit, until = stage.limits[second], guard(stage, rate, seen)
            if seen.now < until and waiting < largest:
                if stage.latest is not None:
                    self._let_in(stage.gate, 0, seen)
                return Decision(0, POLICY, until, limit)
            answer = Decision(min(waiting, largest), POLICY, None, min(limit, seen.max_batch_size))
        elif answer.rows > largest:
            answer = Decision(largest, POLICY, None, min(stage.limits[second], largest))
        if stage.latest is not None:
            if (age := seen.now - seen.oldest_arrival) > stage.latest[answer.rows]:
                answer = answer._replace(rows=trimmed(answer.rows, age, stage.latest))
            self._let_in(stage.gate, answer.rows, seen)
        if stage.share:
            self._mixing.cut(stage.share)
        return answer

    def _let_in(self, gate: Gate, rows: int, seen: Observation) -> None:
        """Once `rows` are dispatched, let in whom the gate lets in."""
        waiting, now, oldest = seen.waiting, seen.now, seen.oldest_arrival
        if rows and rows < waiting:
            # When the first that stays came: as if at even gaps, or not before those came who were let in late.
            first = oldest + (seen.last_arrival - oldest) * rows / (waiting - 1)
            if rows >= self._ahead > 0:
                first = max(first, self._late)
            self.max_waiting = gate.after(rows, waiting, now - first)
        else:
            self.max_waiting = gate.bounds[rows]
        self._gate, self._rows, self._since, self._ahead = gate, rows, now, 0

    def full(self, now: float) -> int | None:
        """The line is full: return `max_waiting` as of `now`; see Policy."""
        if self._rows and (more := self._gate.more(self._rows, now - self._since)):
            assert self.max_waiting is not None
            self._rows = 0  # once; whoever comes behind them too might be late
            self._ahead, self._late = self.max_waiting, now
            self.max_waiting += more
        return self.max_waiting

    def _move(self, rate: float) -> RateBand | None:
        """Take the stage for `rate`; None if there is none. While the rate is unknown only a promise has one."""
        stages, stage = self._stages, self._stage
        if stages is None:
            return None
        if not rate:
            return stages.unknown()
        if stage is None or self._of is not stages:
            stage = stages.at(rate)
        self._stage = stage = stages.next_to(stage, rate)
        if self._of is not stages:
            self._of = stages
            self._account = Account(stages.bank) if stages.bank.objective is None else None
        self.max_waiting, self._rows = stage.max_waiting, 0
        return stage

    # The life of a policy.

    def adopt(self, bank: Bank) -> None:
        """Decide by `bank` from now on; what was learned of the rate stays."""
        self._stages = Stages(bank)  # one assignment: a decision sees the old bank or the new one

    def fresh(self) -> "SolvedPolicy":
        """Return a policy like this one that has seen nothing: services and simulations have one each."""
        made = SolvedPolicy()
        made._stages = self._stages
        return made

    # Facts.

    @property
    def bank(self) -> Bank | None:
        """The bank it decides by."""
        return None if self._stages is None else self._stages.bank

    @property
    def largest_batch(self) -> int | None:
        """The most rows of a batch that it knows the cost of; it is not to be run with a larger `max_batch_size`."""
        return None if self._stages is None else self._stages.bank.profile.max_batch_size

    @property
    def rate(self) -> float:
        """The estimated arrival rate, in rows per second; 0 while it is unknown."""
        return self._estimate.value

    @property
    def learning(self) -> bool:
        """Whether it is greedy still: there is no bank, or the rate is unknown."""
        return self._stages is None or not self.rate

    @property
    def index(self) -> int:
        """The index, in the bank, of the table in use (beyond the bank's rates: of the nearest); 0 while learning."""
        stage = self._current()
        return 0 if stage is None else stage.entry

    def _current(self) -> RateBand | None:
        stages, rate = self._stages, self.rate
        if stages is None or not rate:
            return None
        return self._stage if self._of is stages else stages.at(rate)

    def explain(self) -> dict[str, Any]:
        """Return what it does and why, as a JSON-able dict; what is not known yet is None. Times are in seconds but for
        those of the prediction, which is for the estimated rate."""
        account = self._account if self._of is self._stages else None
        return explain(self.bank, self._current(), self.rate, account)


def guard(stage: RateBand, rate: float, seen: Observation) -> float:
    """Return the instant at which a wait ends."""
    oldest = seen.oldest_arrival
    until = min(seen.last_arrival + SILENCE / rate, oldest + stage.filling / rate)
    if stage.allowance is None:
        return until
    return min(until, oldest + stage.allowance[min(seen.waiting, stage.largest)])
