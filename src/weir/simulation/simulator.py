"""Simulates policies against arrivals in virtual time, with the Batcher that the server runs."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from math import inf
from pathlib import Path
from sys import maxsize
from typing import Any, NamedTuple

import numpy as np

from weir.batching import BatchingSettings
from weir.errors import SettingsError
from weir.policy.cost import LatencySLO, Prices, Profile, read_profile
from weir.policy.decision import Observation, Policy, complete
from weir.policy.loading import load_policy
from weir.simulation.arrivals import Arrivals, Floats, Ints, parse_arrivals
from weir.simulation.engine import (
    BulkRequest,
    Engine,
    Run,
    ServiceTimes,
    SimulatedModel,
    SimulatedWorkers,
    Whole,
)
from weir.simulation.results import BatchMeans, Comparison, PolicyOutcome, outcome_of

SOLVED = "smdp"  # the policy that is solved for the profile, prices or objective, and workers of the simulation


def split_policies(text: str, key: str = "policy") -> list[str]:
    """Return the policies that `text` names, separated by commas. `key` is what errors call the text.

    Commas also separate the arguments of a policy: a part `key=value` belongs to the policy before it. So
    `greedy,size-or-delay:size=32,delay=5ms,full:16` are three. Raises SettingsError for a part that can be neither.
    """
    policies: list[str] = []
    for part in text.split(","):
        name, equals, _ = part.partition("=")
        if not part.strip():
            raise SettingsError(f"{key}={text!r}: has an empty entry between commas, or at an end")
        if not (equals and name.strip().isidentifier()):
            policies.append(part.strip())
        elif policies and ":" in policies[-1]:
            policies[-1] += "," + part.strip()
        else:
            raise SettingsError(f"{key}={text!r}: {part!r} is a setting, and there is no {key} with settings before it")
    return policies


def settings_for(profile: Profile, settings: BatchingSettings | None = None) -> BatchingSettings:
    """Return `settings`; by default those that do not limit a policy: the profile's largest batch, any queue, any
    wait.

    Raises SettingsError if batches may be larger than the profile has.
    """
    if settings is None:
        return BatchingSettings(max_batch_size=profile.max_batch_size, max_queue_delay=inf, max_queue_size=maxsize)
    if settings.max_batch_size > profile.max_batch_size:
        raise SettingsError(
            f"max_batch_size={settings.max_batch_size}: must not be greater than the profile's {profile.max_batch_size}"
        )
    return settings


def policy_for(
    policy: str | Policy,
    profile: Profile,
    *,
    prices: Prices | None = None,
    workers: int = 1,
    settings: BatchingSettings | None = None,
    objective: LatencySLO | None = None,
    solving: Callable[[int, int], None] | None = None,
) -> Policy:
    """Return a policy without a memory of other runs: `smdp` solved for this profile, a text, or a copy of an
    instance.

    `solving` is called with (rates done, their number). Raises SettingsError as `load_policy` does.
    """
    if policy == SOLVED:
        from weir.policy.online.adaptive import SolvedPolicy
        from weir.simulation.banks import make_bank

        bank = make_bank(profile, prices or Prices(), workers=workers, objective=objective, progress=solving)
        return SolvedPolicy(bank)
    bounds = settings_for(profile, settings)
    loaded = load_policy(policy, max_batch_size=bounds.max_batch_size, max_queue_delay=bounds.max_queue_delay)
    return fresh(loaded)


def fresh(policy: Policy) -> Policy:
    """Return a policy like this one that has observed nothing: from its own `fresh`, or a copy."""
    completed = complete(policy)
    return completed.fresh() if completed.remembers else deepcopy(policy)


# Checks of arguments, before anything is simulated.


def check_count(name: str, value: Any, least: int) -> None:
    """Raise SettingsError unless `value` is a whole number of at least `least`. `name` is what the error calls it."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least:
        raise SettingsError(f"{name}={value!r}: must be {least} or more" + ("" if whole else ", a whole number"))


def check_seconds(name: str, value: float | None) -> None:
    """Raise SettingsError unless `value` is a number of seconds greater than 0, or None."""
    if value is not None and not value > 0.0:
        raise SettingsError(f"{name}={value!r}: must be a number of seconds, greater than 0")


REQUESTS = 100_000
Progress = Callable[[str, int, int], None]


