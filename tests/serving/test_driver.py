import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import FakeRequest, RecordingObserver
from tests.rings import subcases
from tests.serving.kit import Rig, Square, request, serving, squares
from tests.serving.models import Total
from tests.waiting import turns

from weir import (
    Conflict,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Model,
    ModelError,
    ModelNotReady,
    Overloaded,
    Service,
)
from weir.batching.queue import SLACK
from weir.messages import Batch, Dispatch, Events, Form, Kind, Reason, Timing
from weir.policy.decision import Decision, Observation
from weir.serving.calls import ThreadCall
from weir.serving.driver import BackpressureQueue
from weir.testing import FakeExecutor


async def test_all_requests_of_one_turn_share_a_batch() -> None:
    async with serving() as rig:
        requests = [request(rig.service, item) for item in range(10)]
        await turns()
        assert [each.output for each in requests] == squares(list(range(10)))
        assert rig.executor.sizes == [10]
        assert requests[0].dispatch is requests[9].dispatch


async def test_a_batch_knows_how_many_more_may_be_sent_now() -> None:
    async with serving(None, workers=2, max_batch_size=2) as rig:
        sent = rig.executor.batches
        request(rig.service, 0)
        await turns()
        assert [batch.others for _, batch in sent] == [0]
        rig.executor.respond_next(squares)
        for item in range(5):
            request(rig.service, item)
        await turns()
        assert [(len(batch.payloads), batch.others) for _, batch in sent[1:]] == [(2, 2), (2, 1)]


async def test_the_freed_worker_has_its_next_batch_before_the_answers_go_out() -> None:
    async with serving(None) as rig:
        order: list[str] = []

        class Noting(FakeRequest):
            def finish(self, output: Any, dispatch: Dispatch) -> None:
                order.append(f"answer {output}, batches {len(rig.executor.batches)}")

        rig.service.submit(Noting(1, arrival=rig.service.now()))
        await turns()
        rig.service.submit(Noting(2, arrival=rig.service.now()))
        await turns()
        rig.executor.respond_next(squares)
        assert order == ["answer 1, batches 2"]


async def test_a_wait_of_the_policy_ends_by_the_timer() -> None:
    async with serving(policy="size-or-delay:size=8,delay=5ms") as rig:
        waiting = [request(rig.service, item) for item in range(3)]
        await turns()
        assert rig.executor.sizes == []
        rig.clock.advance(0.005)
        await turns()
        assert rig.executor.sizes == [3]
        assert waiting[0].dispatch is not None
        assert waiting[0].dispatch.reason is Reason.DELAY
        for item in range(8):
            request(rig.service, item)
        await turns()
        assert rig.executor.sizes == [3, 8]


async def test_deadlines_hold_in_line_and_in_compute() -> None:
    async with serving(None) as rig:
        running = request(rig.service, "running", timeout=2.0)
        await turns()
        waiting = request(rig.service, "waiting", timeout=1.0)
        await turns()
        rig.clock.advance(1.0)
        assert isinstance(waiting.error, DeadlineExceeded)
        assert waiting.error.message == "no response within the timeout of 1 s"
        assert running.ends == 0
        assert rig.executor.cancelled == []
        rig.clock.advance(1.0)
        assert isinstance(running.error, DeadlineExceeded)
        assert rig.executor.cancelled == [(0, 1, [0])]  # its worker need not begin it
        rig.executor.respond_next(lambda batch: batch)
        await turns()
        assert (running.ends, waiting.ends) == (1, 1)
        assert rig.executor.payloads == [["running"]]


async def test_when_one_piece_ends_its_request_the_others_are_left_out() -> None:
    async with serving(None, model=Total, workers=2, places=2, max_batch_size=1) as rig:
        divided = request(rig.service, {"x": np.zeros((3, 2), "f4")}, kind=Kind.TENSORS, rows=3)
        await turns()
        (first, batch), *others = rig.executor.batches
        rig.executor.reply(first, Events(batch.batch_id, [ModelError("no")], timing=Timing(0.0, 0.0, 0.0)))
        assert divided.ends == 1
        assert rig.executor.cancelled == [(worker, other.batch_id, [0]) for worker, other in others]
        assert len(others) == 2


async def test_an_answer_that_comes_after_its_deadline_is_not_given() -> None:
    """A busy loop hears of the answer before it looks at its timers."""
    async with serving(None) as rig:
        late, patient = request(rig.service, "late", timeout=1.0), request(rig.service, "patient", timeout=9.0)
        await turns()
        rig.clock._now += 1.5  # no timer has fired
        rig.executor.respond_next(lambda batch: batch)
        await turns()
        assert isinstance(late.error, DeadlineExceeded)
        assert (late.ends, patient.output) == (1, "patient")


