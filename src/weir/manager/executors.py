"""Makes the executor that the settings ask for."""

from typing import Any

from weir.model import Model
from weir.workers.executor import Executor
from weir.workers.settings import WorkerSettings


def make_executor(
    model: type[Model], params: dict[str, Any], settings: WorkerSettings, *, name: str, max_batch_size: int
) -> Executor:
    """Return an executor that has not been started. Each kind is imported only when it is asked for."""
    if settings.executor == "inline":
        from weir.workers.local.inline import InlineExecutor

        return InlineExecutor(model, params, settings, name=name, max_batch_size=max_batch_size)
    if settings.executor == "thread":
        from weir.workers.local.thread import ThreadExecutor

        return ThreadExecutor(model, params, settings, name=name, max_batch_size=max_batch_size)
    if settings.executor == "external":
        from weir.workers.remote.external import ExternalExecutor

        return ExternalExecutor(model, settings, name=name)
    from weir.workers.pool import ProcessPool

    return ProcessPool(model, params, settings, name=name, max_batch_size=max_batch_size)
