"""What somebody says who changes the prices of a running service: read, checked, and put over those in force."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weir.errors import InvalidRequest, SettingsError, brief

if TYPE_CHECKING:
    from weir.policy.cost.latency_slo import LatencySLO
    from weir.policy.cost.prices import Prices

WEIGHTS = ("latency_weight", "energy_weight")
FIELDS = (*WEIGHTS, "reference_rate", "latency_objective")


def changed_prices(prices: "Prices", objective: "LatencySLO | None", said: Any) -> "tuple[Prices, LatencySLO | None]":
    """Return `prices` and `objective` with what is `said` put over them; what is not said stays.

    `said` is a mapping of FIELDS: numbers, or None for a `reference_rate` or `latency_objective` ("p99=20ms") that is to
    be no more. Raises InvalidRequest for anything else, SettingsError for a value that cannot be.
    """
    from weir.policy.cost.latency_slo import LatencySLO
    from weir.policy.cost.prices import Prices

    if not isinstance(said, Mapping):
        raise InvalidRequest(f"must be an object with some of {', '.join(FIELDS)}; is {brief(said, 100)}")
    for name, value in said.items():
        _check(name, value)
    numbers = {name: said.get(name, getattr(prices, name)) for name in (*WEIGHTS, "reference_rate")}
    if "latency_objective" in said:
        text = said["latency_objective"]
        objective = None if text is None else LatencySLO.parse(text)
    return Prices(**numbers), objective


def _check(name: Any, value: Any) -> None:
    if name not in FIELDS:
        raise InvalidRequest(f"{name}: there is no such field; there are {', '.join(FIELDS)}")
    if name == "latency_objective":
        if not isinstance(value, str | None):
            raise InvalidRequest(f"{name}={brief(value, 100)}: must be a text such as p99=20ms, or null")
        return
    if value is None and name not in WEIGHTS:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name}={brief(value, 100)}: must be a number{'' if name in WEIGHTS else ', or null'}")
    if isinstance(value, int) and value.bit_length() > 1000:
        raise SettingsError(f"{name}: must be less than 1e300")
