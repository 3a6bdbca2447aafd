import asyncio
import logging
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.serving.kit import Square, request, serving, squares, turns
from tests.serving.models import Total

from weir import DeadlineExceeded, InvalidRequest, Model, ModelError, ModelNotReady, Overloaded, Service
from weir.errors import ModelCrashed
from weir.messages import Batch, Dispatch, Events, Kind, Reason, Timing
from weir.testing import FakeExecutor, FakeRequest


async def test_all_requests_of_one_turn_share_a_batch() -> None:
    async with serving() as rig:
        requests = [request(rig.service, item) for item in range(10)]
        await turns()
        assert [each.output for each in requests] == squares(list(range(10)))
        assert rig.executor.sizes == [10]
        assert requests[0].dispatch is requests[9].dispatch


async def test_late_arrivals_join_until_a_worker_is_free() -> None:
    async with serving(None, max_batch_size=4) as rig:
        request(rig.service, 0)
        await turns()
        for item in range(1, 7):
            request(rig.service, item)
            await turns()
        assert rig.executor.payloads == [[0]]
        rig.executor.answer_next(squares)
        assert rig.executor.payloads == [[0], [1, 2, 3, 4]]
        rig.executor.answer_next(squares)
        assert rig.executor.payloads[2] == [5, 6]


async def test_a_batch_knows_how_many_more_may_be_sent_now() -> None:
    async with serving(None, workers=2, max_batch_size=2) as rig:
        sent = rig.executor.batches
        request(rig.service, 0)
        await turns()
        assert [batch.others for _, batch in sent] == [0]
        rig.executor.answer_next(squares)
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
        rig.executor.answer_next(squares)
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
        rig.executor.answer_next(lambda batch: batch)
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
        rig.executor.answer_next(lambda batch: batch)
        await turns()
        assert isinstance(late.error, DeadlineExceeded)
        assert (late.ends, patient.output) == (1, "patient")


async def test_what_a_dispatch_leaves_out_has_its_end_in_the_same_turn() -> None:
    """Otherwise a caller that cancels it meanwhile hears of its end a second time: it is settled, and nobody knows."""
    async with serving(None, max_batch_size=8) as rig:

        def answer_after(seconds: float) -> None:
            rig.clock._now += seconds  # no timer has fired
            rig.executor.answer_next(squares)

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
        rig.executor.answer_next(squares)
        assert await calls[0] == 0
        for refused in calls[1:]:
            with pytest.raises(Overloaded):
                await refused
        rig.executor.answer_next(lambda batch: batch)
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
            rig.executor.answer_next(lambda batch: batch)
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
            rig.executor.answer_next(squares)
        assert await asyncio.gather(*calls) == [0, 1, 4, 9]
        assert rig.executor.payloads == [[0, 1, 2, 3], [0, 1], [2, 3]]
        assert rig.heard.worker_changes[2] == (0, "lost", "killed by the test")
        assert rig.service.state()["batches"]["retry"] == 2


async def test_what_kills_its_worker_alone_twice_has_crashed_the_model() -> None:
    async with serving(None) as rig:
        killer = rig.service.infer("killer")
        await turns()
        for _ in range(2):
            rig.executor.lose(0)
            rig.executor.revive(0)
        with pytest.raises(ModelCrashed, match="killed by the test"):
            await killer


async def test_events_of_a_batch_that_is_not_running_are_dropped() -> None:
    async with serving(None) as rig:
        call = rig.service.infer(1)
        await turns()
        rig.executor.lose(0)
        rig.executor.listener.received(0, Events(1, ["late"], timing=Timing(0.0, 0.0, 0.0)))
        rig.executor.revive(0)
        rig.executor.answer_next(squares)
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
            rig.executor.answer_next(lambda batch: batch)
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
