import asyncio
import threading
from typing import Any

import pytest

from weir.serving.blocking import Background, new_loop


def test_what_is_posted_is_taken_in_order_on_the_loop() -> None:
    taken: list[Any] = []
    done = threading.Event()

    def take(value: Any) -> None:
        taken.append((value, threading.current_thread().name))
        if value == 99:
            done.set()

    background = Background("weir-test", take, lambda _: None)
    background.start()
    for value in range(100):
        background.post(value)
    assert done.wait(60)
    background.close()
    assert taken == [(value, "weir-test") for value in range(100)]


def test_many_posts_need_few_wakeups() -> None:
    taken: list[int] = []
    background = Background("weir-test", taken.append, lambda _: None)
    background.start()
    held, release = threading.Event(), threading.Event()

    async def hold() -> None:
        held.set()
        release.wait(60)

    async def settle() -> None:
        await asyncio.sleep(0)

    busy = threading.Thread(target=background.run, args=(hold(),))
    busy.start()
    held.wait(60)
    wakeups = 0
    loop = background._loop
    wake = loop.call_soon_threadsafe

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal wakeups
        wakeups += 1
        return wake(*args, **options)

    background._loop = type("Loop", (), {"call_soon_threadsafe": staticmethod(counting)})()
    for value in range(1000):
        background.post(value)
    background._loop = loop
    release.set()
    busy.join()
    background.run(settle())
    background.close()
    assert wakeups == 1
    assert taken == list(range(1000))


def test_threads_that_post_without_pause_do_not_keep_the_loop_busy_for_ever() -> None:
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


def test_what_comes_too_late_is_refused() -> None:
    refused: list[int] = []
    background = Background("weir-test", lambda _: None, refused.append)
    background.start()
    background.close()
    background.close()
    background.post(1)
    assert refused == [1]


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


def test_an_error_of_what_runs_reaches_the_caller() -> None:
    background = Background("weir-test", lambda _: None, lambda _: None)
    background.start()

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        background.run(fail())
    background.close()


def test_the_loop_is_uvloops() -> None:
    loop = new_loop()
    assert type(loop).__module__ == "uvloop"
    loop.close()
