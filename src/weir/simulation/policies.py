"""Which policies are simulated, and within which bounds."""

from collections.abc import Callable
from copy import deepcopy
from math import inf
from sys import maxsize

from weir.batching.settings import BatchingSettings
from weir.errors import SettingsError
from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import Profile
from weir.policy.decision import Policy, complete
from weir.policy.loading import load_policy

SOLVED = "smdp"  # the policy solved for the very profile, prices or objective, and workers that are simulated


def split_policies(text: str) -> list[str]:
    """Return the policies that `text` names, separated by commas.

    Commas separate the settings of a policy too: a part `key=value` belongs to the policy before it. So
    `greedy,size-or-delay:size=32,delay=5ms,full:16` are three. Raises SettingsError for a part that can be neither.
    """
    policies: list[str] = []
    for part in text.split(","):
        name, equals, _ = part.partition("=")
        if not part.strip():
            raise SettingsError(f"policy={text!r}: has nothing between two commas, or at an end")
        if not (equals and name.strip().isidentifier()):
            policies.append(part.strip())
        elif policies and ":" in policies[-1]:
            policies[-1] += "," + part.strip()
        else:
            raise SettingsError(
                f"policy={text!r}: {part!r} is a setting, and there is no policy with settings before it"
            )
    return policies


def settings_for(profile: Profile, settings: BatchingSettings | None = None) -> BatchingSettings:
    """Return `settings`, or by default none that bounds the policy: batches as large as the profile knows, any queue, any wait.

    Raises SettingsError if batches may be larger than the profile knows.
    """
    if settings is None:
        return BatchingSettings(max_batch_size=profile.max_batch_size, max_queue_delay=inf, max_queue_size=maxsize)
    if settings.max_batch_size > profile.max_batch_size:
        raise SettingsError(
            f"max_batch_size={settings.max_batch_size}: must not be greater than the profile's {profile.max_batch_size}"
        )
    return settings


def policy_for(
    policy: str | Policy, profile: Profile, *, prices: Prices | None = None, workers: int = 1,
    settings: BatchingSettings | None = None, objective: LatencySLO | None = None,
    solving: Callable[[int, int], None] | None = None,
) -> Policy:  # fmt: skip
    """Return a policy with no memory of any other run: `smdp` solved for this profile, a text, or a copy of an instance.

    `solving` is told (rates done, of how many). Raises SettingsError as `load_policy` does.
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
    """Return a policy like this one that remembers nothing of any run: what its `fresh` returns, else a copy."""
    completed = complete(policy)
    return completed.fresh() if completed.remembers else deepcopy(policy)
