"""The requests of callers in this process: futures that are their own requests."""

import asyncio
import concurrent.futures
import gc
import threading
from collections.abc import Callable, Generator, Hashable
from contextlib import suppress
from typing import Any

from weir.batching.request_state import begin, refuse
from weir.errors import ModelError, Unsupported, WeirError, for_caller
from weir.messages import OBJECT, Dispatch, Kind


class InProcess:
    """The attributes of messages.Request that rarely differ from call to call.

    They are attributes of the class, because setting them for each call costs more than all the rest of making one.
    """

    __slots__ = ()

    payload: Any
    arrival: float
    timeout: float
    deadline: float

    kind: Kind = Kind.ITEM
    content_type: str = OBJECT
    accept: str = OBJECT
    rows: int = 1
    cost: float = 1.0
    key: Hashable = None
    priority: int = 0
    large: bool = False
    tag: float = 0.0
    brief: bool = False
    door: str = "python"
    settled: bool = False
    taken: int = 0
    overtaken: int = 0
    partial: Any = None
    trace: Any = None
    outside: bool = False  # waits for room in the line

    def part(self, output: Any, dispatch: Dispatch) -> None:
        """Refuse it: a call has one answer."""
        raise Unsupported("a call has one answer, a streaming model gives several")


class Call(InProcess, asyncio.Future[Any]):
    """What `Service.infer` returns: awaits to the answer or raises the error.

    It works with await, gather, wait_for, as_completed, asyncio.timeout, create_task and TaskGroup. Only asyncio.wait,
    which refuses all that create_task accepts, wants it wrapped: `asyncio.wait([asyncio.create_task(call)])`. Cancelling
    it (or a task that awaits it) takes the request out of the line, or drops its answer if it is running; no neighbour
    notices.
    """

    # What each call sets has a slot, so that an ordinary one needs no dictionary.
    __slots__ = (
        "_withdraw",
        "arrival",
        "deadline",
        "outside",
        "overtaken",
        "partial",
        "payload",
        "settled",
        "taken",
        "timeout",
    )

    _generator: Generator[Any, None, Any] | None = None

    def __init__(
        self, payload: Any, arrival: float, timeout: float, loop: asyncio.AbstractEventLoop,
        withdraw: Callable[["Call"], None],
    ) -> None:  # fmt: skip
        asyncio.Future.__init__(self, loop=loop)  # super() would cost a third of all this
        self.payload = payload
        self.arrival = arrival
        self.timeout = timeout
        self.deadline = arrival + timeout
        begin(self)
        self.outside = False
        self._withdraw = withdraw

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Resolve with the answer."""
        self.set_result(output)

    def fail(self, error: WeirError) -> None:
        """Raise `error` in whoever awaits."""
        if self.done():
            return
        self.set_exception(for_caller(error))
        if not isinstance(error, ModelError):
            # Whoever left a call alone need not hear that it was too late or refused; of a model's bug they should.
            self._log_traceback = False

    def cancel(self, msg: Any = None) -> bool:
        """Withdraw the request wherever it is; False if it already has its end."""
        if not super().cancel(msg):
            return False
        self._withdraw(self)
        return True

    # With these three, asyncio takes a call for a coroutine, so that create_task and TaskGroup accept it.

    def send(self, value: Any) -> Any:
        """Run until the answer is there: the coroutine protocol."""
        return self._steps().send(value)

    def throw(self, *error: Any) -> Any:
        """Raise in whoever awaits: the coroutine protocol."""
        return self._steps().throw(*error)

    def close(self) -> None:
        """Withdraw the request if it is still under way: the coroutine protocol."""
        self.cancel()

    def _steps(self) -> Generator[Any, None, Any]:
        if self._generator is None:
            self._generator = self.__await__()
        return self._generator


class ListCall(Call):
    """What `Service.infer_many` returns: resolves to the list of answers, or raises the first error in it, unless
    `return_errors`."""

    kind = Kind.ITEMS
    return_errors: bool = False

    def finish(self, output: list[Any], dispatch: Dispatch) -> None:
        """Resolve with the answers, or the first error."""
        error = next((entry for entry in output if isinstance(entry, WeirError)), None)
        if error is not None and not self.return_errors:
            self.fail(error)
        else:
            super().finish(for_callers(output) if error is not None else output, dispatch)


class ThreadCall(InProcess, concurrent.futures.Future[Any]):
    """What `BlockingService.submit` returns: a concurrent.futures.Future that may be cancelled until its end."""

    def __init__(self, payload: Any, arrival: float, timeout: float, withdraw: Callable[["ThreadCall"], None]) -> None:
        super().__init__()
        self.payload = payload
        self.arrival = arrival
        self.timeout = timeout
        self.deadline = arrival + timeout
        self._withdraw = withdraw

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Resolve with the answer."""
        with suppress(concurrent.futures.InvalidStateError):  # the caller has cancelled meanwhile
            self.set_result(output)

    def fail(self, error: WeirError) -> None:
        """Raise `error` in whoever waits."""
        with suppress(concurrent.futures.InvalidStateError):  # the caller has cancelled meanwhile
            self.set_exception(for_caller(error))

    def cancel(self) -> bool:
        """Withdraw the request wherever it is; False if it already has its end."""
        before = self.cancelled()
        if not super().cancel():
            return False
        if not before:
            self.set_running_or_notify_cancel()  # or concurrent.futures.wait would not hear of it
            self._withdraw(self)
        return True


def fail_all(error: WeirError) -> None:
    """Fail every ThreadCall that has no end yet, in a process that was forked from the one in which they are under way.

    They are looked for among all objects: nobody keeps a list of them, for that would cost each call, and a fork is rare.
    Objects that a program has frozen before it forks, as one should, are not among those that the collector tells of.
    """
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    found = gc.get_objects()
    if frozen:
        gc.freeze()
    for each in found:
        if isinstance(each, ThreadCall) and not each.done():
            each._condition = threading.Condition()  # a thread that is not here may have held the old one
            refuse(each, error)


def for_callers(answers: list[Any]) -> list[Any]:
    """Return answers, some of which are errors, as code in this process is to have them."""
    return [for_caller(answer) if isinstance(answer, WeirError) else answer for answer in answers]
