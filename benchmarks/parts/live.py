"""Live against the profile: what a user measures with `weir profile` and then sees, for greedy, solved and auto."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reproduction.plots import Point, draw_predictions

from benchmarks.children import ask_own
from benchmarks.result import Part, Result, Run
from benchmarks.runs.live import AUTO
from benchmarks.runs.theory import COUNTED, ENERGY_WEIGHT
from benchmarks.servers import ROOT
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile
from weir.policy.online.adaptive import predict
from weir.policy.solve.bank import Bank, solve_bank
from weir.policy.solve.evaluation import evaluate
from weir.policy.solve.tables import greedy_table

LOADS = (0.3, 0.5, 0.7, 0.8)
POLICIES = ("greedy", "solved", AUTO)
PRICES = Prices(1.0, ENERGY_WEIGHT)
PROFILING = 20.0  # seconds
CELL = 1.6  # times the seconds asked for, in each round: one policy at one load
ALLOWED = 0.05
PICTURE = ROOT / "docs" / "pictures" / "live.png"
COLUMNS = ["load", "policy", "measured, ms", "for these arrivals", "off by", "predicted", "requests"]


def measure(run: Run) -> Result:
    """Profile the model; then at each load one policy after the other, on the same arrivals."""
    result = Result(COLUMNS)
    points: dict[str, list[Point]] = {policy: [] for policy in POLICIES}
    with TemporaryDirectory() as folder:
        path, file = Path(folder) / "live.profile.toml", Path(folder) / "live.policy.npz"
        seen = ask_own("live", "profile", path, PROFILING)
        run.step(f"profiled: {seen['beyond_ms']:+.3f} ms beyond what the model takes; {seen['waited']}")
        profile = Profile.from_toml(path.read_text())
        bank = solve_bank(profile, PRICES)
        file.write_bytes(bank.to_bytes())
        for load in LOADS:
            for policy in POLICIES:
                rate = load * profile.max_rate
                text = file if policy == "solved" else policy
                one = ask_own("live", text, path, rate, CELL * run.rounds * run.seconds, 1 + round(100 * load))
                predicted = _predicted(policy, profile, bank, rate)
                points[policy].append(_add(result, load, policy, one, predicted))
                run.step(f"load {load:g}: {policy} {one['response_ms']:.2f} ms, {one['predicted_ms']:.2f} predicted")
    draw_predictions(PICTURE, points)
    result.notes += _notes(seen)
    return result


def _predicted(policy: str, profile: Profile, bank: Bank, rate: float) -> float:
    """Return the stationary mean response time: exactly, or what the bank says."""
    if policy == "greedy":
        return evaluate(profile, rate, greedy_table(profile.max_batch_size), PRICES).response_time_ms
    return float(predict(bank, rate)["response_time_ms"] or 0.0)


def _add(result: Result, load: float, policy: str, one: dict[str, Any], predicted: float) -> Point:
    off, low, high = (each / one["predicted_ms"] for each in one["beyond_ms"])
    result.rows.append([
        f"{load:g}", policy, f"{one['response_ms']:.2f}", f"{one['predicted_ms']:.2f}",
        f"{100 * off:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f})", f"{predicted:.2f}", f"{one['requests']:,}",
    ])  # fmt: skip
    result.values[f"{policy} {load:g}"] = off
    result.goal(
        f"load {load:g}: {policy} within 5 % of what its profile predicts for these arrivals", f"{100 * off:+.1f} %",
        abs(off) <= ALLOWED,
    )  # fmt: skip
    ends = [one["predicted_ms"] * (1.0 + each) for each in (off, low, high)]
    return Point(one["predicted_ms"], ends[0], ends[1], ends[2], f"{load:g}")


def _notes(seen: dict[str, Any]) -> list[str]:
    return [
        f"![Measured mean response time over the predicted one]({PICTURE.parent.name}/{PICTURE.name})",
        f"The model is profiled as by `weir profile` in {PROFILING:g} s: its times are {seen['beyond_ms']:+.3f} ms beyond what the model "
        f"itself takes, on the mean over sizes. That is the way to the worker, its waking up and the way back. It waited for "
        f"a CPU for {seen['waited']}.",
        "*For these arrivals* is what the same batcher and policy do with these very arrivals in virtual time, with the profile's "
        "service times; in brackets is the 95 % interval of the mean difference of the same requests. *Predicted* is the stationary mean, "
        f"for all arrivals there might be. Arrivals from {COUNTED[0]:.0%} to {COUNTED[1]:.0%} of the time count.",
    ]


PART = Part(
    "live",
    "Live against the profile",
    "A model in a worker process that takes exactly 3.051·b + 10.52 ms for b rows is profiled, its tables are solved, and it is "
    "served under Poisson load in real time, with all settings as they come.",
    lambda rounds: 1 + len(LOADS) * len(POLICIES),
    measure,
)
