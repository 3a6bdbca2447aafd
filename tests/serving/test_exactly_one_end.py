"""Whatever happens, in whatever order: each call has exactly one end, and an answer is never another's."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import FakeRequest
from tests.serving.kit import Rig, serving, squares
from tests.waiting import turns
from tests.workers.models import Echo

from weir import ModelError, Service
from weir.errors import WeirError
from weir.testing import FakeExecutor

NAMES = "call call call impatient list request cancel answer answer fail lose revive pass turn turn"  # the more, the likelier
STEPS = st.lists(st.tuples(st.sampled_from(NAMES.split()), st.integers(0, 9)), max_size=60)


class Hooked(Service):
    async def before_batch(self, batch: list[Any]) -> list[Any]:
        await asyncio.sleep(0)
        return batch

    async def after_batch(self, results: list[Any]) -> list[Any]:
        await asyncio.sleep(0)
        return results


class Counted(FakeRequest):
    """A frontend's request; `cancelled` when its peer left."""

    cancelled = False


def bad_every_other(batch: list[Any]) -> list[Any]:
    return [ModelError(f"bad {x}") if x % 2 else x * x for x in batch]


class Script:
    """Does what the steps say, and keeps the books."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.calls: list[tuple[Any, asyncio.Future[Any]]] = []
        self.requests: list[Counted] = []
        self.refused = 0
        self.lost: set[int] = set()
        self.next_item = 0

    def item(self) -> int:
        self.next_item += 1
        return self.next_item

    async def step(self, name: str, number: int) -> None:
        rig, executor = self.rig, self.rig.executor
        timeout = float(number % 3 + 1)
        if name in ("call", "impatient"):
            item, patient = self.item(), name == "call"
            self.calls.append(
                (item, rig.service.infer(item, timeout=timeout, priority=number % 2, backpressure=patient))
            )
        elif name == "list":
            items = [self.item() for _ in range(number + 1)]
            self.calls.append((items, rig.service.infer_many(items, timeout=timeout, return_errors=True)))
        elif name == "request":
            self.submit(timeout)
        elif name == "cancel" and self.calls:
            self.calls[number % len(self.calls)][1].cancel()
            if self.requests:
                request = self.requests[number % len(self.requests)]
                request.cancelled = request.cancelled or not request.ends
                rig.service.cancel(request)
        elif name in ("answer", "fail") and executor.pending:
            executor.respond_next(squares if name == "answer" else bad_every_other)
        elif name == "lose" and number % 2 not in self.lost:
            self.lost.add(number % 2)
            executor.lose(number % 2)
        elif name == "revive" and self.lost:
            executor.revive(self.lost.pop())
        elif name == "pass":
            rig.clock.advance(number / 4)
        elif name == "turn":
            await turns(4)

    def submit(self, timeout: float) -> None:
        request = Counted(self.item(), arrival=self.rig.service.now(), timeout=timeout)
        try:
            self.rig.service.submit(request)
        except WeirError:
            self.refused += 1
        else:
            self.requests.append(request)

    def check(self) -> None:
        for payload, call in self.calls:
            assert call.done()
            if call.cancelled():
                continue
            error = call.exception()
            assert error is None or isinstance(error, WeirError)
            if error is None:
                self.check_answer(payload, call.result())
        for request in self.requests:
            assert request.ends == (0 if request.cancelled else 1)
            if request.ends and request.error is None:
                assert request.output == request.payload**2
        observed = Counter(id(request) for requests, _, _ in self.rig.heard.responses for request in requests)
        assert set(observed.values()) <= {1}
        assert len(observed) + len(self.rig.heard.refusals) == len(self.calls) + len(self.requests) + self.refused

    def check_answer(self, payload: Any, answer: Any) -> None:
        if not isinstance(payload, list):
            assert answer == payload**2
            return
        assert len(answer) == len(payload)
        for item, each in zip(payload, answer, strict=True):
            assert isinstance(each, WeirError) or each == item**2


@pytest.mark.parametrize("kind", [Service, Hooked])
@pytest.mark.parametrize("policy", ["greedy", "size-or-delay:size=3,delay=50ms"])
def test_each_request_has_exactly_one_end(kind: type[Service], policy: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(STEPS, st.booleans())
    def holds(steps: list[tuple[str, int]], drains: bool) -> None:
        async def main() -> None:
            async with serving(
                None, kind=kind, workers=2, max_batch_size=4, max_queue_size=12, policy=policy
            ) as rig:  # fmt: skip
                script = Script(rig)
                for name, number in steps:
                    await script.step(name, number)
                if drains:
                    await drain(script)
                else:
                    await rig.service.stop(0.0)
                script.check()

        asyncio.run(main())

    holds()


async def drain(script: Script) -> None:
    """Stop in peace: with workers that answer, nobody who was accepted is failed by the drain."""
    executor = script.rig.executor
    while script.lost:
        executor.revive(script.lost.pop())
    stopping = asyncio.ensure_future(script.rig.service.stop(1000.0))
    for _ in range(2000):
        await turns(8)
        if stopping.done():
            break
        if executor.pending:
            executor.respond_next(squares)
    assert stopping.done()
    state = script.rig.service.state()
    assert (state["waiting"], state["waiting_outside"], state["in_flight_batches"]) == (0, 0, 0)


async def test_a_payload_is_let_go_when_its_caller_leaves_a_running_batch() -> None:
    executor = FakeExecutor()
    async with Service(Echo, executor=executor, max_batch_size=2) as service:
        gone, stays = [FakeRequest("x" * 10, arrival=service.now()) for _ in range(2)]
        for request in (gone, stays):
            service.submit(request)
        await asyncio.sleep(0)
        assert len(executor.pending) == 1
        service.cancel(gone)
        assert (gone.payload, stays.payload) == (None, "x" * 10)
        executor.respond_next(lambda batch: batch)
        await asyncio.sleep(0)
        assert stays.settled
