"""Calls as programs: generators that yield what is to be done, one step after the other, and are given what came of it.

A program knows no socket and no clock, so that the same one is run by a client that blocks and by one that awaits.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from weir.errors import DeadlineExceeded, WeirError

T = TypeVar("T")
# Yields steps (Sleep, or what the transport understands), is sent their answers, returns the value of the call.
Program = Generator[Any, Any, T]


class Sleep(NamedTuple):
    """Wait. DeadlineExceeded comes at once if that would take longer than there is time."""

    seconds: float


def run(program: Program[T], send: Callable[[Any, float], Any], timeout: float) -> T:
    """Run `program` to its end and return its value; `send` does a step within the seconds it is given."""
    deadline = time.monotonic() + timeout
    resume: Callable[[], Any] = partial(next, program)
    while True:
        try:
            step = resume()
        except StopIteration as end:
            value: T = end.value
            return value
        try:
            left = _left(step, deadline, timeout)
            answer: Any = None
            if isinstance(step, Sleep):
                time.sleep(step.seconds)
            else:
                answer = send(step, left)
        except WeirError as error:
            resume = partial(program.throw, error)
        else:
            resume = partial(program.send, answer)


async def run_async(
    program: Program[T], send: Callable[[Any, float], Awaitable[Any]], timeout: float
) -> T:  # fmt: skip
    """Do the same without blocking the event loop."""
    deadline = time.monotonic() + timeout
    resume: Callable[[], Any] = partial(next, program)
    while True:
        try:
            step = resume()
        except StopIteration as end:
            value: T = end.value
            return value
        try:
            left = _left(step, deadline, timeout)
            answer = await (asyncio.sleep(step.seconds) if isinstance(step, Sleep) else send(step, left))
        except WeirError as error:
            resume = partial(program.throw, error)
        else:
            resume = partial(program.send, answer)


def _left(step: Any, deadline: float, timeout: float) -> float:
    """Return the seconds that are left for `step`. Raises DeadlineExceeded if it cannot be done in time."""
    left = deadline - time.monotonic()
    if left <= (step.seconds if isinstance(step, Sleep) else 0.0):
        raise DeadlineExceeded(f"no answer within {timeout:g} s")
    return left