async def test_what_a_dispatch_leaves_out_has_its_end_in_the_same_turn() -> None:
    """Otherwise a caller that cancels it meanwhile hears of its end a second time: it is settled, and nobody knows."""
    async with serving(None, max_batch_size=8) as rig:

        def answer_after(seconds: float) -> None:
            rig.clock._now += seconds  # no timer has fired
            rig.executor.respond_next(squares)

        for _ in range(8):  # a batch takes half a second
            request(rig.service, 1)
            await turns()
            answer_after(0.5)
        request(rig.service, 1)
        await turns()
        late, fine = request(rig.service, "late", timeout=0.9), request(rig.service, 2, timeout=9.0)
        await turns()
        answer_after(0.6)
        assert rig.executor.payloads[-1] == [2]
        assert isinstance(late.error, DeadlineExceeded)
        assert late.ends == 1
        await rig.answer_all()
        assert (late.ends, fine.output) == (1, 4)


async def test_a_late_request_is_refused_and_stays_with_the_frontend() -> None:
    async with serving() as rig:
        late = FakeRequest(1, arrival=rig.service.now() - 5.0, timeout=1.0)
        with pytest.raises(DeadlineExceeded):
            rig.service.submit(late)
        assert late.ends == 0
        assert [type(error) for _, _, error in rig.heard.refusals] == [DeadlineExceeded]


async def test_calls_in_process_wait_outside_in_their_order() -> None:
    async with serving(None, max_batch_size=2, max_queue_size=2) as rig:
        calls = [rig.service.infer(item) for item in range(7)]
        await turns()
        assert rig.service.state()["waiting_outside"] == 3
        with pytest.raises(Overloaded):
            await rig.service.infer("impatient", backpressure=False)
        with pytest.raises(Overloaded):
            request(rig.service, "from a frontend")
        await rig.answer_all()
        assert await asyncio.gather(*calls) == squares(list(range(7)))
        assert rig.executor.payloads == [[0, 1], [2, 3], [4, 5], [6]]


async def test_without_backpressure_calls_are_refused() -> None:
    async with serving(None, max_queue_size=1, backpressure=False) as rig:
        calls = [rig.service.infer(item) for item in range(3)]
        patient = rig.service.infer("patient", backpressure=True)
        await turns()
        rig.executor.respond_next(squares)
        assert await calls[0] == 0
        for refused in calls[1:]:
            with pytest.raises(Overloaded):
                await refused
        rig.executor.respond_next(lambda batch: batch)
        assert await patient == "patient"


async def test_deadlines_and_cancellation_hold_outside_too() -> None:
    async with serving(None, max_queue_size=1) as rig:
        rig.service.infer("running")
        await turns()
        rig.service.infer("in line")
        expires, leaves, stays = (
            rig.service.infer(name, timeout=seconds) for name, seconds in (("a", 1.0), ("b", 5.0), ("c", 5.0))
        )
        rig.clock.advance(1.0)
        with pytest.raises(DeadlineExceeded):
            await expires
        leaves.cancel()
        for _ in range(3):
            rig.executor.respond_next(lambda batch: batch)
            await turns()
        assert await stays == "c"
        assert rig.executor.payloads == [["running"], ["in line"], ["c"]]


async def test_a_batch_that_cannot_be_handed_over_fails_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    class Clumsy(FakeExecutor):
        def run(self, worker: int, batch: Batch) -> None:
            if batch.payloads == ["drop"]:
                raise OSError("broken pipe")
            super().run(worker, batch)

    async with Service(Square, executor=Clumsy(squares)) as service:
        with pytest.raises(ModelError, match="the batch could not be run: OSError"):
            await service.infer("drop")
        assert await service.infer(3) == 9


async def test_a_lost_worker_is_answered_for_by_another() -> None:
    async with serving(None, workers=2) as rig:
        calls = [rig.service.infer(item) for item in range(4)]
        await turns()
        rig.executor.lose(0)
        while rig.executor.pending:
            rig.executor.respond_next(squares)
        assert await asyncio.gather(*calls) == [0, 1, 4, 9]
        assert rig.executor.payloads == [[0, 1, 2, 3], [0, 1], [2, 3]]
        assert rig.heard.worker_changes[2] == (0, "lost", "killed by the test")
        assert rig.service.state()["batches"]["retry"] == 2


