import asyncio
import time

import pytest
import uvloop

from weir.bench.rounds import Alarm

pytestmark = pytest.mark.usefixtures("nothing_is_left_by_module")


async def woken(*waits: float) -> tuple[list[str], float]:
    """Set an alarm to each of `waits` from now, one after the other, and return who was called and how late."""
    called: list[str] = []
    done = asyncio.get_running_loop().create_future()

    def call(name: str) -> None:
        called.append(name)
        done.set_result(time.monotonic())

    with Alarm() as alarm:
        when = 0.0
        for wait in waits:
            when = time.monotonic() + wait
            alarm.set(when, lambda name=f"{wait:g}": call(name))  # type: ignore[misc]  # mypy loses the default
        return called, await done - when


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("wait", [0.02, 0.0, -1.0])
def test_it_wakes_the_loop_not_before_the_instant(run: object, wait: float) -> None:
    assert callable(run)
    called, late = run(woken(wait))
    assert called == [f"{wait:g}"] and late >= 0.0


def test_only_the_last_setting_counts() -> None:
    called, late = uvloop.run(woken(0.001, 30.0, 0.01))
    assert called == ["0.01"] and late >= 0.0


def test_an_alarm_that_is_closed_says_nothing() -> None:
    async def close_early() -> list[str]:
        called: list[str] = []
        alarm = Alarm()
        alarm.set(time.monotonic() + 0.001, lambda: called.append("closed"))
        alarm.close()
        alarm.close()
        after, _ = await woken(0.002)
        return called + after

    assert uvloop.run(close_early()) == ["0.002"]
