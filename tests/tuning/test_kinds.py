"""How the policy of a model with workers of two kinds gets its tables."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.serving.models import Paced, Square
from tests.tuning.banks import PROFILE
from tests.tuning.solving_rig import Rig, running
from tests.waiting import turns, until

import weir
from weir.policy.cost import Prices
from weir.policy.online.adaptive import AutoPolicy, SolvedPolicy
from weir.policy.solve.uneven import LOADS, WorkerKind
from weir.tuning import SolvingProcess, UnevenRequest
from weir.tuning.learning import ProfileMaker
from weir.workers.settings import WorkerSettings

SLOW = PROFILE.scaled(time=4.0)
KINDS = WorkerSettings(workers=2, worker_kinds=["small", "large"])


@asynccontextmanager
async def tuned(*profiles: Any) -> AsyncIterator[Rig]:
    """A tuner that is open, of one small and one large worker."""
    maker = partial(ProfileMaker, 4, None)
    async with running(AutoPolicy(), workers=0, settings=KINDS, maker=maker) as rig:
        for kind, profile in enumerate(profiles):
            rig.resolver.measured(profile, kind)
        for worker in (0, 1):
            rig.resolver.worker_changed("square", worker, "ready", "")
        await turns(8)
        yield rig


def kinds_of(rig: Rig) -> Any:
    return rig.resolver.policy.explain()["kinds"]


async def test_tables_are_solved_for_both_kinds_the_fast_one_first() -> None:
    async with tuned(SLOW, PROFILE) as rig:
        request = rig.solver.uneven_wishes[-1]
        assert [each.profile for each in request.kinds] == [PROFILE, SLOW]
        assert ([each.number for each in request.kinds], request.workers) == ([1, 0], 2)
        assert [(each["kind"], each["workers"]) for each in kinds_of(rig)["each"]] == [("large", 1), ("small", 1)]
        assert rig.resolver.policy.explain()["workers"] == 2


async def test_without_the_workers_of_a_kind_the_tables_are_those_of_the_other() -> None:
    async with tuned(SLOW, PROFILE) as rig:
        asked = len(rig.solver.uneven_wishes)
        await rig.worker(0, "lost")
        await rig.solver.answer()
        assert (rig.solver.wishes[-1].profile, rig.solver.wishes[-1].workers) == (PROFILE, 1)
        assert (kinds_of(rig), rig.bank.profile) == (None, PROFILE)
        await rig.worker(0, "ready")
        assert kinds_of(rig) is not None
        assert len(rig.solver.uneven_wishes) == asked  # these tables are still there


async def test_a_kind_that_becomes_slower_has_its_own_drift() -> None:
    async with tuned(SLOW, PROFILE) as rig:
        await rig.serve(4, 0.016, 200, worker=1)
        await turns(8)
        fast, slow = (each.profile for each in rig.solver.uneven_wishes[-1].kinds)
        assert fast.service_time_ms == pytest.approx(2.0 * PROFILE.service_time_ms)
        assert slow is SLOW
        assert [kind.drift for kind in rig.resolver.kinds] == pytest.approx([1.0, 2.0])


async def test_the_profile_of_each_kind_is_learned_where_there_is_none() -> None:
    async with tuned(SLOW) as rig:
        assert (rig.solver.uneven_wishes, rig.resolver.profile) == ([], None)
        for _ in range(60):
            await rig.serve(1, 0.005, 2, worker=1)
            await rig.serve(4, 0.008, 2, worker=1)
        fast, slow = (each.profile for each in rig.solver.uneven_wishes[-1].kinds)
        assert fast.service_time_ms == pytest.approx([5.0, 6.0, 7.0, 8.0])
        assert slow is SLOW


async def test_prices_are_solved_for_both_kinds_and_objectives_are_refused() -> None:
    async with tuned(SLOW, PROFILE) as rig:
        await rig.resolver.change({"energy_weight": 2.0})
        assert rig.solver.uneven_wishes[-1].prices.energy_weight == 2.0
        with pytest.raises(weir.SettingsError, match="workers of two kinds are solved for weights"):
            await rig.resolver.change({"latency_objective": "p99=1s"})
        await rig.worker(0, "lost")
        await rig.worker(1, "lost")
        await rig.resolver.change({"energy_weight": 3.0})
        assert rig.resolver.prices.energy_weight == 3.0


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        ("auto:p99=20ms", r"solved for weights, but the policy has a latency objective; leave one of them out"),
        ("auto:profile=a.toml", "the policy has the times of one kind of workers; use policy=auto without a profile"),
        (SolvedPolicy(), "the policy has the times of one kind of workers"),
    ],
)
def test_policies_that_know_one_kind_are_refused(
    policy: Any, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(PROFILE.to_toml())
    with pytest.raises(weir.SettingsError, match=rf"worker_kinds=\['a', 'b'\]: .*{rule}"):
        weir.Service(Square, policy=policy, workers=2, worker_kinds=["a", "b"])


async def test_the_solving_process_solves_for_two_kinds() -> None:
    process = SolvingProcess(niceness=0)
    try:
        request = UnevenRequest((WorkerKind(PROFILE, 1), WorkerKind(SLOW, 2)), Prices())
        bank = await process.solve(request, 60.0)
        assert bank.rates == tuple(load * sum(each.max_rate for each in request.kinds) for load in LOADS)
        assert (len(bank.tables), bank.prices) == (len(LOADS), request.prices)
    finally:
        await process.close()


# With real processes.


async def until_solved_for_kinds(service: weir.Service) -> None:
    await until(lambda: (service.explain_policy()["kinds"] or {}).get("each") is not None)


def rows_by_kind(service: weir.Service) -> dict[str, int]:
    return {each["kind"]: each["rows"] for each in service.explain_policy()["kinds"]["workers"]}


async def test_the_slow_kind_is_idle_at_a_low_rate_and_works_at_a_high_one(nothing_is_left: None) -> None:
    """At the low rate requests come two by two: a policy that uses every idle worker gives one of each two to the slow one."""
    async with weir.Service(
        Paced, policy="auto:seconds=1", workers=2, worker_kinds=["small", "large"], max_batch_size=1,
        max_queue_delay=10.0, env=[{"KIND": "small", "SECONDS": "0.3"}, {"KIND": "large", "SECONDS": "0.04"}],
    ) as service:  # fmt: skip
        profiles = service.explain_policy()["kinds"]["profiles"]
        small, large = (profiles[kind]["service_time_ms"][0] for kind in ("small", "large"))
        assert small > 2.0 * large
        await until_solved_for_kinds(service)

        async def pairs(count: int) -> None:
            for _ in range(count):
                await asyncio.gather(service.infer(0), service.infer(0), asyncio.sleep(6e-3 * large))

        await pairs(12)  # the rate is learned
        before = rows_by_kind(service)
        await pairs(8)
        after = rows_by_kind(service)
        assert after["small"] - before["small"] <= 2  # of 16: where the machine held a batch of the large one up
        assert service.explain_policy()["kinds"]["left_idle"]["kind"] == "small"

        async def caller() -> None:
            for _ in range(4):
                await service.infer(0)

        await asyncio.gather(*(caller() for _ in range(24)))
        busy = rows_by_kind(service)
        assert busy["small"] > after["small"] and busy["large"] > after["large"]