async def test_events_of_a_batch_that_is_not_running_are_dropped() -> None:
    async with serving(None) as rig:
        call = rig.service.infer(1)
        await turns()
        rig.executor.lose(0)
        rig.executor.listener.received(0, Events(1, ["late"], timing=Timing(0.0, 0.0, 0.0)))
        rig.executor.revive(0)
        rig.executor.respond_next(squares)
        assert await call == 1


async def test_the_observers_hear_of_each_error_of_the_model_once() -> None:
    bad = [ModelError(f"bad {number}") for number in range(3)]
    async with serving(lambda batch: [bad[x] if x < 3 else x for x in batch]) as rig:
        for item, expected in ((0, bad[0]), (9, 9)):
            with suppress(ModelError):
                assert await rig.service.infer(item) == expected
        assert await rig.service.infer_many([1, 5, 2], return_errors=True) == [bad[1], 5, bad[2]]
        with pytest.raises(ModelError):
            await rig.service.infer_many([7, 0])  # that one has been told
        failures = [error for model, errors in rig.heard.failures for error in errors if model == "square"]
        assert failures == bad


@pytest.mark.parametrize("kind", [Kind.ITEM, Kind.ITEMS])  # given to a whole batch at once, and one by one
async def test_a_response_that_is_refused_is_counted_as_its_error(kind: Kind) -> None:
    class Refusing(FakeRequest):
        def finish(self, output: Any, dispatch: Dispatch) -> None:
            dispatch.refuse(self, ModelError("no JSON") if output in (4, [4]) else Overloaded("no room"))

    async with serving(None, policy="full:4") as rig:
        made = [(FakeRequest, 1), (Refusing, 2), (Refusing, 3), (FakeRequest, 4)]
        for of, item in made:
            payload = item if kind is Kind.ITEM else [item]
            rig.service.submit(of(payload, kind=kind, arrival=rig.service.now()))
        await turns()
        rig.executor.respond_next(squares)
        assert rig.heard.kinds == {"": 2, "ModelError": 1, "Overloaded": 1}
        assert [[error.message for error in errors] for _, errors in rig.heard.failures] == [["no JSON"]]


async def test_no_worker_left_fails_all_and_says_why() -> None:
    async with serving(None, max_queue_size=2) as rig:
        calls = [rig.service.infer(item) for item in range(2)]
        await turns()
        calls += [rig.service.infer(item) for item in range(5)]
        rig.executor.end("load failed 5 times")
        for call in calls:
            with pytest.raises(ModelNotReady, match="'square' is not ready: load failed 5 times"):
                await call
        assert not rig.service.ready
        assert rig.service.not_ready_reason == "load failed 5 times"
        assert rig.heard.worker_changes[-1] == (0, "failed", "load failed 5 times")
        with pytest.raises(ModelNotReady):
            await rig.service.infer(1)


async def test_a_worker_that_can_be_started_after_all_takes_requests_again() -> None:
    async with serving(workers=2) as rig:
        assert rig.service.failed == ""
        for _ in range(2):
            for worker in range(2):
                rig.executor.lose(worker)
            rig.executor.end("load failed 5 times")
            assert rig.service.failed == rig.service.not_ready_reason == "load failed 5 times"
            rig.executor.revive(1)
            assert (rig.service.failed, rig.service.ready) == ("", True)
            assert await rig.service.infer(3) == 9
        rig.executor.end("load failed 5 times")
        await rig.service.stop()
        assert (rig.service.failed, rig.service.not_ready_reason) == ("", "stopped")


async def test_a_policy_that_raises_is_logged_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def decide(self, seen: Any) -> Any:
            raise ZeroDivisionError("a bug of the policy")

    with caplog.at_level(logging.ERROR, "weir"):
        async with serving(policy=Broken()) as rig:
            assert await rig.service.infer(3) == 9
    assert "the policy of model 'square' failed" in caplog.text
    assert "a bug of the policy" in caplog.text


