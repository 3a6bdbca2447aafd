"""Logarithmic axes that say plain numbers: 20, 50, 100."""

from typing import Any


def plain_log(axes: Any, *names: str) -> None:
    """Make the named axes (`x`, `y`) logarithmic, with plain numbers at 1, 2 and 5 and no others."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for name in names:
        axis = getattr(axes, f"{name}axis")
        getattr(axes, f"set_{name}scale")("log")
        low, high = sorted(getattr(axes, f"get_{name}lim")())
        wide = high > 500.0 * low > 0.0
        axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
