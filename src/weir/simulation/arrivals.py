"""The text form of arrivals: `name:load` or `name:key=value,key=value`.

    poisson:0.7                  a load: the share of what the workers can serve
    poisson:rate=200             rows per second
    gamma:0.7,cv=2               renewal, gaps with that coefficient of variation
    mmpp:0.7,burst=5,share=0.2,period=1s     Poisson in two phases; in the busy one, `burst` times the rate of the other
    on-off:0.5,on=1s,off=1s      Poisson while on, nothing while off
    sine:0.5,depth=0.8,period=10s            Poisson, the rate swings around its mean
    ramp:0.1,to=0.9,period=60s   Poisson, the rate climbs from the one to the other, and starts again
    constant:0.7                 equal gaps
    trace:arrivals.csv           recorded ones (see traces.py)

A load is a share of what the workers can serve; `to` of a ramp is one too, or a rate if the start is stated as `rate=`.
`rows=4` after any but a trace gives each request that many rows. Whatever the process, the mean rate is the one asked for
(for a ramp: the mean of its ends). What the settings mean: processes.py.
"""

from dataclasses import fields
from math import inf

from weir.errors import SettingsError
from weir.policy.loading import parse_duration
from weir.simulation.processes import (
    Arrivals,
    Constant,
    GammaRenewal,
    MarkovModulated,
    OnOff,
    Poisson,
    Ramp,
    Sine,
    Trace,
)
from weir.simulation.traces import read_trace

DURATIONS = ("period", "on", "off")
KINDS: dict[str, type[Arrivals]] = {
    kind.name: kind for kind in (Poisson, GammaRenewal, MarkovModulated, OnOff, Sine, Ramp, Constant)
}
EXAMPLE = "poisson:0.7 (a load) or poisson:rate=200 (rows per second)"


def parse_arrivals(text: str, *, capacity: float | None = None) -> Arrivals:
    """Return the arrivals that `text` stands for; a bare number is a load: that share of `capacity` (rows per second).

    Raises SettingsError naming the key, the value and the rule; also for a load where no capacity is known.
    """
    name, colon, rest = text.partition(":")
    if name == Trace.name:
        if not rest:
            raise SettingsError(f"arrivals={text!r}: the file must be given, as in trace:arrivals.csv")
        return Trace(*read_trace(rest), source=rest)
    if name not in KINDS:
        raise SettingsError(f"arrivals={text!r}: must be one of {', '.join(KINDS)}, {Trace.name}, such as {EXAMPLE}")
    said = _said(rest if colon else None, KINDS[name], text)
    if ("load" in said) == ("rate" in said):
        raise SettingsError(f"arrivals={text!r}: must state the load or the rate, one of them, as in {EXAMPLE}")
    if "load" in said and capacity is None:
        raise SettingsError(f"arrivals={text!r}: a load needs a profile to be a share of; state rate=...")
    rows = int(said.pop("rows", 1))
    try:
        if KINDS[name] is Ramp and "to" not in said:
            raise SettingsError("to: must be given, the load or rate at the end of the climb")
        rate = _rate(said, 1.0 if "rate" in said or capacity is None else capacity)
        return KINDS[name](rate, rows=rows, **said)
    except SettingsError as error:
        raise SettingsError(f"arrivals={text!r}: {error.message}") from None


def _said(rest: str | None, kind: type[Arrivals], text: str) -> dict[str, float]:
    """Return the numbers that the text states by key; the bare number is `load`."""
    known = ["load", *(each.name for each in fields(kind))]
    known = [("to" if key == "climb" else key) for key in known]
    said: dict[str, float] = {}
    for index, part in enumerate(rest.split(",") if rest is not None else ()):
        key, separator, value = part.partition("=")
        if not separator and index == 0:
            key, value = "load", part
        if key not in known or not (separator or index == 0):
            raise SettingsError(f"arrivals={text!r}: no setting {part!r}; it has {', '.join(known[1:])}")
        if key in said:
            raise SettingsError(f"arrivals={text!r}: {part}: {key} is said twice; state it once")
        said[key] = _number(key, value, text)
    return said


def _number(key: str, value: str, text: str) -> float:
    try:
        if key == "rows":
            return int(value)
        return parse_duration(value) if key in DURATIONS else float(value)
    except ValueError:
        rule = "a whole number" if key == "rows" else "a duration such as 1s" if key in DURATIONS else "a number"
        raise SettingsError(f"arrivals={text!r}: {key}={value!r}: must be {rule}") from None


def _rate(said: dict[str, float], unit: float) -> float:
    """Take the load or rate out of `said`, and return it in rows per second; that of a ramp is the mean of its ends."""
    key = "rate" if "rate" in said else "load"
    value = said.pop(key)
    if not 0.0 < value < inf:
        raise SettingsError(f"{key}={value:g}: must be greater than 0, and finite")
    if (last := said.pop("to", None)) is None:
        return value * unit
    if not 0.0 <= last < inf:
        raise SettingsError(f"to={last:g}: must be 0 or more, and finite")
    said["climb"] = last / value
    return (value + last) / 2.0 * unit


__all__ = [
    "Arrivals", "Constant", "GammaRenewal", "MarkovModulated", "OnOff", "Poisson", "Ramp", "Sine", "Trace",
    "parse_arrivals",
]  # fmt: skip
