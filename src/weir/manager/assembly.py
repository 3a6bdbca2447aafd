"""Puts a service's machinery together: batcher, executor, hooks, observers, driver."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from weir.batching.batcher import Batcher
from weir.errors import SettingsError
from weir.manager.delivery import Delivery
from weir.manager.driver import Driver
from weir.manager.executors import make_executor
from weir.manager.hooks import Hook, HookedExecutor
from weir.manager.rolling_window import RollingWindow
from weir.workers.executor import Executor

if TYPE_CHECKING:
    from weir.manager.resolving import Resolver
    from weir.manager.service import Service


def make_resolver(service: "Service") -> "Resolver | None":
    """Return what looks after the tables of a solved policy; None for any other."""
    if not hasattr(service.policy, "adopt"):
        return None
    from weir.manager.solved import make_resolver  # numpy is for those who need it

    return make_resolver(service.label, service.policy, service.batching.max_batch_size)


def make_driver(
    service: "Service", executor: Executor | None, resolver: "Resolver | None", clock: Callable[[], float],
    before: Hook | None, after: Hook | None,
) -> tuple[Driver, RollingWindow]:  # fmt: skip
    """Return a driver for `service` that has not been started, and what measures it. Without `executor` it is the one that the
    settings ask for. `before` and `after` are the hooks that the service really has."""
    if after and service.streaming:
        raise SettingsError(
            f"{type(service).__name__}.after_batch: sees no answers of a streaming model; use its postprocess"
        )
    largest = service.batching.max_batch_size
    if executor is None:
        executor = make_executor(
            service.model, service.params, service.workers, name=service.label, max_batch_size=largest
        )
    if resolver is not None:
        from weir.manager.solved import with_profile

        executor = with_profile(executor, resolver, service.model, service.workers, largest)
    batcher = Batcher(service.batching, service.policy)
    measured = RollingWindow(clock, lambda: batcher.arrivals, largest)
    observers = (*service.observers, service.statistics, measured, *([] if resolver is None else [resolver]))
    driver = Driver(batcher, executor, Delivery(service.label, observers), clock)
    driver.streaming = service.streaming
    if resolver is not None:
        resolver.attach(partial(_swapped, driver, measured), watch=not (before or after))
    if before or after:
        driver.executor = HookedExecutor(executor, before, after, driver.handed)
        driver.handed_later = True
    return driver, measured


def _swapped(driver: Driver, measured: RollingWindow) -> None:
    measured.forget()  # what was measured belongs to the tables before
    driver.policy_changed()