def run(
    profile: Profile,
    policy: str | Policy,
    arrival_times: Floats,
    *,
    rows: Ints | None = None,
    workers: int = 1,
    settings: BatchingSettings | None = None,
    deadline: float | None = None,
    prices: Prices | None = None,
    services_seed: int = 1,
) -> Run:
    """Return what happens to requests that arrive at `arrival_times`, one by one.

    Args:
        profile: the costs of a batch. A batch takes the profile's time.
        policy: a policy or its text.
        arrival_times: seconds, ascending; shape (requests,).
        rows: of each request; shape (requests,). None: 1 each.
        workers: the number of workers.
        settings: of the batcher; by default as `settings_for` returns.
        deadline: each request's timeout in seconds.
        prices: the weights for `smdp`.
        services_seed: decides random service times (see ServiceTimes in engine.py).

    Raises SettingsError.
    """
    settings = settings_for(profile, settings)
    used = policy_for(policy, profile, prices=prices, workers=workers, settings=settings)
    whole = Whole()
    times, pool = ServiceTimes(profile, services_seed), SimulatedWorkers(workers, profile.pipeline_depth)
    model = SimulatedModel(Engine(), settings, used, times, whole, pool, timeout=deadline)
    arrival = np.asarray(arrival_times, dtype=np.float64)
    model.arrive(0, arrival.tolist(), None if rows is None else rows.tolist())
    model.engine.finish()
    return whole.run(profile, workers, arrival)


def simulate(
    profile: Profile | str | Path, policies: str | Sequence[str | Policy] | Mapping[str, str | Policy],
    arrivals: Arrivals | str, *, workers: int = 1, requests: int | None = None, seed: int = 1, warm_up: float = 0.1, prices: Prices | None = None,
    settings: BatchingSettings | None = None, deadline: float | None = None,
    latency_objective: LatencySLO | str | None = None, bulk: int = 0, progress: Progress | None = None,
) -> Comparison:  # fmt: skip
    """Compare policies on the same arrivals and random numbers, and return the results. Memory does not grow with `requests`.

    Args:
        profile: the costs of a batch, or the file of a profile.
        policies: texts or policies, also by name; or one text with commas between them, as for `weir simulate`.
        arrivals: a process, or its text (see arrivals.py).
        workers: the number of workers that serve the queue.
        requests: how many arrive; 100 000 by default, of a trace all.
        seed: of the random numbers; the same seed gives the same result.
        warm_up: the share of the requests, from the first on, that does not count.
        prices: the weights of latency and energy.
        settings: of the batcher; by default they do not limit the policy.
        deadline: each request's timeout in seconds. Later responses count as late, with an objective those beyond its deadline.
        latency_objective: a promise such as "p99=20ms". `smdp` is then solved for it, and the best policy is the one
            with the least power that keeps it.
        bulk: rows of bulk work that are there from the start, which all policies get in addition to the arrivals.
        progress: called with the policy's name, the requests done and their number; while tables are solved, with
            rates.

    Raises SettingsError naming the argument, its value and the rule.
    """
    check_count("workers", workers, 1)
    check_count("seed", seed, 0)
    check_count("bulk", bulk, 0)
    check_seconds("deadline", deadline)
    if not isinstance(profile, Profile):
        profile = read_profile(profile)
    process = parse_arrivals(arrivals, capacity=workers * profile.max_rate) if isinstance(arrivals, str) else arrivals
    prices = prices or Prices()
    objective = objective_for(latency_objective, profile)
    trial = _Trial(
        profile, process, count_of(process, requests, warm_up), warm_up, workers, seed, prices,
        settings_for(profile, settings), deadline, objective, bulk,
    )  # fmt: skip
    named = policies if isinstance(policies, Mapping) else _named(policies)
    outcomes = {
        name: trial.outcome(name, policy, progress or (lambda name, done, total: None))
        for name, policy in named.items()
    }
    text = arrivals if isinstance(arrivals, str) else str(arrivals)
    load = process.rate / (workers * profile.max_rate)
    return Comparison(text, process.rate, load, workers, prices, seed, outcomes, objective)


