"""What the executors without processes of their own have in common."""

import copy
import logging
import os
import threading
from typing import Any

from weir.errors import SettingsError, WeirError
from weir.messages import Batch, EventKind, Events, Timing
from weir.model import Model
from weir.workers.faults import copies, model_error
from weir.workers.run.runner import Runner
from weir.workers.settings import WorkerSettings

logger = logging.getLogger("weir")


class LocalState:
    """The state of a worker in this process (see WorkerState)."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = "starting"
        self.pid: int | None = os.getpid()
        self.in_flight = 0
        self.restarts = 0
        self.reason = ""


def refuse_settings(settings: WorkerSettings, names: tuple[str, ...]) -> None:
    """Raise SettingsError if one of `names` is set, which only worker processes can honour."""
    for name in names:
        value = getattr(settings, name)
        if value:
            raise SettingsError(f"{name}={value!r}: needs worker processes, not executor={settings.executor!r}")


def unload(runner: Runner, name: str, index: int) -> None:
    """Stop `runner`. What its model raises is logged: it ends all the same."""
    try:
        runner.stop()
    except (Exception, SystemExit):
        logger.exception("worker %d of %r: unload raised", index, name)


def no_arena(restarts: int = 0) -> dict[str, Any]:
    """Return the gauges of an executor without shared memory."""
    return {"arena_bytes": 0, "arena_free_bytes": 0, "restarts": restarts}


def make_runner(
    model: type[Model], params: dict[str, Any], settings: WorkerSettings, index: int, max_batch_size: int,
    fatal: tuple[type[BaseException], ...], label: str, shared: Model | None = None,
) -> Runner:  # fmt: skip
    """Return a runner that has not been started. `shared`: see Runner."""
    return Runner(
        model, params, worker_index=index, max_batch_size=max_batch_size, retry_in_halves=settings.retry_in_halves,
        fatal=fatal, label=label, shared=shared,
    )  # fmt: skip


class SharedLoad:
    """What the worker threads of a model share: made and loaded once, by the first of them."""

    def __init__(self, model: type[Model], params: dict[str, Any], max_batch_size: int) -> None:
        self._class = model
        self._params = params
        self._max_batch_size = max_batch_size
        self._lock = threading.Lock()
        self._loaded: Model | None = None

    def copy(self) -> Model:
        """Return a model of one's own that has what is shared. Raises whatever the constructor and `load_shared` raise, to each who asks."""
        with self._lock:
            if self._loaded is None:
                model = self._class(**self._params)
                model.max_batch_size = self._max_batch_size  # type: ignore[misc]  # what holds here, not the class's default
                model.load_shared()
                self._loaded = model
        return copy.copy(self._loaded)


def not_loaded(error: BaseException, name: str, index: int) -> WeirError:
    """Return what a failed start is told as."""
    return error if isinstance(error, WeirError) else model_error(f"worker {index} of {name!r} did not load: it", error)


def all_failed(batch: Batch, error: BaseException) -> Events:
    """Return the events of a batch that could not be run to its end because of `error`."""
    count = len(batch.payloads)
    outputs: list[Any] = [*copies(model_error("the worker", error), count)] if count else []
    return Events(batch.batch_id, outputs, kinds=[EventKind.ERROR] * count, timing=Timing(0.0, 0.0, 0.0))
