"""What makes a policy solve anew, and how often."""

import asyncio
from functools import partial
from typing import Any

import pytest
from tests.rings import subcases
from tests.tuning.banks import PROFILE
from tests.tuning.solving_rig import Rig, running
from tests.waiting import turns

from weir.errors import DeadlineExceeded, Draining, InvalidRequest, ModelError, ModelNotReady, SettingsError
from weir.policy.cost import LatencySLO, Prices
from weir.policy.online.adaptive import AutoPolicy
from weir.tuning import SolveRequest
from weir.tuning import policy_tuner as resolving
from weir.tuning.learning import ProfileMaker
from weir.tuning.policy_tuner import changed_prices


async def test_tables_that_fit_are_left_alone() -> None:
    async with running() as rig:
        await rig.serve(2, 0.006, 1000)
        assert (rig.solver.asked, rig.resolver.counts) == ([], {})
    async with running(watch=False) as rig:  # the times have hooks in them
        await rig.serve(4, 0.016, 200)
        assert rig.solver.asked == []


async def test_tables_are_for_the_workers_there_are() -> None:
    async with running(workers=2) as rig:
        assert rig.solver.wishes == [SolveRequest(PROFILE, Prices(), 2, None)]
        assert rig.resolver.solving
        await rig.solver.answer()
        assert (rig.bank.workers, rig.swaps, rig.resolver.counts) == (2, 1, {"start": 1})
        await rig.worker(0, "lost")
        assert rig.bank.workers == 1  # those that it began with are known
        await rig.worker(1, "lost")
        assert rig.bank.workers == 1  # nobody is there to have tables for
        await rig.worker(1, "ready")
        await rig.worker(0, "ready")
        assert rig.bank.workers == 2
        assert len(rig.solver.asked) == 1
        assert rig.resolver.counts == {"start": 1, "workers": 2}


async def test_of_what_changes_meanwhile_the_newest_counts() -> None:
    async with running() as rig:
        for index in (1, 2, 3):
            await rig.worker(index, "ready")
        assert [wish.workers for wish in rig.solver.wishes] == [2]  # one at a time
        await rig.solver.answer()
        assert [wish.workers for wish in rig.solver.wishes] == [2, 4]
        await rig.solver.answer()
        assert rig.bank.workers == 4 and not rig.resolver.solving


async def test_what_has_changed_back_is_not_swapped_in() -> None:
    async with running() as rig:
        await rig.worker(1, "ready")
        await rig.worker(1, "lost")
        await rig.solver.answer()
        assert (rig.bank.workers, rig.swaps) == (1, 0)
        await rig.worker(1, "ready")
        assert (rig.bank.workers, len(rig.solver.asked)) == (2, 1)  # it is remembered


async def test_only_so_many_banks_are_remembered() -> None:
    async with running() as rig:
        for index in range(1, resolving.REMEMBERED + 1):
            await rig.worker(index, "ready")
            await rig.solver.answer()
        asked = len(rig.solver.asked)
        for index in range(1, resolving.REMEMBERED + 1):
            await rig.worker(index, "lost")
        assert len(rig.solver.asked) == asked + 1  # those for one worker were forgotten
        assert rig.solver.wishes[-1].workers == 1


async def test_a_failure_leaves_the_tables_and_is_tried_again_ever_later() -> None:
    async with running() as rig:
        await rig.worker(1, "ready")
        for expected in (1.0, 2.0, 4.0):
            await rig.solver.answer(ModelError("the process died"))
            assert rig.solver.pauses[-1][0] == expected
            assert (rig.bank.workers, rig.resolver.error) == (1, "the process died")
            await rig.solver.go_on()
        await rig.solver.answer(TimeoutError())
        assert (rig.resolver.failures, rig.resolver.error) == (4, "not solved in time")
        await rig.solver.go_on()
        await rig.solver.answer()
        assert (rig.bank.workers, rig.resolver.error) == (2, "")
        await rig.worker(2, "ready")
        await rig.solver.answer(ModelError("again"))
        assert rig.solver.pauses[-1][0] == 1.0


async def test_what_the_solver_refuses_is_not_tried_again() -> None:
    async with running() as rig:
        await rig.worker(1, "ready")
        await rig.solver.answer(SettingsError("no such policy"))
        assert rig.solver.pauses == []
        await rig.worker(1, "ready")
        assert len(rig.solver.asked) == 1
        await rig.worker(2, "ready")
        assert [wish.workers for wish in rig.solver.wishes] == [2, 3]


