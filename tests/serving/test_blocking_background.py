import asyncio
import threading
from typing import Any

from weir.serving.blocking import Background


def test_threads_that_post_without_pause_do_not_starve_the_loop() -> None:
    stop = threading.Event()
    background = Background("weir-test", lambda _: None, lambda _: None)
    background.start()

    def pester() -> None:
        while not stop.is_set():
            background.post(1)

    threads = [threading.Thread(target=pester) for _ in range(3)]
    for thread in threads:
        thread.start()

    async def turn() -> int:
        await asyncio.sleep(0)
        return 7

    assert [background.run(turn()) for _ in range(5)] == [7] * 5
    stop.set()
    for thread in threads:
        thread.join()
    background.close()


def test_closing_runs_the_last_thing_first_also_from_the_loop_itself() -> None:
    for from_loop in (False, True):
        ran = threading.Event()

        async def last(ran: threading.Event = ran) -> None:
            ran.set()

        background = Background("weir-test", lambda _: None, lambda _: None)
        background.start()
        thread = background._thread

        async def close(background: Background = background, last: Any = last) -> None:
            background.close(last)

        if from_loop:
            background.run(close())
        else:
            background.close(last)
        thread.join(60)
        assert ran.is_set()
        assert not thread.is_alive()
