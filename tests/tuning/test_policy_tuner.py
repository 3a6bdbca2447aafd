"""What makes a policy solve anew, and how often."""

import asyncio

import pytest
from tests.tuning.banks import PROFILE
from tests.tuning.solving_rig import Rig, running, turns

from weir.errors import ModelError, SettingsError
from weir.policy.cost.objective import Prices
from weir.policy.online.adaptive import AutoPolicy
from weir.tuning import policy_tuner as resolving
from weir.tuning.learning import OnlineProfile
from weir.tuning.solver import SolveRequest


def test_tables_that_fit_are_left_alone() -> None:
    async def check() -> None:
        async with running() as rig:
            await rig.serve(2, 0.006, 1000)
            assert rig.solver.asked == []
            assert rig.resolver.counts == {}

    asyncio.run(check())


def test_tables_are_for_the_workers_there_are() -> None:
    async def check() -> None:
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

    asyncio.run(check())


def test_of_what_changes_meanwhile_the_newest_counts() -> None:
    async def check() -> None:
        async with running() as rig:
            for index in (1, 2, 3):
                await rig.worker(index, "ready")
            assert [wish.workers for wish in rig.solver.wishes] == [2]  # one at a time
            await rig.solver.answer()
            assert [wish.workers for wish in rig.solver.wishes] == [2, 4]
            await rig.solver.answer()
            assert rig.bank.workers == 4
            assert not rig.resolver.solving

    asyncio.run(check())


def test_what_has_changed_back_is_not_swapped_in() -> None:
    async def check() -> None:
        async with running() as rig:
            await rig.worker(1, "ready")
            await rig.worker(1, "lost")
            await rig.solver.answer()
            assert (rig.bank.workers, rig.swaps) == (1, 0)
            await rig.worker(1, "ready")
            assert (rig.bank.workers, len(rig.solver.asked)) == (2, 1)  # it is remembered

    asyncio.run(check())


def test_only_so_many_banks_are_remembered() -> None:
    async def check() -> None:
        async with running() as rig:
            for index in range(1, resolving.REMEMBERED + 1):
                await rig.worker(index, "ready")
                await rig.solver.answer()
            asked = len(rig.solver.asked)
            for index in range(1, resolving.REMEMBERED + 1):
                await rig.worker(index, "lost")
            assert len(rig.solver.asked) == asked + 1  # those for one worker were forgotten
            assert rig.solver.wishes[-1].workers == 1

    asyncio.run(check())


def test_a_failure_leaves_the_tables_and_is_tried_again_ever_later() -> None:
    async def check() -> None:
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

    asyncio.run(check())


def test_what_the_solver_refuses_is_not_asked_again() -> None:
    async def check() -> None:
        async with running() as rig:
            await rig.worker(1, "ready")
            await rig.solver.answer(SettingsError("no such policy"))
            assert rig.solver.pauses == []
            await rig.worker(1, "ready")
            assert len(rig.solver.asked) == 1
            await rig.worker(2, "ready")
            assert [wish.workers for wish in rig.solver.wishes] == [2, 3]

    asyncio.run(check())


def test_drift_scales_the_profile() -> None:
    async def check() -> None:
        async with running() as rig:
            await rig.serve(4, 0.016, 200)  # twice the 8 ms of the profile
            (wish,) = rig.solver.wishes
            assert wish.profile.service_time_ms == pytest.approx(2.0 * PROFILE.service_time_ms)
            assert wish.profile.energy_mj == pytest.approx(2.0 * PROFILE.energy_mj)  # it was derived from times
            await rig.solver.answer()
            assert rig.bank.profile is wish.profile
            assert rig.resolver.counts == {"drift": 1}
            assert rig.resolver.drift == pytest.approx(2.0)
            await rig.serve(4, 0.016, 1000)
            assert len(rig.solver.asked) == 1

    asyncio.run(check())


def test_times_that_never_settle_do_not_keep_the_solver_busy() -> None:
    async def check() -> None:
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

    asyncio.run(check())


def test_when_all_workers_go_meanwhile_there_is_nothing_to_solve() -> None:
    async def check() -> None:
        async with running() as rig:
            await rig.serve(4, 0.016, 200)
            await rig.serve(4, 0.032, 200)
            rig.clock.advance(0.5)
            await rig.solver.answer()
            await rig.worker(0, "lost")
            await rig.solver.go_on()
            assert len(rig.solver.asked) == 1

    asyncio.run(check())


def test_times_with_hooks_in_them_are_not_watched() -> None:
    async def check() -> None:
        async with running() as rig:
            rig.resolver.attach(rig.count, watch=False)
            await rig.serve(4, 0.016, 200)
            assert rig.solver.asked == []

    asyncio.run(check())


def test_a_profile_is_learned_where_there_is_none() -> None:
    async def check() -> None:
        async with running(AutoPolicy(), learned=OnlineProfile(4, None)) as rig:
            assert rig.resolver.policy.bank is None
            for _ in range(60):
                await rig.serve(1, 0.005, 2)
                await rig.serve(4, 0.008, 2)
            (wish,) = rig.solver.wishes
            assert wish.profile.service_time_ms == pytest.approx([5.0, 6.0, 7.0, 8.0])
            await rig.solver.answer()
            assert rig.resolver.counts == {"learned": 1}

    asyncio.run(check())


def test_a_stop_ends_the_solver_that_nobody_waits_for() -> None:
    async def check() -> None:
        async with running() as rig:
            await rig.worker(1, "ready")
            await rig.resolver.close()
            assert rig.solver.cancelled == 1
            rig.resolver.open()  # started again, with one worker
            await rig.worker(0, "ready")
            assert (rig.bank.workers, len(rig.solver.asked)) == (1, 1)

    asyncio.run(check())


def test_a_measured_model_is_solved_for_once_it_serves() -> None:
    async def check() -> None:
        rig = Rig(AutoPolicy(), learned=OnlineProfile(4, None))
        rig.resolver.measured(PROFILE)
        await rig.worker(0, "ready")
        assert rig.solver.asked == []  # the start goes first
        rig.resolver.open()
        await turns()
        await rig.solver.answer(SettingsError("it cannot be kept"))
        assert (rig.resolver.policy.bank, rig.resolver.error) == (None, "it cannot be kept")
        for _ in range(60):
            await rig.serve(1, float(PROFILE.service_time_ms[0]) / 1000.0, 2)
            await rig.serve(4, float(PROFILE.service_time_ms[3]) / 1000.0, 2)
        assert len(rig.solver.asked) == 1  # what was measured needs no learning
        await rig.resolver.close()

    asyncio.run(check())
