"""Makes the threads of executors slow in every Python that finds this on its path, servers and their workers too: see SLOW in the Makefile.

A test that passes only where a thread is quicker than the event loop fails then every time, not once in a thousand.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SECONDS = float(os.environ.get("SLOW", "0"))
_submit = ThreadPoolExecutor.submit


def _slowly(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    time.sleep(_SECONDS)
    return function(*args, **kwargs)


def _submit_slowed(
    self: ThreadPoolExecutor, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> Future[T]:
    return _submit(self, partial(_slowly, function, *args, **kwargs))


if _SECONDS:
    ThreadPoolExecutor.submit = _submit_slowed  # type: ignore[assignment]  # typeshed: one method of all executors