class _Trial(NamedTuple):
    """Has what all policies of a comparison have in common."""

    profile: Profile
    arrivals: Arrivals
    requests: int
    warm_up: float
    workers: int
    seed: int
    prices: Prices
    settings: BatchingSettings
    deadline: float | None
    objective: LatencySLO | None
    bulk: int

    def outcome(self, name: str, policy: str | Policy, progress: Progress) -> PolicyOutcome:
        """Simulate one policy."""
        profile, workers, settings = self.profile, self.workers, self.settings
        used = policy_for(
            policy,
            profile,
            prices=self.prices,
            workers=workers,
            settings=settings,
            objective=self.objective,
            solving=partial(progress, f"{name}, solving"),
        )
        late_after = self.deadline if self.objective is None else self.objective.deadline
        first = min(round(self.warm_up * self.requests), self.requests - 1)
        seen = BatchMeans(profile, first, self.requests, late_after or inf)
        times, pool = ServiceTimes(profile, self.seed), SimulatedWorkers(workers, profile.pipeline_depth)
        bulk = map(BulkRequest, range(self.bulk))
        model = SimulatedModel(Engine(), settings, used, times, seen, pool, timeout=self.deadline, bulk=bulk)
        self._feed(model, seen, partial(progress, name))
        stable = self._keeps_up(model, seen)
        return outcome_of(name, seen, self.prices, self.arrivals.rate, workers, stable=stable)

    def _feed(self, model: SimulatedModel, seen: BatchMeans, progress: Callable[[int, int], None]) -> None:
        """Let all requests arrive, block by block. The arrivals depend on the seed only."""
        done = 0
        for block in self.arrivals.blocks(np.random.default_rng([self.seed, 0]), self.requests):
            sizes = self.arrivals.sizes(done, done + len(block))
            seen.arrived(done, block)
            model.arrive(done, block.tolist(), None if (sizes == 1).all() else sizes.tolist())
            done += len(block)
            progress(done, self.requests)
        model.engine.finish()

    def _keeps_up(self, model: SimulatedModel, seen: BatchMeans) -> bool:
        """Return whether the queue stays finite. A trace ends, so for one only the run itself counts."""
        batcher = model.batcher
        if self.deadline is not None or is_bounded(batcher.policy, self.settings):
            return True
        if self.arrivals.length is None:
            capacity = capacity_of(
                batcher.policy,
                self.profile,
                self.settings,
                self.workers,
                now=model.engine.now,
                arrivals=batcher.arrivals,
            )
            if capacity is not None and self.arrivals.rate >= capacity:
                return False
        return not seen.is_growing


# Whether a policy keeps up with its arrivals.


MANY = 1_000_000  # rows waiting: more than any policy waits for


def capacity_of(
    policy: Policy,
    profile: Profile,
    settings: BatchingSettings,
    workers: int = 1,
    *,
    now: float = 0.0,
    arrivals: int = 0,
) -> float | None:
    """Return the rows per second that all workers serve once the queue is long; None if the policy does not decide.

    A long queue is served in the batches that `policy` then dispatches. If rows arrive at this rate or faster, the
    queue only grows. A policy with a memory is asked at the end of a run, at the instant `now` (seconds) and after
    `arrivals` rows.
    """
    seen = Observation(
        now, MANY, now, inf, arrivals, now, 1, workers, settings.max_batch_size, settings.max_queue_delay, False
    )
    try:
        rows = min(policy.decide(seen).rows, settings.max_batch_size)
    except Exception:  # the same error is reported when a run asks the policy
        return None
    return workers * rows / float(profile.service_time_ms[rows - 1]) * 1000.0 if rows > 0 else None


def is_bounded(policy: Policy, settings: BatchingSettings) -> bool:
    """Return whether the queue cannot grow without end because arrivals are refused."""
    return settings.max_queue_size < maxsize or complete(policy).max_waiting is not None


def objective_for(given: LatencySLO | str | None, profile: Profile) -> LatencySLO | None:
    """Return an objective or what its text states. Raises SettingsError if `profile` cannot keep it."""
    objective = LatencySLO.parse(given) if isinstance(given, str) else given
    return None if objective is None else objective.checked_for(profile)


def count_of(arrivals: Arrivals, requests: int | None, warm_up: float) -> int:
    """Return how many requests arrive: `requests`, by default REQUESTS or all of a trace. Raises SettingsError, also for a
    `warm_up` that is not a share.
    """
    if not 0.0 <= warm_up < 1.0:
        raise SettingsError(f"warm_up={warm_up!r}: must be a share, from 0 to below 1")
    count = arrivals.length or REQUESTS if requests is None else requests
    count = min(count, arrivals.length or count)
    check_count("requests", count, 2)
    return count


def _named(policies: str | Sequence[str | Policy]) -> dict[str, str | Policy]:
    named: dict[str, str | Policy] = {}
    for policy in split_policies(policies) if isinstance(policies, str) else policies:
        name = policy if isinstance(policy, str) else str(policy)
        if name in named:
            raise SettingsError(f"policy={name!r}: given twice; give each once, or as a mapping of names to policies")
        named[name] = policy
    if not named:
        raise SettingsError("policies=[]: must be one or more")
    return named
