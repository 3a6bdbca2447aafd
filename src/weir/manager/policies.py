"""Finds the policy that the settings name."""

from typing import Any

from weir.errors import SettingsError
from weir.policy.decision import Policy
from weir.policy.rules import Greedy


def make_policy(given: Any) -> Policy:
    """Return the policy itself. Raises SettingsError."""
    if given == "greedy":
        return Greedy()
    if isinstance(given, Policy):
        return given
    raise SettingsError(f"policy={given!r}: must be a policy or the name of one")
