"""The policy `auto` at the start of a service: measure the model on its own workers, and then be ready.

Solving is not waited for: it takes as long as it takes, and until then the policy is greedy. Whatever goes wrong is a
warning; a start fails only where it would have failed anyway.
"""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from weir.errors import ModelNotReady, WeirError
from weir.manager.delivery import logger
from weir.manager.resolving import Resolver
from weir.model import Model
from weir.policy.online.auto import AutoPolicy
from weir.workers.executor import Executor, Listener
from weir.workers.settings import WorkerSettings

if TYPE_CHECKING:
    from weir.policy.cost.profile import Profile
    from weir.profiling.measuring import Measuring

# Two to each doubling: between them the profile interpolates, and a start has no time to look for every edge.
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Times the seconds that were asked for: each size is measured a few times even then, but a model so slow that this takes
# longer is served, and learned from.
MOST = 3.0
NO_METERS = "a start has no time for them; `weir profile` reads them, and auto:profile=FILE uses what it wrote"


class ProfiledExecutor:
    """An executor that is measured while it starts, before its listener hears of the workers. Afterwards it is `inner`."""

    def __init__(
        self, inner: Executor, resolver: Resolver, policy: AutoPolicy, model: type[Model], settings: WorkerSettings,
        max_batch_size: int,
    ) -> None:  # fmt: skip
        self._inner = inner
        self._resolver = resolver
        self._policy = policy
        self._model = model
        self._settings = settings
        self._max_batch_size = max_batch_size
        self._preparing: asyncio.Task[None] | None = None
        # Nothing stands between a service and its workers.
        self.run = inner.run
        self.cancel = inner.cancel
        self.reserve = inner.reserve
        self.states = inner.states
        self.gauges = inner.gauges
        self.add_worker = inner.add_worker
        self.remove_worker = inner.remove_worker

    async def start(self, listener: Listener) -> None:
        """Start the workers and measure the first of them; return when that is done."""
        if self._resolver.profile is not None:  # from an earlier start
            await self._inner.start(listener)
            return
        from weir.profiling.measuring import Measuring

        measuring = Measuring(self._inner)
        await self._inner.start(measuring)
        await self._prepared(self._measure(measuring))
        measuring.step_aside(listener)

    async def stop(self) -> None:
        """End the measurement, if it is not over, and the workers."""
        if self._preparing is not None and not self._preparing.done():
            self._preparing.cancel()
        await self._inner.stop()

    async def _prepared(self, preparing: Coroutine[Any, Any, None]) -> None:
        self._preparing = asyncio.ensure_future(preparing)
        try:
            await self._preparing
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ModelNotReady("stopped before it was ready") from None

    async def _measure(self, measuring: "Measuring") -> None:
        policy, name = self._policy, self._model.__name__
        logger.info("measuring %s for %g s, to solve its policy", name, policy.seconds)
        try:
            async with asyncio.timeout(MOST * policy.seconds):
                profile = await self._profile(measuring)
        except Exception as error:
            late = f"its batch sizes take longer than {MOST:g} times {policy.seconds:g} s"
            trace = None if isinstance(error, WeirError | TimeoutError) else error
            logger.warning(
                "%s could not be measured, its policy is greedy at first: %s", name, str(error) or late, exc_info=trace
            )
            return
        self._resolver.measured(profile)

    async def _profile(self, measuring: "Measuring") -> "Profile":
        from weir.profiling.items import items_of
        from weir.profiling.measure import measure
        from weir.profiling.settings import ProfilingSettings

        largest = self._max_batch_size
        sizes = [size for size in SIZES if size < largest] + [largest]
        settings = ProfilingSettings(sizes=sizes, seconds=self._policy.seconds, power=self._policy.power)
        depth = self._settings.pipeline_depth
        return await measure(
            measuring, items_of(self._model), largest, settings, pipeline_depth=depth, no_meters=NO_METERS
        )
