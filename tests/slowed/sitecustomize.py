"""Makes the threads of executors slow, and readers of event loops late, in every Python that finds this on its path, servers and their workers
too: see SLOW in the Makefile.

A test that passes only where a thread, or another process, is quicker than the event loop fails then every time, not once in a thousand. Late
are messages of workers and fronts, and the notices that a process has ended; transports of asyncio are not, nor are the events of grpc.aio,
of which each notice reads one: twenty-five a second would be all that it does.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, TimerHandle
    from types import ModuleType

P = ParamSpec("P")
T = TypeVar("T")

_SECONDS = float(os.environ.get("SLOW", "0"))
_LOOPS = {"asyncio.selector_events": "BaseSelectorEventLoop", "uvloop": "Loop"}
_submit = ThreadPoolExecutor.submit


def _slowly(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    time.sleep(_SECONDS)
    return function(*args, **kwargs)


def _submit_slowed(
    self: ThreadPoolExecutor, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> Future[T]:
    return _submit(self, partial(_slowly, function, *args, **kwargs))


class _Finder(PathFinder):
    """Changes the loops once their modules are imported: a worker process that needs no asyncio does not import it."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: "ModuleType | None" = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target) if fullname in _LOOPS else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_change(module: "ModuleType") -> None:
                run(module)
                _read_late(getattr(module, _LOOPS[fullname]))

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]  # one loader, of one module
        return spec


def _read_late(kind: Any) -> None:
    """Have the loops of this `kind` call readers late."""
    add, remove = kind.add_reader, kind.remove_reader
    late: WeakKeyDictionary[AbstractEventLoop, dict[int, TimerHandle]] = WeakKeyDictionary()

    def forget(loop: "AbstractEventLoop", fd: Any) -> bool:
        timer = late.setdefault(loop, {}).pop(_number(fd), None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def add_late(loop: "AbstractEventLoop", fd: Any, callback: Callable[..., object], *args: object) -> None:
        def ready() -> None:
            remove(loop, fd)
            late.setdefault(loop, {})[_number(fd)] = loop.call_later(_SECONDS, read)

        def read() -> None:
            del late[loop][_number(fd)]
            add(loop, fd, ready)
            callback(*args)

        forget(loop, fd)
        reader = callback.func if isinstance(callback, partial) else callback
        if type(getattr(reader, "__self__", None)).__module__.startswith("grpc."):
            add(loop, fd, callback, *args)
        else:
            add(loop, fd, ready)

    def remove_late(loop: "AbstractEventLoop", fd: Any) -> bool:
        return forget(loop, fd) | bool(remove(loop, fd))

    kind.add_reader, kind.remove_reader = add_late, remove_late


def _number(fd: Any) -> int:
    return fd if isinstance(fd, int) else int(fd.fileno())


if _SECONDS:
    ThreadPoolExecutor.submit = _submit_slowed  # type: ignore[assignment]  # typeshed: one method of all executors
    sys.meta_path.insert(0, _Finder)