async def test_drift_scales_the_profile() -> None:
    async with running() as rig:
        for _ in range(50):
            for rows in (1, 2, 3, 4):
                await rig.serve(rows, 2.0 * float(PROFILE.service_time_ms[rows - 1]) / 1000.0, 1)
        (wish,) = rig.solver.wishes
        assert wish.profile.service_time_ms == pytest.approx(2.0 * PROFILE.service_time_ms)
        assert wish.profile.energy_mj == pytest.approx(2.0 * PROFILE.energy_mj)  # it was derived from times
        assert rig.resolver.policy.costs == (wish.profile, Prices())  # already now, though the bank is not there yet
        await rig.solver.answer()
        assert (rig.bank.profile, rig.resolver.counts) == (wish.profile, {"drift": 1})
        assert rig.resolver.kinds[0].drift == pytest.approx(2.0)
        await rig.serve(4, 0.016, 1000)
        assert len(rig.solver.asked) == 1


async def test_times_that_never_settle_do_not_keep_the_solver_busy() -> None:
    async with running() as rig:
        await rig.serve(4, 0.016, 200)
        await rig.serve(4, 0.032, 200)
        rig.clock.advance(0.5)
        await rig.solver.answer()
        assert rig.solver.pauses[-1][0] == pytest.approx(resolving.REST * 0.5)
        await rig.serve(4, 0.064, 200)
        await rig.solver.go_on()
        assert len(rig.solver.asked) == 2
        assert rig.solver.wishes[-1].profile.service_time_ms[3] == pytest.approx(64.0)
        await rig.solver.answer()
        await rig.worker(1, "ready")  # is worth it at once
        assert rig.solver.wishes[-1].workers == 2


async def test_a_profile_is_learned_where_there_is_none() -> None:
    async with running(AutoPolicy(), maker=partial(ProfileMaker, 4, None)) as rig:
        assert rig.resolver.policy.bank is None
        for _ in range(60):
            await rig.serve(1, 0.005, 2)
            await rig.serve(4, 0.008, 2)
        (wish,) = rig.solver.wishes
        assert wish.profile.service_time_ms == pytest.approx([5.0, 6.0, 7.0, 8.0])
        await rig.solver.answer()
        assert rig.resolver.counts == {"learned": 1}


async def test_a_stop_ends_the_solver_that_nobody_waits_for() -> None:
    async with running() as rig:
        await rig.worker(1, "ready")
        await rig.resolver.close()
        assert rig.solver.cancelled == 1
        rig.resolver.open()  # started again, with one worker
        await rig.worker(0, "ready")
        assert (rig.bank.workers, len(rig.solver.asked)) == (1, 1)


async def test_a_measured_model_is_solved_for_once_it_serves() -> None:
    rig = Rig(AutoPolicy(), maker=partial(ProfileMaker, 4, None))
    rig.resolver.measured(PROFILE)
    await rig.worker(0, "ready")
    assert rig.solver.asked == []  # the start goes first
    rig.resolver.open()
    await turns(8)
    await rig.solver.answer(SettingsError("it cannot be kept"))
    assert (rig.resolver.policy.bank, rig.resolver.error) == (None, "it cannot be kept")
    for _ in range(60):
        await rig.serve(1, float(PROFILE.service_time_ms[0]) / 1000.0, 2)
        await rig.serve(4, float(PROFILE.service_time_ms[3]) / 1000.0, 2)
    assert len(rig.solver.asked) == 1  # what was measured needs no learning
    await rig.resolver.close()


# Changes of the prices of a running policy.


async def test_new_prices_are_in_force_when_the_change_returns() -> None:
    async with running() as rig:
        change = await rig.changing({"energy_weight": 5.0})
        assert not change.done()
        assert rig.resolver.prices == Prices()
        await rig.solver.answer()
        await change
        assert rig.resolver.prices == rig.bank.prices == Prices(1.0, 5.0)
        assert rig.resolver.counts == {"prices": 1}
        await rig.resolver.change({"energy_weight": 5.0})  # nothing new
        assert len(rig.solver.asked) == 1


async def test_changes_come_one_after_the_other() -> None:
    async with running() as rig:
        said: list[dict[str, Any]] = [{"energy_weight": 5.0}, {"latency_weight": 2.0}, {"energy_weight": 7.0}]
        changes = [asyncio.create_task(rig.resolver.change(each)) for each in said]
        for change in changes:
            await turns(8)
            await rig.solver.answer()
            assert change.done()
        assert [wish.prices for wish in rig.solver.wishes] == [Prices(1, 5), Prices(2, 5), Prices(2, 7)]
        assert rig.resolver.prices == Prices(2.0, 7.0)


