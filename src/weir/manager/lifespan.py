"""Runs a registry for as long as a block of code or an ASGI server lives."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from weir.manager.registry import Registry


@asynccontextmanager
async def running(registry: Registry, drain_timeout: float | None = None) -> AsyncIterator[Registry]:
    """Start all models before the block and drain and stop them after it, also when it raises.

    Raises what Registry.start raises; nothing is left running then.
    """
    await registry.start()
    try:
        yield registry
    finally:
        await registry.stop(drain_timeout)
