"""Models of a simulated server with a solved policy: the real policy and the real PolicyTuner. Its tables are made by hand, after a while of virtual time and as
often as they are solved again: for another number of workers, or as service times have drifted from the profile."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weir.errors import ModelError
from weir.policy.cost import Prices, Profile
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import Bank
from weir.policy.solve.tables import limit_table, stacked
from weir.tuning import SolveRequest

if TYPE_CHECKING:
    from tests.simulated.plans import Plan
    from tests.simulated.world import World

SHARE = 0.2  # of the plans have such models
LOADS = (0.1, 0.5, 0.9)
_SECONDS = (0.0, 0.01, 2.0, 30.0)  # until tables are solved
_SETTLES = 300.0  # seconds in which the tables are what they shall be: a try that fails is repeated within a minute


@dataclass(frozen=True)
class SolvingPlan:
    """The profile of a model is wrong by the factor `wrong`, and `fails` is the share of solutions that fail."""

    wrong: float
    fails: float
    limits: tuple[float, ...] = field(default=(0.0, 0.5, 1.0))  # of the tables, as shares of the largest batch


def draw_solving(plan: "Plan") -> dict[str, SolvingPlan]:
    """Return which models of `plan` have a solved policy, in place of the one that their settings say."""
    draw, found = random.Random(f"{plan.seed} solving"), {}
    if draw.random() < SHARE:
        free = [name for name in plan.services if name in ("items", "tensors") and name not in plan.ranges]
        for name in draw.sample(free, draw.randint(0, len(free))):
            limits = tuple(sorted(draw.choice((0.0, 0.1, 0.5, 1.0)) for _ in LOADS))
            found[name] = SolvingPlan(draw.choice((1.0, 1.0, 0.3, 3.0)), draw.choice((0.0, 0.0, 0.3)), limits)
    return found


def solved_policy(plan: "Plan", name: str) -> SolvedPolicy:
    """Return the policy of a model, with tables for as many workers as it begins with."""
    workers, solving = plan.workers[name], plan.solving[name]
    profile = Profile.linear(
        alpha_ms=1e3 * solving.wrong * workers.per_row, tau0_ms=1e3 * solving.wrong * workers.base, zeta0_mj=1.0,
        max_batch_size=plan.services[name]["max_batch_size"],
    )  # fmt: skip
    return SolvedPolicy(_bank(SolveRequest(profile, Prices(), workers.workers, None), solving.limits))


def _bank(request: SolveRequest, limits: tuple[float, ...]) -> Bank:
    profile, rows = request.profile, request.profile.max_batch_size
    tables = [limit_table(max(1, round(share * rows)), rows) for share in limits]
    times = [1e3 * share for share in LOADS]
    columns: Any = {
        "rates": [load * profile.max_rate * request.workers for load in LOADS], "tables": stacked(tables), "max_waiting": [0] * 3,
        "response_time_ms": times, "p99_ms": times, "power_w": [1.0] * 3,
    }  # fmt: skip
    return Bank(profile=profile, prices=request.prices, workers=request.workers, objective=None, **columns)


class SimulatedSolver:
    """Solves for one generation of a model, in no process."""

    def __init__(self, plan: SolvingPlan, draw: random.Random) -> None:
        self._plan, self._draw = plan, draw

    async def solve(self, request: SolveRequest, limit: float) -> Bank:
        """See SolvingProcess."""
        await asyncio.sleep(self._draw.choice(_SECONDS))
        if self._draw.random() < self._plan.fails:
            raise ModelError("the process of the solver has ended")
        return _bank(request, self._plan.limits)

    async def close(self) -> None:
        """See SolvingProcess."""


async def settle(world: "World") -> None:
    """Wait until the tables are for the workers that there are: nobody asks any more."""
    await asyncio.sleep(_SETTLES)
    for name in world.plan.solving:
        tuner: Any = world.services[name].generation.tuner
        if tuner._wanted() not in (None, tuner.solved_for) and not tuner.solving and not tuner.error:
            world.broken(f"{name}: its tables are not for {tuner._wanted().workers} workers: {tuner.solved_for}")
