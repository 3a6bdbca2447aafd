"""What is looked at for each request that a simulated server accepts, from its acceptance to its one end."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tests.simulated.asking import Ask, number_of
from tests.simulated.channels import LATE
from tests.simulated.models import ASKED
from tests.simulated.plans import MODELS

from weir.batching.bulk import is_bulk
from weir.errors import DeadlineExceeded, Draining, WeirError
from weir.messages import Dispatch, Request
from weir.serving.service import Service
from weir.telemetry.recorder import End, SilentObserver

if TYPE_CHECKING:
    from tests.simulated.world import World

_LONGEST_WAIT = 0.1  # seconds for which a solved policy may let requests wait: max_queue_delay
ROUNDING = 1e-9  # seconds: sums of instants differ in the last digit


class CountedService(Service):
    """A service that notes which requests it has accepted."""

    watch: "Watch"

    def submit(self, request: Request, now: float | None = None) -> None:
        """See Service."""
        self.watch.submitting(request)
        try:
            super().submit(request, now)
            self.watch.taken(self, request)
        except BaseException:
            self.watch.not_taken(request)
            raise

    def submit_all(self, requests: Sequence[Request], now: float) -> list[tuple[Request, WeirError]]:
        """See Service."""
        for request in requests:
            self.watch.submitting(request)
        refused = super().submit_all(requests, now)
        for request, _ in refused:
            self.watch.not_taken(request)
        return refused

    def enter(self, call: Any, backpressure: bool | None) -> None:
        """See Service: steps of chains are called so."""
        self.watch.submitting(call)
        super().enter(call, backpressure)
        if call.done() and id(call) in self.watch.open:
            self.watch.not_taken(call)


class Watch(SilentObserver):
    """Sees every accepted request end exactly once, and every batch begin in time."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.open: dict[int, Request] = {}
        self.accepted = 0
        self.ended: Counter[End] = Counter()
        self._gone: dict[int, float] = {}  # when the callers left, by the number of the request

    def gone(self, asks: Iterable[Ask]) -> None:
        """The connection of these has gone before they had their ends."""
        self._gone.update((ask.n, self._world.loop.now) for ask in asks)

    def submitting(self, request: Request) -> None:
        """A request comes to the queue."""
        if id(request) in self.open:
            self._world.broken("a request was submitted twice")
        self.open[id(request)] = request
        self.accepted += 1

    def taken(self, service: Service, request: Request) -> None:
        """The queue has taken it; bulk work has one of its own. Only a request that is larger than the queue may exceed it, alone."""
        batcher, most = service.generation.driver.batcher, service.facts.batching.max_queue_size
        waiting = batcher.waiting_bulk if is_bulk(request) else batcher.waiting_rows - batcher.waiting_bulk
        if waiting > max(most, request.form.rows):
            self._world.broken(f"{waiting} rows wait, and at most {most} may")

    def not_taken(self, request: Request) -> None:
        """The queue has refused it."""
        if self.open.pop(id(request), None) is None:
            self._world.broken("a request was refused after it had ended")
        self.accepted -= 1

    def answered(self, model: str, requests: Sequence[Request], error: WeirError | None, now: float) -> None:
        for request in requests:
            if self.open.pop(id(request), None) is None:
                self._world.broken(f"a request ended twice, or was never accepted: {error!r}")
            due = max(request.deadline, self._world.loop.leapt_at)
            if now > due + LATE and not self._world.front_stood_still(request.arrival):
                self._world.broken(f"a request ended {now - request.deadline:.3f} s after its deadline ({error!r})")
            if error is None and now > request.deadline + ROUNDING:
                self._world.broken(f"a request was answered {now - request.deadline:.3g} s after its deadline")
        if isinstance(error, DeadlineExceeded):
            self._check_expired(model, requests)
        kind = None if error is None else type(error)
        self.ended.update((request.form.frontend, kind) for request in requests)
        if isinstance(error, Draining) and ASKED not in error.message:  # a step names itself before
            self._world.check_cut_off(model.partition(":")[0].partition("/")[0])

    def _check_expired(self, model: str, requests: Sequence[Request]) -> None:
        """A greedy or solved policy lets no request expire before a worker that has nothing to do, of any generation. How long streams take nobody knows."""
        plan, name = self._world.plan, model.partition(":")[0]
        if name in plan.ranges:
            scaling = self._world.scaling_of(name)
            for request in requests:
                if not request.taken:
                    scaling.check_expired(request.arrival, plan.workers[name].start)
        solved = name in plan.solving
        if name not in MODELS or not (solved or plan.services[name]["policy"] == "greedy"):
            return
        longest = plan.workers[name].longest + solved * _LONGEST_WAIT
        idle, since = self._world.idle_since(name), min(request.arrival for request in requests)
        if self._world.loop.leapt_at > -math.inf:
            # Batches that stood still have taken long, and by these times a request may be refused at once that would be in time.
            requests = [request for request in requests if request.deadline <= self._world.loop.now]
        for request in () if self._world.stood_still(since) else requests:
            if not request.taken and idle < request.arrival and request.form.timeout > longest:
                self._world.broken(f"a request expired before an idle worker, after {request.form.timeout:g} s")

    def dispatched(self, model: str, dispatch: Dispatch) -> None:
        if len({request.form.key for request in dispatch.requests}) > 1:
            self._world.broken("requests of different keys are in one batch")
        for request in dispatch.requests:
            if request.deadline < dispatch.at - ROUNDING:
                self._world.broken(f"a request began {dispatch.at - request.deadline:.3g} s after its deadline")
            since = self._gone.get(number_of(request.payload), math.inf) if self._gone else math.inf
            late = dispatch.at > since + LATE and request.arrival < since + 1.0  # a damaged one may have any number
            if late and not self._world.stood_still(since):
                self._world.broken(f"a request began {dispatch.at - since:.3g} s after its caller had left")

    def streamed(self, model: str, requests: Sequence[Request], firsts: Sequence[Request], now: float) -> None:
        if any(id(request) not in self.open for request in requests):
            self._world.broken("a request got a part after its end")