@subcases("error", [SettingsError("it cannot be kept"), ModelError("the process died")])
async def test_a_change_that_fails_changes_nothing(error: Exception) -> None:
    async with running() as rig:
        change = await rig.changing({"latency_objective": "p99=9ms"})
        assert rig.solver.wishes[0].objective == LatencySLO(0.009, 0.01)
        await rig.solver.answer(error)
        with pytest.raises(type(error), match=str(error)):
            await change
        assert (rig.resolver.objective, rig.swaps) == (None, 0)
        with pytest.raises(InvalidRequest):
            await rig.resolver.change({"price": 1})


async def test_a_change_that_takes_too_long_or_is_given_up_changes_nothing() -> None:
    async with running() as rig:
        change = await rig.changing({"energy_weight": 5.0})
        await rig.solver.answer(TimeoutError())
        with pytest.raises(DeadlineExceeded, match="no new tables within"):
            await change
        change = await rig.changing({"energy_weight": 5.0})
        change.cancel()
        await turns(8)
        assert (change.cancelled(), rig.solver.cancelled, rig.resolver.solving) == (True, 1, False)
        assert rig.resolver.prices == Prices()


async def test_a_change_does_not_wait_for_what_is_being_solved() -> None:
    async with running() as rig:
        await rig.worker(1, "ready")
        change = await rig.changing({"energy_weight": 5.0})
        assert rig.solver.cancelled == 1
        assert rig.solver.wishes[-1] == SolveRequest(PROFILE, Prices(1.0, 5.0), 2, None)
        await rig.worker(1, "lost")  # waits for the change
        assert len(rig.solver.asked) == 2
        await rig.solver.answer()
        await change
        assert rig.solver.wishes[-1] == SolveRequest(PROFILE, Prices(1.0, 5.0), 1, None)
        await rig.solver.answer()
        assert rig.bank.workers == 1


async def test_prices_can_be_changed_before_there_is_anything_to_solve() -> None:
    async with running(AutoPolicy()) as rig:
        await rig.resolver.change({"energy_weight": 5.0})
        assert (rig.resolver.prices, rig.solver.asked) == (Prices(1.0, 5.0), [])
    async with running() as rig:
        await rig.worker(0, "lost")
        change = await rig.changing({"energy_weight": 5.0})
        await rig.solver.answer()
        await change
        assert rig.bank.workers == 1


async def test_a_stop_ends_the_solver_and_tells_all_who_wait() -> None:
    async with running() as rig:
        changes = [asyncio.create_task(rig.resolver.change({"energy_weight": 5.0 + more})) for more in range(3)]
        await turns(8)
        await rig.resolver.close()
        ends = await asyncio.gather(*changes, return_exceptions=True)
        assert [type(end) for end in ends] == [Draining] * 3
        assert (len(rig.solver.asked), rig.solver.cancelled) == (1, 1)
        with pytest.raises(ModelNotReady):
            await rig.resolver.change({"energy_weight": 5.0})


# What may be said to a running service about its prices.


BEFORE = Prices(2.0, 3.0, 100.0)


SLO = LatencySLO(0.02)


@subcases(
    ("objective", "said", "prices", "then"),
    [
        (SLO, {}, BEFORE, SLO),  # what is not given stays
        (SLO, {"energy_weight": 1}, Prices(2.0, 1, 100.0), SLO),
        (SLO, {"reference_rate": None, "latency_objective": None}, Prices(2.0, 3.0), None),
        (None, {"latency_objective": "p99=20ms"}, BEFORE, LatencySLO(0.02, 0.01)),
    ],
)
def test_prices_are_changed_as_is_said(objective: Any, said: dict[str, Any], prices: Prices, then: Any) -> None:
    assert changed_prices(BEFORE, objective, said) == (prices, then)


@subcases(
    ("said", "says"),
    [
        ([1], r"must be an object with some of latency_weight, .*; is \[1\]"),
        ({"weight": 1}, "weight: unknown field; available: latency_weight"),
        ({"latency_weight": "1"}, "latency_weight='1': must be a number"),
        ({"latency_weight": None}, "latency_weight=None: must be a number$"),
        ({"energy_weight": True}, "energy_weight=True: must be a number"),
        ({"reference_rate": [1]}, r"reference_rate=\[1\]: must be a number, or null"),
        ({"latency_objective": 20}, "latency_objective=20: must be a text such as p99=20ms, or null"),
    ],
)
def test_what_is_no_price_is_refused(said: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        changed_prices(BEFORE, None, said)


@subcases(
    ("said", "says"),
    [
        ({"latency_weight": 0, "energy_weight": 0}, "one of them must be greater than 0"),
        ({"energy_weight": 10**400}, "energy_weight: must be less than 1e300"),
        ({"latency_objective": "soon"}, "latency_objective='soon'"),
    ],
)
def test_prices_that_cannot_be_are_refused_with_the_reason(said: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        changed_prices(BEFORE, None, said)
