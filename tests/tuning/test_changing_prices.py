"""Changes of the prices of a running policy."""

import asyncio
from typing import Any

import pytest
from tests.tuning.banks import PROFILE
from tests.tuning.solving_rig import running, turns

from weir.errors import DeadlineExceeded, Draining, InvalidRequest, ModelError, ModelNotReady, SettingsError
from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.online.adaptive import AutoPolicy
from weir.tuning.solver import SolveRequest


def test_new_prices_are_in_force_when_the_change_returns() -> None:
    async def check() -> None:
        async with running() as rig:
            change = asyncio.create_task(rig.resolver.change({"energy_weight": 5.0}))
            await turns()
            assert not change.done()
            assert rig.resolver.prices == Prices()
            await rig.solver.answer()
            await change
            assert rig.resolver.prices == rig.bank.prices == Prices(1.0, 5.0)
            assert rig.resolver.counts == {"prices": 1}
            await rig.resolver.change({"energy_weight": 5.0})  # nothing new
            assert len(rig.solver.asked) == 1

    asyncio.run(check())


def test_changes_come_one_after_the_other() -> None:
    async def check() -> None:
        async with running() as rig:
            said: list[dict[str, Any]] = [{"energy_weight": 5.0}, {"latency_weight": 2.0}, {"energy_weight": 7.0}]
            changes = [asyncio.create_task(rig.resolver.change(each)) for each in said]
            for change in changes:
                await turns()
                await rig.solver.answer()
                assert change.done()
            assert [wish.prices for wish in rig.solver.wishes] == [Prices(1, 5), Prices(2, 5), Prices(2, 7)]
            assert rig.resolver.prices == Prices(2.0, 7.0)

    asyncio.run(check())


@pytest.mark.parametrize("error", [SettingsError("it cannot be kept"), ModelError("the process died")])
def test_a_change_that_fails_changes_nothing(error: Exception) -> None:
    async def check() -> None:
        async with running() as rig:
            change = asyncio.create_task(rig.resolver.change({"latency_objective": "p99=9ms"}))
            await turns()
            assert rig.solver.wishes[0].objective == LatencySLO(0.009, 0.01)
            await rig.solver.answer(error)
            with pytest.raises(type(error), match=str(error)):
                await change
            assert (rig.resolver.objective, rig.swaps) == (None, 0)
            with pytest.raises(InvalidRequest):
                await rig.resolver.change({"price": 1})

    asyncio.run(check())


def test_a_change_that_takes_too_long_changes_nothing() -> None:
    async def check() -> None:
        async with running() as rig:
            change = asyncio.create_task(rig.resolver.change({"energy_weight": 5.0}))
            await turns()
            await rig.solver.answer(TimeoutError())
            with pytest.raises(DeadlineExceeded, match="no new tables within"):
                await change
            assert rig.resolver.prices == Prices()

    asyncio.run(check())


def test_a_change_does_not_wait_for_what_is_being_solved() -> None:
    async def check() -> None:
        async with running() as rig:
            await rig.worker(1, "ready")
            change = asyncio.create_task(rig.resolver.change({"energy_weight": 5.0}))
            await turns()
            assert rig.solver.cancelled == 1
            assert rig.solver.wishes[-1] == SolveRequest(PROFILE, Prices(1.0, 5.0), 2, None)
            await rig.worker(1, "lost")  # waits for the change
            assert len(rig.solver.asked) == 2
            await rig.solver.answer()
            await change
            assert rig.solver.wishes[-1] == SolveRequest(PROFILE, Prices(1.0, 5.0), 1, None)
            await rig.solver.answer()
            assert rig.bank.workers == 1

    asyncio.run(check())


def test_prices_can_be_changed_before_there_is_anything_to_solve() -> None:
    async def check() -> None:
        async with running(AutoPolicy()) as rig:
            await rig.resolver.change({"energy_weight": 5.0})
            assert (rig.resolver.prices, rig.solver.asked) == (Prices(1.0, 5.0), [])

    asyncio.run(check())


def test_prices_can_be_changed_while_no_worker_is_there() -> None:
    async def check() -> None:
        async with running() as rig:
            await rig.worker(0, "lost")
            change = asyncio.create_task(rig.resolver.change({"energy_weight": 5.0}))
            await turns()
            await rig.solver.answer()
            await change
            assert rig.bank.workers == 1

    asyncio.run(check())


def test_whoever_gives_a_change_up_leaves_no_solver_behind() -> None:
    async def check() -> None:
        async with running() as rig:
            change = asyncio.create_task(rig.resolver.change({"energy_weight": 5.0}))
            await turns()
            change.cancel()
            await turns()
            assert (change.cancelled(), rig.solver.cancelled, rig.resolver.solving) == (True, 1, False)
            assert rig.resolver.prices == Prices()

    asyncio.run(check())


def test_a_stop_ends_the_solver_and_tells_those_who_wait() -> None:
    async def check() -> None:
        async with running() as rig:
            with pytest.raises(Draining):
                change = asyncio.create_task(rig.resolver.change({"energy_weight": 5.0}))
                await turns()
                await rig.resolver.close()
                assert rig.solver.cancelled == 1
                await change
            with pytest.raises(ModelNotReady):
                await rig.resolver.change({"energy_weight": 5.0})

    asyncio.run(check())


def test_a_stop_leaves_nothing_to_do_for_those_whose_turn_it_was_not() -> None:
    async def check() -> None:
        async with running() as rig:
            changes = [asyncio.create_task(rig.resolver.change({"energy_weight": 5.0 + more})) for more in range(3)]
            await turns()
            await rig.resolver.close()
            ends = await asyncio.gather(*changes, return_exceptions=True)
            assert [type(end) for end in ends] == [Draining] * 3
            assert len(rig.solver.asked) == 1

    asyncio.run(check())
