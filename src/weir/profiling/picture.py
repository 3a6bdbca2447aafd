"""Draws a profile: the measured values, the straight lines through them, and where those are wrong."""

from pathlib import Path
from typing import Any

import numpy as np

from weir.figures import GREY, INK, figure, styles
from weir.policy.cost.profile import Profile

ENERGIES = {
    "nvml": "read from the GPU, idle power subtracted",
    "rapl": "read from the CPU, idle power subtracted",
    "stated": "stated power times service time",
    "time": "none known: one mJ for one ms",
}


def draw_profile(profile: Profile, path: Path, title: str = "") -> None:
    """Write a picture of `profile` to `path` as PNG and SVG. Raises SettingsError without matplotlib."""
    with figure(path, 2, 2) as (drawing, axes):
        if title:
            drawing.suptitle(title, fontsize=10)
        _times(axes[0, 0], profile)
        _rates(axes[0, 1], profile)
        _energies(axes[1, 0], profile)
        _variation(axes[1, 1], profile)
        for each in axes.flat:
            each.set_xlabel("batch size b (rows)")
            each.set_xlim(0, profile.max_batch_size * 1.03 + 0.5)


def measured_sizes(profile: Profile) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the sizes that were measured, in rows, as the profile notes; all sizes without a note."""
    sizes = np.array(profile.about.get("sizes_measured", []) or profile.sizes, dtype=np.int64)
    return sizes[(sizes >= 1) & (sizes <= profile.max_batch_size)]


def _times(axes: Any, profile: Profile) -> None:
    first, second = _two_styles()
    sizes, fit = measured_sizes(profile), profile.fit()
    times = profile.service_time_ms
    axes.errorbar(
        sizes,
        times[sizes - 1],
        yerr=(profile.cv * times)[sizes - 1],
        label="measured, ± 1 standard deviation",
        **{**first, "linestyle": "none"},
        capsize=2,
        elinewidth=0.8,
    )
    axes.plot(profile.sizes, times, color=first["color"], linewidth=1.0)
    line = f"{fit.alpha_ms:.4g}·b + {fit.tau0_ms:.4g} (R² {fit.time_r2:.4f})"
    axes.plot(profile.sizes, fit.alpha_ms * profile.sizes + fit.tau0_ms, label=line, **{**second, "marker": ""})
    axes.set(title="service time", ylabel="τ(b) (ms)")
    _finish(axes)


def _rates(axes: Any, profile: Profile) -> None:
    first, _ = _two_styles()
    rates = 1000.0 * profile.sizes / profile.service_time_ms
    best = profile.best_batch_size
    sizes = measured_sizes(profile)
    axes.plot(profile.sizes, rates, color=first["color"], linewidth=1.0)
    axes.plot(sizes, rates[sizes - 1], **{**first, "linestyle": "none"})
    axes.axvline(best, color=INK, linestyle=":", linewidth=1.0)
    left = best > profile.max_batch_size / 2
    axes.annotate(
        f"b* = {best}: {profile.max_rate:,.{1 if profile.max_rate < 1000 else 0}f} rows/s",
        (best, 0.06),
        xycoords=("data", "axes fraction"),
        xytext=(-6 if left else 6, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        color=INK,
    )
    axes.set(title="throughput of one worker", ylabel="b / τ(b) (rows/s)")
    axes.set_ylim(bottom=0)


def _energies(axes: Any, profile: Profile) -> None:
    first, second = _two_styles()
    fit = profile.fit()
    axes.plot(profile.sizes, profile.energy_mj, label=ENERGIES[profile.energy_source], **{**first, "marker": ""})
    read = np.array(profile.about.get("energy_sizes", []), dtype=np.int64)
    axes.plot(read, profile.energy_mj[read - 1], **{**first, "linestyle": "none"})
    line = f"{fit.beta_mj:.4g}·b + {fit.zeta0_mj:.4g} (R² {fit.energy_r2:.4f})"
    axes.plot(profile.sizes, fit.beta_mj * profile.sizes + fit.zeta0_mj, label=line, **{**second, "marker": ""})
    axes.set(title="energy of a batch", ylabel="ζ(b) (mJ)")
    _finish(axes)


def _variation(axes: Any, profile: Profile) -> None:
    first, second = _two_styles()
    fit, sizes = profile.fit(), measured_sizes(profile)
    line = fit.alpha_ms * profile.sizes + fit.tau0_ms
    beyond = 100.0 * (profile.service_time_ms / line - 1.0)
    axes.axhline(0.0, color=GREY, linewidth=1.0)
    axes.plot(sizes, 100.0 * profile.cv[sizes - 1], label="coefficient of variation of τ", **first)
    axes.plot(sizes, beyond[sizes - 1], label="τ beyond its straight line", **second)
    axes.set(title="what a straight line does not say", ylabel="%")
    axes.legend(fontsize=7)


def _finish(axes: Any) -> None:
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, loc="lower right")


def _two_styles() -> tuple[dict[str, Any], dict[str, Any]]:
    each = styles()
    return next(each), next(each)