async def test_a_frontend_that_fails_to_deliver_harms_no_neighbour(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeRequest):
        def finish(self, output: Any, dispatch: Dispatch) -> None:
            raise RuntimeError("the socket is on fire")

        def fail(self, error: Exception) -> None:
            raise RuntimeError("the socket is on fire")

    with caplog.at_level(logging.ERROR, "weir"):
        async with serving(lambda batch: [ModelError("bad") if x == "bad" else x for x in batch]) as rig:
            for payload in ("good", "bad"):
                rig.service.submit(Broken(payload, arrival=rig.service.now(), frontend="odd"))
            neighbour, other = request(rig.service, "bad"), request(rig.service, "good")
            await turns()
            assert isinstance(neighbour.error, ModelError)
            assert other.output == "good"
            assert rig.heard.ends == 4
    assert caplog.text.count("frontend 'odd' could not deliver a response") == 2


async def test_what_waited_outside_for_nothing_is_refused_when_its_turn_comes() -> None:
    async with serving(None, model=Sized, max_batch_size=4, max_queue_size=1) as rig:
        calls = [rig.service.infer("a" * rows) for rows in (1, 1, 9, 1)]
        await turns()
        for _ in range(3):
            rig.executor.respond_next(lambda batch: batch)
            await turns()
        with pytest.raises(InvalidRequest):
            await calls[2]
        assert await calls[3] == "a"


class Sized(Model):
    def predict(self, batch: list[str]) -> list[str]:
        return batch

    @classmethod
    def measure(cls, item: Any) -> Any:
        return len(item)


# driver.py: how it stops, and what observers hear of it.


async def test_draining_refuses_new_work_and_finishes_what_was_accepted() -> None:
    async with serving(None, max_batch_size=2, max_queue_size=2) as rig:
        accepted = [rig.service.infer(item) for item in range(7)]
        await turns()
        stopping = asyncio.ensure_future(rig.service.stop(10.0))
        await turns()
        assert rig.service.draining
        assert rig.service.not_ready_reason == "draining"
        with pytest.raises(Draining):
            await rig.service.infer("new")
        while rig.executor.pending:
            assert not stopping.done()
            rig.executor.respond_next(squares)
            await turns()
        await stopping
        assert await asyncio.gather(*accepted) == squares(list(range(7)))
        assert rig.executor.stopped


async def test_draining_ends_a_wait_of_the_policy() -> None:
    async with serving(policy="full") as rig:
        call = rig.service.infer(3)
        await turns()
        assert rig.executor.sizes == []
        await rig.service.stop(10.0)
        assert await call == 9


async def test_what_is_unfinished_when_draining_ends_fails() -> None:
    async with serving(None, max_queue_size=1) as rig:
        calls = [rig.service.infer("running")]
        await turns()
        calls += [rig.service.infer("in line"), rig.service.infer("outside")]
        stopping = asyncio.ensure_future(rig.service.stop(5.0))
        await turns()
        rig.clock.advance(4.9)
        await turns()
        assert not stopping.done()
        rig.clock.advance(0.2)
        await stopping
        for call in calls:
            with pytest.raises(Draining, match="stopped before the response was ready"):
                await call


async def test_a_second_stop_in_a_hurry_ends_the_first() -> None:
    async with serving(None) as rig:
        call = rig.service.infer("running")
        await turns()
        patient = asyncio.ensure_future(rig.service.stop(100.0))
        await turns()
        await rig.service.stop(0.0)
        await patient
        with pytest.raises(Draining):
            await call


async def test_a_cancelled_stop_still_ends_the_workers() -> None:
    async with serving(None) as rig:
        rig.service.infer("running")
        await turns()
        stopping = asyncio.ensure_future(rig.service.stop(100.0))
        await turns()
        stopping.cancel()
        await asyncio.wait([stopping])
        assert rig.executor.stopped


async def test_an_observer_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(RecordingObserver):
        def answered(self, model: str, requests: Sequence[Any], error: Any, now: float) -> None:
            raise KeyError("a bug of the observer")

    with caplog.at_level(logging.ERROR, "weir"):
        sound = RecordingObserver()
        async with Service(Square, executor=FakeExecutor(squares), observers=[Broken(), sound]) as service:
            assert await asyncio.gather(*map(service.infer, range(3))) == [0, 1, 4]
        assert sound.ends == 3
    assert "observer 'Broken' raised at 'answered'" in caplog.text


async def test_stopping_while_loading_does_not_end_ready() -> None:
    class Slow(FakeExecutor):
        async def start(self, listener: Any) -> None:
            await turns()
            await super().start(listener)

    service = Service(Square, executor=Slow(squares))
    starting = asyncio.ensure_future(service.start())
    await asyncio.sleep(0)
    assert service.not_ready_reason == "loading"
    await service.stop()
    await starting
    assert service.not_ready_reason == "stopped"


