"""Measures a running model, and gives its policy new tables while it serves.

Here is what solves the tables, next to a server: a model on a worker process of its own. The first request starts the
process, which then stays. Starting one is what disturbs a server most: a new process loads its libraries, and frees its
memory at the end, and for both the kernel uses CPUs for milliseconds, whatever its priority.
"""

import asyncio
import os
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from weir.errors import ModelError, SettingsError, WeirError
from weir.messages import OBJECT, Batch, Events
from weir.metrics import MetricReport
from weir.model import Model
from weir.workers.process.pool import ProcessPool
from weir.workers.settings import WorkerSettings
from weir.workers.timer import resolve

if TYPE_CHECKING:
    from weir.policy.cost import LatencySLO, Prices, Profile
    from weir.policy.solve.bank import Bank
    from weir.policy.solve.device import DeviceLoad, DeviceTable
    from weir.policy.solve.uneven import UnevenBank, WorkerKind

NAME = "the solving process"
NICENESS = 10  # of the solving process, added to the server's
DROPPED_LIMIT = 2.0  # seconds; a bank for one worker takes less, so it is solved sooner than a new process starts


T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Solvable(Protocol[T_co]):
    """A request to the solving process."""

    def solve(self) -> T_co:
        """Return what is wanted. Called in the solving process. Raises SettingsError with the reason if there is none."""


class SolveRequest(NamedTuple):
    """Says what a bank is solved for."""

    profile: "Profile"
    prices: "Prices"
    workers: int
    objective: "LatencySLO | None"

    def solve(self) -> "Bank":
        """See Solvable."""
        from weir.simulation.banks import make_bank

        objective = None if self.objective is None else self.objective.as_served()
        return make_bank(self.profile, self.prices, workers=self.workers, objective=objective)


class UnevenRequest(NamedTuple):
    """Says what the tables of workers of two kinds are solved for: the faster kind first."""

    kinds: "tuple[WorkerKind, WorkerKind]"
    prices: "Prices"

    @property
    def workers(self) -> int:
        """The number of workers of both kinds."""
        return sum(each.workers for each in self.kinds)

    def solve(self) -> "UnevenBank":
        """See Solvable."""
        from weir.policy.solve.uneven import solve_uneven

        return solve_uneven(self.kinds, self.prices)


class DeviceRequest(NamedTuple):
    """Says what one order of models on a device is solved for."""

    loads: "Sequence[DeviceLoad]"
    batches: int  # at once

    def solve(self) -> "list[DeviceTable]":
        """See Solvable."""
        from weir.policy.solve.device import solve_device

        return solve_device(self.loads, self.batches)


class Solver(Model):
    """Runs in the solving process. It responds to each request with what is solved for it, or with a text that says why there is none."""

    def __init__(self, niceness: int = NICENESS) -> None:
        self._niceness = niceness

    def load(self) -> None:
        """Lower the priority below that of the server and its workers, and import the solver."""
        os.nice(self._niceness)
        import weir.simulation.banks  # noqa: F401 - takes long

    def predict(self, batch: list[Any]) -> list[Any]:
        """Solve each request."""
        return [self._solve(request) for request in batch]

    def _solve(self, request: Solvable[Any]) -> Any:
        try:
            return request.solve()
        except SettingsError as error:
            return error.message


class SolvingProcess:
    """Solves one request after another, on one event loop, until `close`.

    `niceness` is added to that of its process, so that it yields CPUs to the server.
    """

    def __init__(self, niceness: int = NICENESS) -> None:
        self._niceness = niceness
        self._pool: ProcessPool | None = None
        self._turn = asyncio.Lock()
        self._ids = count(1)
        self._response: asyncio.Future[Any] | None = None  # to the last request, even if its caller has left

    async def solve(self, request: Solvable[T], limit: float) -> T:
        """Return what `request` describes.

        Raises SettingsError with the reason if there is none, ModelError when the process ends or cannot be started,
        and TimeoutError after `limit` seconds. A request whose caller was cancelled is solved to its end; if the next
        request has waited for that for DROPPED_LIMIT seconds, the process is ended and a new one is started.
        """
        try:
            async with asyncio.timeout(limit), self._turn:
                solved: T = await self._solved(request)
        except asyncio.CancelledError:
            raise
        except (WeirError, OSError) as error:  # also a TimeoutError
            await self.close()
            if isinstance(error, WeirError):
                raise ModelError(error.message) from error
            raise
        if isinstance(solved, str):
            raise SettingsError(solved)
        return solved

    async def close(self) -> None:
        """End the process, if there is one, and wait until it has ended. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            self._end(ModelError(f"{NAME} was ended"))
            await pool.stop()

    async def _solved(self, request: Solvable[Any]) -> Any:
        if self._response is not None and not self._response.done():
            await asyncio.wait([self._response], timeout=DROPPED_LIMIT)
            if not self._response.done():
                await self.close()
        if self._pool is None:
            settings = WorkerSettings(threads=1, spin=0.0, arena_bytes=0, retry_in_halves=False)
            params = {"niceness": self._niceness}
            pool = ProcessPool(Solver, params, settings, name=NAME, max_batch_size=1, stop_grace=0.0)
            await pool.start(self)  # ends the process when it fails or is cancelled
            self._pool = pool
        self._response = asyncio.get_running_loop().create_future()
        self._pool.run(0, Batch(next(self._ids), [request], OBJECT, OBJECT))
        await asyncio.wait([self._response])
        return self._response.result()

    # Events of the pool (Listener).

    def worker_ready(self, worker: int, places: int, *, bulk: bool = False) -> None:
        """Do nothing: the next request starts when it is made."""

    def worker_lost(self, worker: int, reason: str) -> None:
        """Fail the present request."""
        self._end(ModelError(f"{NAME} ended: {reason}"))

    def worker_leaves(self, worker: int) -> None:
        """Do nothing: processes of this machine do not leave."""

    def measured(self, worker: int, reports: Sequence[MetricReport]) -> None:
        """Do nothing: the solver has no metrics of its own."""

    def unavailable(self, reason: str) -> None:
        """Fail the present request."""
        self._end(ModelError(f"{NAME} cannot be started: {reason}"))

    def received(self, worker: int, events: Events) -> None:
        """Take the response."""
        self._end(events.outputs[0])

    def _end(self, end: Any) -> None:
        if self._response is not None:
            resolve(self._response, end)
