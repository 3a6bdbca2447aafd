"""What a service with a solved policy has beside others. Imported only by those: it needs numpy."""

from pathlib import Path

from weir.errors import SettingsError
from weir.manager.autostart import ProfiledExecutor
from weir.manager.online_profile import OnlineProfile
from weir.manager.resolving import Resolver
from weir.model import Model
from weir.policy.cost.profile import Profile
from weir.policy.decision import Policy
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.online.auto import AutoPolicy
from weir.workers.executor import Executor
from weir.workers.settings import WorkerSettings


def make_resolver(model: str, policy: Policy, max_batch_size: int) -> Resolver | None:
    """Return what looks after the tables of `policy`, None if it is no solved policy of Weir's.

    Raises SettingsError for a profile's file that cannot be used, and for a policy that would never have tables.
    """
    if not isinstance(policy, SolvedPolicy):
        return None
    if isinstance(policy, AutoPolicy):
        learned = OnlineProfile(max_batch_size, policy.power) if policy.profile is None else None
        resolver = Resolver(model, policy, policy.prices, policy.objective, learned=learned)
        if policy.profile is not None:
            resolver.measured(_read_profile(policy.profile, max_batch_size))
        return resolver
    bank = policy.bank
    if bank is None:
        raise SettingsError("policy=SolvedPolicy(): must have a bank; without one, let it be auto")
    resolver = Resolver(model, policy, bank.prices, bank.objective)
    if max_batch_size < bank.profile.max_batch_size:
        resolver.measured(bank.profile.up_to(max_batch_size))
    return resolver


def with_profile(
    executor: Executor, resolver: Resolver, model: type[Model], settings: WorkerSettings, max_batch_size: int
) -> Executor:
    """Return an executor that is measured while it starts, if its policy is to measure the model itself."""
    if not isinstance(resolver.policy, AutoPolicy) or resolver.policy.profile is not None:
        return executor
    return ProfiledExecutor(executor, resolver, resolver.policy, model, settings, max_batch_size)


def _read_profile(path: str, max_batch_size: int) -> Profile:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"policy=auto:profile={path}: cannot be read: {error}") from None
    return Profile.from_toml(text, f"policy=auto:profile={path}").up_to(max_batch_size)