async def test_a_start_that_is_cancelled_has_stopped_the_service() -> None:
    class Slow(FakeExecutor):
        async def start(self, listener: Any) -> None:
            await asyncio.Event().wait()

    service = Service(Square, executor=Slow(squares))
    starting = asyncio.ensure_future(service.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    assert service.not_ready_reason == "stopped"


# Workers that join and leave while a service runs.


async def running(rig: Rig, item: int) -> FakeRequest:
    """Return a request that is a batch of its own."""
    made = request(rig.service, item)
    await turns()
    return made


async def test_a_worker_that_joins_gets_batches() -> None:
    async with serving(None) as rig:
        request(rig.service, 1)
        await turns()
        request(rig.service, 2)
        await turns()
        assert len(rig.executor.pending) == 1
        await rig.service.add_worker()
        assert [worker for worker, _ in rig.executor.pending] == [0, 1]
        assert rig.service.workers.workers == len(rig.service.state()["workers"]) == 2
        assert rig.heard.worker_changes[-1] == (1, "ready", "")


async def test_a_worker_that_leaves_finishes_what_it_has() -> None:
    async with serving(None) as rig:
        await rig.service.add_worker()
        requests = [await running(rig, item) for item in (1, 2)]
        leaving = asyncio.ensure_future(rig.service.remove_worker())
        last = request(rig.service, 3)
        await turns()
        assert [worker for worker, _ in rig.executor.pending] == [0, 1] and not leaving.done()
        rig.executor.pending.reverse()
        rig.executor.respond_next(squares)
        await leaving
        assert rig.heard.worker_changes[-1] == (1, "stopped", "")
        assert (rig.service.workers.workers, len(rig.executor.states())) == (1, 1)
        rig.executor.respond_next(squares)
        rig.executor.respond_next(squares)
        assert [each.output for each in (*requests, last)] == [1, 4, 9]


async def test_what_a_leaving_worker_does_not_finish_runs_again_elsewhere() -> None:
    async with serving(None, drain_timeout=5.0) as rig:
        await rig.service.add_worker()
        requests = [await running(rig, item) for item in (1, 2)]
        leaving = asyncio.ensure_future(rig.service.remove_worker())
        await turns()
        rig.executor.respond_next(squares)
        rig.clock.advance(5.0)
        await leaving
        assert [worker for worker, _ in rig.executor.pending] == [1, 0]
        rig.executor.pending.pop(0)
        rig.executor.respond_next(squares)
        assert [each.output for each in requests] == [1, 4]


async def test_a_leaving_worker_that_dies_does_not_come_back() -> None:
    async with serving(None) as rig:
        await rig.service.add_worker()
        requests = [await running(rig, item) for item in (1, 2)]
        leaving = asyncio.ensure_future(rig.service.remove_worker())
        await turns()
        rig.executor.lose(1)
        rig.executor.revive(1)
        await leaving
        assert [worker for worker, _ in rig.executor.pending] == [0]
        while rig.executor.pending:
            rig.executor.respond_next(squares)
        assert [each.output for each in requests] == [1, 4]


async def test_what_cannot_be_is_refused() -> None:
    async with serving() as rig:
        with pytest.raises(Conflict, match="has one worker left"):
            await rig.service.remove_worker()
    for change in (rig.service.add_worker, rig.service.remove_worker):
        with pytest.raises(ModelNotReady, match="'square' is not ready: stopped"):
            await change()
    inline = Service(Square, executor="inline")
    async with inline:
        with pytest.raises(Conflict, match="InlineExecutor has a fixed number of workers: none can be added"):
            await inline.add_worker()
        with pytest.raises(Conflict, match="none can be removed"):
            await inline.executor.remove_worker()


class Counted(Model):
    """Its third instance does not load."""

    def load(self) -> None:
        if self.worker_index == 2:
            raise ValueError("no room for a third")

    def predict(self, batch: list[Any]) -> list[Any]:
        return [self.worker_index for _ in batch]


@subcases("executor", ["process", "thread"])
async def test_real_workers_join_and_leave(executor: str) -> None:
    watch = RecordingObserver()
    async with Service(Counted, executor=executor, observers=[watch], max_batch_size=1) as service:
        await service.add_worker()
        assert await service.infer_many([0] * 20, timeout=30) != []
        with pytest.raises(ModelError, match="no room for a third"):
            await service.add_worker()
        assert [state.state for state in service.executor.states()] == ["ready", "ready"]
        assert set(await service.infer_many([0] * 20)) <= {0, 1}
        await service.remove_worker()
        assert [state.state for state in service.executor.states()] == ["ready"]
        assert set(await service.infer_many([0] * 20)) == {0}
        await service.add_worker()
        assert len(service.executor.states()) == 2
    assert {change[:2] for change in watch.worker_changes} == {(0, "ready"), (1, "ready"), (1, "stopped")}


async def test_hooks_follow_the_workers() -> None:
    class Hooked(Service):
        async def before_batch(self, batch: list[Any]) -> list[Any]:
            return [item + 1 for item in batch]

    executor = FakeExecutor(squares)
    async with Hooked(Square, executor=executor, max_batch_size=1) as service:
        await service.add_worker()
        assert await service.infer_many([1, 2, 3]) == [4, 9, 16]
        await service.remove_worker()
        assert await service.infer_many([1, 2, 3]) == [4, 9, 16]
        assert len(executor.states()) == 1


# A service whose policy keeps the line short, or remembers what it saw.


class Short:
    """Greedy, with two rows waiting at most."""

    def __init__(self) -> None:
        self.max_waiting = 2
        self.decisions = 0

    def decide(self, seen: Observation) -> Decision:
        """Dispatch one."""
        self.decisions += 1
        return Decision(1)

    def fresh(self) -> "Short":
        """Return one that was never asked."""
        return Short()


async def test_each_service_has_a_memory_of_its_own() -> None:
    policy = Short()
    async with serving(policy=policy) as one, serving(policy=policy) as other:
        assert await one.service.infer(3) == 9
        mine, others = one.service.policy, other.service.policy
        assert isinstance(mine, Short)
        assert isinstance(others, Short)
        assert (policy.decisions, mine.decisions, others.decisions) == (0, 1, 0)


def call(name: Any = None, *, arrival: float = 0.0, timeout: float = 10.0, rows: int = 1) -> ThreadCall:
    return ThreadCall(Form(timeout, rows=rows), name, arrival, lambda _: None)


def entered(outside: BackpressureQueue, room: int = 1000) -> list[Any]:
    found = []
    while (request := outside.pop(lambda rows, cost, bulk: rows <= room)) is not None:
        found.append(request.payload)
    return found


def test_nobody_passes_one_that_has_no_room() -> None:
    outside = BackpressureQueue()
    outside.append(call("large", rows=5))
    outside.append(call("small"))
    assert outside.pop(lambda rows, cost, bulk: rows <= 4) is None
    assert entered(outside) == ["large", "small"]


def test_clearing_settles_and_returns_all() -> None:
    outside = BackpressureQueue()
    calls = [call(index) for index in range(3)]
    for each in calls:
        outside.append(each)
    outside.drop(calls[1])
    assert [left.payload for left in outside.clear()] == [0, 2]
    assert all(each.settled for each in calls)
    assert not outside.waiting
    outside.append(call("later"))
    assert entered(outside) == ["later"]


def test_those_who_left_from_the_middle_do_not_pile_up() -> None:
    outside = BackpressureQueue()
    outside.append(call("head"))
    for _ in range(10):
        calls = [call() for _ in range(1000)]
        for each in calls:
            outside.append(each)
        for each in calls:
            outside.drop(each)
    assert len(outside.waiting) == 1
    outside.append(call("last"))
    assert len(outside._deadlines._heap) <= 2 * 2 + SLACK
    assert entered(outside) == ["head", "last"]


@given(st.lists(st.tuples(st.sampled_from(["come", "enter", "leave", "pass"]), st.integers(0, 5))))
def test_each_request_leaves_exactly_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    outside, now = BackpressureQueue(), 0.0
    inside: list[ThreadCall] = []
    waiting: list[ThreadCall] = []
    for step, number in steps:
        if step == "come":
            waiting.append(call(arrival=now, timeout=float(number + 1)))
            outside.append(waiting[-1])
        elif step == "enter":
            request = outside.pop(lambda rows, cost, bulk: rows <= 9)
            assert request is (waiting[0] if waiting else None)
            inside += waiting[:1]
            del waiting[:1]
        elif step == "leave" and number < len(waiting):
            outside.drop(waiting.pop(number))
        elif step == "pass":
            now += number
            late = [each for each in waiting if each.deadline <= now]
            assert set(map(id, outside.expire(now))) == set(map(id, late))
            waiting = [each for each in waiting if each.deadline > now]
        assert len(outside) == len(waiting)
        assert bool(outside.waiting) == bool(waiting)
    assert not any(each.settled for each in inside)
