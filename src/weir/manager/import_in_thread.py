"""Runs what imports code in a thread, so that the event loop goes on meanwhile."""

import asyncio
import gc
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Seconds after which the interpreter passes on to the loop's thread when it waits: an import would have it for 5 ms each time.
SWITCH = 0.0002


async def import_in_thread(work: Callable[[], T]) -> T:
    """Return what `work` returns; one at a time. While it runs threads take turns more often than they do otherwise, and
    the collector, which would look at all that is being imported and stop every thread for it, rests."""
    interval, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(min(SWITCH, interval))
    gc.disable()
    try:
        return await asyncio.to_thread(work)
    finally:
        sys.setswitchinterval(interval)
        if collects:
            gc.enable()
