"""The policy `auto`: greedy at first; the server measures the model, solves a bank and lets this policy adopt it."""

from dataclasses import dataclass, replace

from weir.errors import SettingsError
from weir.fields import AT_LEAST_ZERO, POSITIVE, check, setting
from weir.policy.cost.latency_slo import LatencySLO
from weir.policy.cost.prices import Prices
from weir.policy.online.adaptive import SolvedPolicy


@dataclass(eq=False)
class AutoPolicy(SolvedPolicy):
    """A solved policy that starts without a bank. Its fields say how the model is to be measured and what counts.

    Without a stated price, latency alone counts (`energy_weight` 0): the mean response time is then the least that any
    policy reaches, and nobody is made to wait for energy that may be free. What a joule is worth beside a millisecond
    only its owner knows.

    Raises SettingsError naming the setting, the value and the rule.
    """

    latency_weight: float = setting(1.0, "price of a millisecond of mean response time", rule=AT_LEAST_ZERO)
    energy_weight: float = setting(0.0, "price of a watt of mean power", rule=AT_LEAST_ZERO)
    reference_rate: float | None = setting(
        None, "rows per second at which a row's millisecond has that price; without it, at every rate", rule=POSITIVE
    )
    p99: float | None = setting(
        None, "promise instead of a price: seconds within which 99 % are answered, with the least energy", rule=POSITIVE
    )
    in_time: float | None = setting(
        None,
        "answer as many requests as possible within so many seconds; a refusal is as bad as a late answer",
        rule=POSITIVE,
    )
    power: float | None = setting(
        None, "watts that a busy worker draws: a start reads no meters, and without this takes 1 W", rule=POSITIVE
    )
    profile: str | None = setting(None, "a profile's file, instead of measuring the model at the start")
    seconds: float = setting(
        3.0, "how long to measure the model; thrice that at most, where batches are slow", rule=POSITIVE
    )

    def __post_init__(self) -> None:
        super().__init__()
        check(self)
        self.prices = Prices(self.latency_weight, self.energy_weight, self.reference_rate)
        self.objective = self._objective()
        if self.profile is not None and not self.profile:
            raise SettingsError(f"profile={self.profile!r}: must be the path of a file")

    def _objective(self) -> LatencySLO | None:
        if self.p99 is not None and self.in_time is not None:
            raise SettingsError(f"p99={self.p99:g}, in_time={self.in_time:g}: must be one of them, not both")
        if self.in_time is not None:
            return LatencySLO(self.in_time, refusal_price=1.0).checked()
        return None if self.p99 is None else LatencySLO(self.p99, 0.01).checked()

    def fresh(self) -> "AutoPolicy":
        """Return a policy with the same settings, and the same bank if there is one, that has seen nothing."""
        made = replace(self)
        made._stages = self._stages
        return made
