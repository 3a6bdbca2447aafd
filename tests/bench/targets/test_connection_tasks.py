import asyncio
import gc

import pytest

from weir.bench.targets.connection import Tasks

pytestmark = pytest.mark.usefixtures("nothing_is_left_by_module")


def test_they_are_held_until_their_end() -> None:
    async def main() -> None:
        tasks, gate, done = Tasks(), asyncio.Event(), list[int]()

        async def work(number: int) -> None:
            await gate.wait()
            done.append(number)

        for number in range(3):
            tasks.start(work(number))
        gc.collect()
        assert len(tasks) == 3
        gate.set()
        await tasks.wait()
        assert done == [0, 1, 2]
        await asyncio.sleep(0)  # they are let go of in the turn after their end
        assert not tasks
        await tasks.wait()

    asyncio.run(main())


def test_what_runs_can_be_ended() -> None:
    async def main() -> None:
        tasks, ends = Tasks(), list[str]()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ends.append("ended")

        tasks.start(work())
        await asyncio.sleep(0)
        await tasks.end()
        assert ends == ["ended"]
        await tasks.end()

    asyncio.run(main())
