"""Runs models through a Runner, as a worker does."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from weir.messages import OBJECT, Batch
from weir.model import Model
from weir.workers.run.runner import RunnableModel, Runner

Predict = Callable[[Any, Any], Any]


def started(
    model: type[Model] | Predict, params: dict[str, Any] | None = None, *, streaming: bool = False, **settings: Any
) -> Runner:
    """Start a runner of a model, or of one that has this `predict`, perhaps a streaming one."""
    if not isinstance(model, type):
        model = type("Tried", (Model,), {"predict": model, "streaming": streaming})
    named = {name: settings.pop(name) for name in RunnableModel._fields if name in settings}
    runs = RunnableModel(model, params or {}, 64)._replace(**named)
    runner = Runner(runs, settings.pop("worker_index", 0), **settings)
    runner.start()
    return runner


def run(
    model: type[Model] | Predict | Runner, payloads: list[Any], content_type: str | list[str] = OBJECT,
    accept: str | list[str] = OBJECT, **settings: Any,
) -> list[Any]:  # fmt: skip
    """Return the outputs of one batch."""
    runner = model if isinstance(model, Runner) else started(model, **settings)
    return runner.compute(runner.prepare(Batch(1, payloads, content_type, accept))).outputs


class StoppedClock(asyncio.SelectorEventLoop):
    """An event loop whose time passes only where a test says so: `pass_time`."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


def run_in_stopped_time(main: Callable[[StoppedClock], Coroutine[Any, Any, None]]) -> None:
    """Run `main` with such a loop: no limit passes because a thread has not had its turn yet."""
    loop = StoppedClock()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main(loop))
