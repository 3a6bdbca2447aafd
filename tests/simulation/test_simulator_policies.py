from math import inf
from sys import maxsize

import pytest

from weir.batching.settings import BatchingSettings
from weir.errors import SettingsError
from weir.policy.cost.profile import Profile
from weir.policy.decision import Decision, Observation
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.rules import FullBatches, Greedy
from weir.simulation.simulator import fresh, policy_for, settings_for, split_policies

PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=2.0, max_batch_size=8)


@pytest.mark.parametrize(
    ("text", "policies"),
    [
        ("greedy", ["greedy"]),
        (
            "smdp,greedy,size-or-delay:size=32,delay=5ms,full:16",
            ["smdp", "greedy", "size-or-delay:size=32,delay=5ms", "full:16"],
        ),
        ("full:size=16,greedy", ["full:size=16", "greedy"]),
        ("full:size=16,full:size=8", ["full:size=16", "full:size=8"]),
        ("mine:Policy:patience=20ms,limit=3, greedy", ["mine:Policy:patience=20ms,limit=3", "greedy"]),
        ("square.policy.npz,greedy", ["square.policy.npz", "greedy"]),
        ("a=b.npz,greedy", None),
        ("size-or-delay:32,delay=5ms", ["size-or-delay:32,delay=5ms"]),
        ("greedy,delay=5ms", None),
        ("delay=5ms", None),
        ("greedy,,full", None),
        ("", None),
    ],
)
def test_commas_separate_policies_and_their_settings(text: str, policies: list[str] | None) -> None:
    if policies is None:
        with pytest.raises(SettingsError, match="policy="):
            split_policies(text)
    else:
        assert split_policies(text) == policies


def test_without_settings_nothing_bounds_the_policy() -> None:
    assert settings_for(PROFILE) == BatchingSettings(max_batch_size=8, max_queue_delay=inf, max_queue_size=maxsize)
    smaller = BatchingSettings(max_batch_size=4)
    assert settings_for(PROFILE, smaller) is smaller


class Counting:
    """A policy that remembers, and does not know how to forget."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, seen: Observation) -> Decision:
        """Count."""
        self.asked += 1
        return Decision(seen.waiting)


def test_no_run_sees_the_memory_of_another() -> None:
    policy = Counting()
    used = fresh(policy)
    used.decide(Observation(0.0, 1, 0.0, inf, 1, 0.0, 1, 1, 8, inf, False))
    assert isinstance(used, Counting)
    assert (policy.asked, used.asked) == (0, 1)
    solved = policy_for("smdp", PROFILE)
    assert isinstance(solved, SolvedPolicy)
    assert fresh(solved) is not solved


def test_texts_and_instances_are_loaded_within_the_bounds() -> None:
    assert policy_for("full:4", PROFILE) == FullBatches(4)
    assert policy_for(Greedy(), PROFILE) == Greedy()
    with pytest.raises(SettingsError, match="size=9"):
        policy_for("full:9", PROFILE)
    with pytest.raises(SettingsError, match="delay=1 must not be greater"):
        policy_for("size-or-delay:delay=1s", PROFILE, settings=BatchingSettings(max_batch_size=8, max_queue_delay=0.1))
