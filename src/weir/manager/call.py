"""The request of a caller in this process: a future that is its own request."""

import asyncio
from collections.abc import Callable, Generator, Hashable
from typing import Any

from weir.errors import ModelError, WeirError
from weir.messages import OBJECT, Dispatch, Kind


class Call(asyncio.Future[Any]):
    """What `Service.infer` returns: awaits to the answer or raises the error.

    It works with await, gather, wait_for, asyncio.timeout, create_task and TaskGroup. Cancelling it (or a task that
    awaits it) takes the request out of the line, or drops its answer if it is running; no neighbour notices.

    It has all attributes of messages.Request. Those that rarely differ are class attributes, because setting them for
    each call costs more than all the rest of making one.
    """

    kind: Kind = Kind.ITEM
    content_type: str = OBJECT
    accept: str = OBJECT
    rows: int = 1
    cost: float = 1.0
    key: Hashable = None
    priority: int = 0
    large: bool = False
    door: str = "python"
    settled: bool = False
    taken: int = 0
    overtaken: int = 0
    partial: Any = None
    outside: bool = False
    return_errors: bool = False

    def __init__(
        self, payload: Any, arrival: float, timeout: float, loop: asyncio.AbstractEventLoop,
        cancel: Callable[["Call"], None],
    ) -> None:  # fmt: skip
        super().__init__(loop=loop)
        self.payload = payload
        self.arrival = arrival
        self.timeout = timeout
        self.deadline = arrival + timeout
        self._cancel_request = cancel

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        """Resolve with the answer; a list that holds errors raises the first one, unless errors were asked for."""
        if self.done():
            return
        if self.kind is Kind.ITEMS and not self.return_errors:
            error = next((entry for entry in output if isinstance(entry, WeirError)), None)
            if error is not None:
                return self.fail(error)
        self.set_result(output)

    def fail(self, error: WeirError) -> None:
        """Raise `error` in whoever awaits."""
        if self.done():
            return
        self.set_exception(error)
        if not isinstance(error, ModelError):
            # Whoever left a call alone need not hear that it was too late or refused; of a model's bug they should.
            self._log_traceback = False

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the request wherever it is; False if it already has its end."""
        if not super().cancel(msg):
            return False
        self._cancel_request(self)
        return True

    # With these three, asyncio takes a call for a coroutine, so that create_task and TaskGroup accept it.

    def send(self, value: Any) -> Any:
        """Run until the answer is there: the coroutine protocol."""
        return self._steps().send(value)

    def throw(self, *error: Any) -> Any:
        """Raise in whoever awaits: the coroutine protocol."""
        return self._steps().throw(*error)

    def close(self) -> None:
        """Cancel the request if it is still under way: the coroutine protocol."""
        self.cancel()

    def _steps(self) -> Generator[Any, None, Any]:
        if "_generator" not in self.__dict__:
            self._generator = self.__await__()
        return self._generator
