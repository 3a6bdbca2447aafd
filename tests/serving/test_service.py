import asyncio
import gc
import json
import os
import tracemalloc
import weakref
from typing import Any, ClassVar, cast

import numpy
import pytest
from tests.fakes import FakeRequest, RecordingObserver
from tests.rings import subcases
from tests.serving.kit import Square, request, serving, squares
from tests.waiting import turns

import weir
from weir import Draining, ModelNotReady, Service
from weir.errors import Conflict, Overloaded
from weir.messages import JSON, Kind
from weir.serving.driver import Driver
from weir.serving.handle import ModelHealth
from weir.serving.service import Replaced, same
from weir.testing import FakeClock, FakeExecutor


class Texts(weir.Model):
    def predict(self, batch: list[str]) -> list[int]:
        return list(map(len, batch))

    @classmethod
    def measure(cls, item: Any) -> weir.Measure:
        if item == "odd":
            raise weir.InvalidRequest("odd is not served")
        return weir.Measure(rows=len(item), cost=2.0 * len(item), key=item[0])


class Sum(weir.Model):
    inputs = (weir.Tensor("a", "INT64", [-1, 2]), weir.Tensor("b", "INT64", [-1, 2]))
    outputs = (weir.Tensor("sum", "INT64", [-1, 2]),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"sum": batch["a"] + batch["b"]}


def added(entries: list[Any]) -> list[Any]:
    return [{"sum": entry["a"] + entry["b"]} for entry in entries]


def typed(content_types: Any) -> type[weir.Model]:
    """Return a model class with these content types, and no method that reads or writes them."""
    return type("Typed", (Square,), {"content_types": content_types})


@subcases(
    ("arguments", "complaint"),
    [
        ({"model": int}, "must be a subclass of weir.Model"),
        ({"model": Square()}, "must be a subclass of weir.Model, or a function; give the class: Square"),
        ({"model": Square, "name": "my model"}, "name='my model': must be up to 255 .*; 'my-model' would do"),
        ({"model": None}, r"must implement predict\(batch\)"),
        (
            {"model": type("Bare", (Square,), {"predict": lambda self: []})},
            r"^Bare.predict\(self\): must be predict\(self, batch\)",
        ),
        (
            {"model": typed(["image/png"])},
            r"^Typed: content_types=\['image/png'\], must implement decode\(body\), encode",
        ),
        ({"model": typed("image/png")}, "^Typed: content_types='image/png', must be a list of texts"),
        ({"model": typed([b"image/png"])}, r"^Typed: content_types=\[b'image/png'\], must be a list of texts"),
        ({"model": Square, "policy": "greed"}, "policy='greed'"),
        ({"model": Square, "max_batch_sise": 3}, "did you mean max_batch_size"),
        ({"model": Square, "policy": "size-or-delay:size=128,delay=5ms"}, "max_batch_size=64"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(weir.SettingsError, match=complaint):
        weir.Service(**arguments)


async def test_it_starts_once_stops_often_and_starts_again() -> None:
    service: Any = weir.Service(Square, executor=FakeExecutor(squares))
    with pytest.raises(TypeError, match=r"use `async with`, or `with weir.BlockingService\(...\)`"), service:
        pass
    assert not service.ready
    assert service.not_ready_reason == "not started"
    await service.stop()
    for _ in range(2):
        await service.start()
        with pytest.raises(Conflict, match="already running"):
            await service.start()
        assert await service.infer(3) == 9
        await service.stop()
        await service.stop()
        assert service.not_ready_reason == "stopped"
        with pytest.raises(weir.ModelNotReady, match="stopped"):
            await service.infer(3)


async def test_a_failed_start_says_why_afterwards_too() -> None:
    executor = FakeExecutor(squares, start_error=weir.ModelError("no such file: weights.bin"))
    service = weir.Service(Square, executor=executor)
    with pytest.raises(weir.ModelError, match="no such file"):
        await service.start()
    assert service.not_ready_reason == "no such file: weights.bin"
    await service.stop()


async def test_leaving_by_an_exception_does_not_wait_for_answers() -> None:
    executor = FakeExecutor()
    with pytest.raises(ZeroDivisionError):
        async with weir.Service(Square, executor=executor) as service:
            service.infer(3)
            await turns()
            raise ZeroDivisionError
    assert executor.stopped


async def test_a_large_max_batch_size_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        async with serving(max_batch_size=10_000_000) as rig:
            assert await rig.service.infer(3) == 9
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


async def test_infer_many_is_one_request_divided_into_batches() -> None:
    async with serving(max_batch_size=4) as rig:
        assert await rig.service.infer_many(range(10)) == squares(list(range(10)))
        assert rig.executor.sizes == [4, 4, 2]
        assert await rig.service.infer_many([]) == []


async def test_an_express_infer_many_goes_before_calls_in_batches_of_its_own() -> None:
    async with serving(None, max_batch_size=4) as rig:
        waiting = [rig.service.infer(x) for x in range(10)]
        await turns()
        bulk = rig.service.infer_many(range(100, 106), express=True)
        await turns()
        await rig.answer_all()
        assert [len(payloads) for payloads in rig.executor.payloads] == [4, 4, 4, 2, 2]
        assert rig.executor.payloads[1] == [100, 101, 102, 103]
        assert rig.executor.payloads[3] == [104, 105]
        assert await bulk == squares(list(range(100, 106)))
        assert await asyncio.gather(*waiting) == squares(list(range(10)))
        with pytest.raises(weir.InvalidRequest, match="must be hashable"):
            await rig.service.infer_many([1], express=True, key=cast(Any, []))


async def test_calls_wait_outside_while_as_much_is_under_way_as_may_be() -> None:
    async with serving(None, max_batch_size=2, capacity=3) as rig:
        calls = [rig.service.infer(x) for x in range(5)]
        await turns()
        state = rig.service.state()
        assert (state["in_flight"], state["waiting"], state["waiting_outside"]) == (2, 1, 2)
        with pytest.raises(Overloaded):
            await rig.service.infer(9, backpressure=False)
        await rig.answer_all()
        assert await asyncio.gather(*calls) == squares(list(range(5)))


async def test_infer_many_raises_the_first_error_or_returns_all() -> None:
    def picky(batch: list[Any]) -> list[Any]:
        return [weir.ModelError(f"bad {x}") if x % 3 == 2 else x for x in batch]

    async with serving(picky, max_batch_size=4) as rig:
        with pytest.raises(weir.ModelError, match="bad 2"):
            await rig.service.infer_many(range(10))
        answers = await rig.service.infer_many(range(10), return_errors=True)
        assert [x for x in answers if isinstance(x, int)] == [0, 1, 3, 4, 6, 7, 9]
        assert [x.message for x in answers if isinstance(x, weir.ModelError)] == ["bad 2", "bad 5", "bad 8"]


async def test_cancelling_infer_many_takes_it_out_of_the_line() -> None:
    async with serving(None, max_batch_size=4, max_queue_size=8) as rig:

        async def wait(count: int) -> None:
            await rig.service.infer_many(range(count))

        for count in (6, 100):
            waiting = asyncio.create_task(wait(count))
            await turns()
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            state = rig.service.state()
            assert (state["waiting"], state["waiting_outside"]) == (0, 0)


async def test_measure_says_rows_cost_and_key() -> None:
    async with serving(lambda batch: list(map(len, batch)), model=Texts, max_batch_size=4) as rig:
        assert rig.service.facts.needs_measure
        items = ["aa", "bb", "a", "b", "aaa"]
        assert await asyncio.gather(*map(rig.service.infer, items)) == [2, 2, 1, 1, 3]
        assert sorted(map(sorted, rig.executor.payloads)) == [["a", "aa"], ["aaa"], ["b", "bb"]]
        with pytest.raises(weir.InvalidRequest, match="odd is not served"):
            await rig.service.infer("odd")
        with pytest.raises(weir.InvalidRequest, match="cannot measure this item"):
            await rig.service.infer(3)
        with pytest.raises(weir.InvalidRequest):
            await rig.service.infer("aaaaa")  # more rows than a batch may have
        await asyncio.gather(*[rig.service.infer("a", key=key) for key in ("mine", "yours", "mine")])
        assert sorted(rig.executor.sizes[-2:]) == [1, 2]


async def test_tensors_of_equal_shape_share_batches_and_large_ones_are_divided() -> None:
    async with serving(added, model=Sum, max_batch_size=4) as rig:
        one, two = (
            {"a": [[1, 2]], "b": [[3, 4]]},
            {"a": numpy.ones((6, 2), "int64"), "b": numpy.ones((6, 2), "int64")},
        )
        small, large = await asyncio.gather(rig.service.infer(one), rig.service.infer(two))
        assert small["sum"].tolist() == [[4, 6]]
        assert large["sum"].tolist() == [[2, 2]] * 6
        with pytest.raises(weir.InvalidRequest, match="tensor 'b': is missing"):
            await rig.service.infer({"a": [[1, 2]]})
        many = await rig.service.infer_many([one, one])
        assert [each["sum"].tolist() for each in many] == [[[4, 6]]] * 2


@subcases("seconds", [float("nan"), float("inf"), 1e12])
async def test_a_timeout_that_is_none_is_refused(seconds: float) -> None:
    async with serving() as rig:
        with pytest.raises(weir.InvalidRequest, match="timeout="):
            await rig.service.infer(3, timeout=seconds)
        for past in (0.0, -1.0):
            with pytest.raises(weir.DeadlineExceeded):
                await rig.service.infer(3, timeout=past)


async def test_frontends_get_answers_in_the_type_that_they_accept() -> None:
    async with serving() as rig:
        request = FakeRequest(b"3", arrival=rig.service.now(), content_type=JSON, accept=JSON)
        whole = FakeRequest([b"1", b"2"], arrival=rig.service.now(), content_type=JSON, kind=Kind.ITEMS, rows=2, cost=2)
        rig.service.submit(request)
        rig.service.submit(whole)
        await turns()
        assert request.output == b"9"
        assert whole.output == [1, 4]
        gone = FakeRequest(b"3", arrival=rig.service.now())
        rig.service.submit(gone)
        rig.service.cancel(gone)
        rig.service.cancel(gone)
        await turns()
        assert gone.ends == 0


async def test_a_blocks_share_is_given_back_when_its_request_has_its_end() -> None:
    async with serving(None, max_queue_size=2) as rig:
        assert rig.service.reserve(10) is None
        rig.executor.give_blocks = True
        requests = []
        for timeout in (5.0, 1.0, 5.0):
            block = rig.service.reserve(10)
            assert block is not None
            requests.append(FakeRequest(block, arrival=rig.service.now(), timeout=timeout))
            rig.service.submit(requests[-1])
            await turns()
        refused = FakeRequest(rig.service.reserve(10), arrival=rig.service.now())
        with pytest.raises(Overloaded):
            rig.service.submit(refused)
        rig.service.cancel(requests[2])
        rig.clock.advance(1.0)
        rig.executor.respond_next(lambda batch: ["answer" for _ in batch])
        assert [block.shares for block in rig.executor.blocks] == [0, 0, 0, 1]


async def test_an_answer_in_a_block_that_nobody_wants_is_released() -> None:
    async with serving(None) as rig:
        rig.executor.give_blocks = True
        result = rig.executor.reserve(10)
        call, neighbour = rig.service.infer(1), rig.service.infer(2)
        await turns()
        call.cancel()
        rig.executor.respond_next(lambda batch: [result, 4])
        assert await neighbour == 4
        assert rig.executor.blocks[0].shares == 0


async def test_the_state_is_json_and_says_what_there_is() -> None:
    class Secretive(Square):
        policy: ClassVar[Any] = "size-or-delay:size=8,delay=50ms"

    async with serving(None, model=Secretive, env=[{"TOKEN": "secret"}]) as rig:
        rig.service.infer("running")
        await turns()
        rig.clock.advance(0.05)
        for item in range(3):
            rig.service.infer(item)
        await turns()
        rig.clock.advance(0.02)
        state = json.loads(json.dumps(rig.service.state()))
        assert state["model"] == "secretive"
        assert state["ready"] is True
        assert (state["waiting"], state["in_flight"], state["in_flight_batches"]) == (3, 1, 1)
        assert state["oldest_age"] == pytest.approx(0.02)
        assert state["batches"]["delay"] == 1
        assert state["recent"][0]["reason"] == "delay"
        assert state["settings"]["policy"] == "size-or-delay:size=8,delay=50ms"
        assert state["workers"] == [
            {
                "index": 0, "kind": "", "bulk": False, "state": "ready", "pid": os.getpid(), "in_flight": 1, "restarts": 0, "reason": "",
                "node": "", "address": "", "gpus": [], "actor": "",
            }
        ]  # fmt: skip
        assert state["shortage"] == ""
        assert state["settings"]["env"] == [["TOKEN"]]


async def test_deep_health_runs_the_examples() -> None:
    async def health(*cases: Any) -> ModelHealth:
        model = type("Known", (Square,), {"examples": cases})
        async with serving(
            lambda batch: [weir.ModelError("bad") if x == "x" else x * x for x in batch], model=model
        ) as rig:
            return await rig.service.deep_health()

    known = await health(3, weir.Example(4, 16), weir.Example(2.0, 4.0000001))
    assert known["healthy"] and [each["ok"] for each in known["examples"]] == [True, True, True]
    wrong = await health(weir.Example(4, 17))
    assert not wrong["healthy"] and wrong["examples"][0]["error"] == "expected 17, got 16"
    assert (await health("x"))["examples"][0]["error"] == "ModelError: bad"
    stopped = await weir.Service(Square, executor=FakeExecutor()).deep_health()
    assert (stopped["healthy"], stopped["reason"]) == (False, "not started")


@subcases(("name", "value"), [("priority", "high"), ("priority", 1.5), ("key", ["a", "list"])])
async def test_a_priority_or_key_that_cannot_be_is_refused_and_harms_nobody(name: str, value: Any) -> None:
    async with serving() as rig:
        options: dict[str, Any] = {name: value}
        for call in (rig.service.infer(3, **options), rig.service.infer_many([3, 4], **options)):
            with pytest.raises(weir.InvalidRequest, match=f"{name}="):
                await call
        assert await asyncio.gather(*map(rig.service.infer, range(4))) == [0, 1, 4, 9]
        assert rig.service.state()["waiting"] == 0


NAN = float("nan")


EQUAL = [
    (1, 1), ("a", "a"), (b"a", b"a"), (None, None), (1.00000001, 1.0), (1, 1.0), (NAN, NAN), ([1.0, [2.0000001]], [1.0, [2.0]]),
    (numpy.array([1.0, 2.0], "float32"), [1.0, 2.0]), ([1.0, 2.0], numpy.array([1.0, 2.0])), (numpy.float32(0.1), 0.1),
    ({"a": [1.0], "b": None}, {"a": [1.0], "b": None}), ((1, 2), [1, 2]),
]  # fmt: skip


OTHERS = [
    (1, 2), (1.1, 1.0), ("a", b"a"), ("ab", ["a", "b"]), ([1.0], [1.0, 2.0]), ({"a": 1}, {"a": 1, "b": 2}), ([1], {"a": 1}),
    (None, 0.0), (1.0, NAN), (numpy.array([1.0, 3.0]), [1.0, 2.0]), ("1.0", 1.0),
]  # fmt: skip


def test_which_answers_are_the_same() -> None:
    assert [same(answer, expected) for answer, expected in EQUAL] == [True] * len(EQUAL)
    assert [same(answer, expected) for answer, expected in OTHERS] == [False] * len(OTHERS)


# One service takes the place of another while requests come.


class Pair:
    """Two services of one clock that run; `swap` has the second replace the first."""

    def __init__(self) -> None:
        self.clock, self.heard = FakeClock(), RecordingObserver()
        self.replaced: list[Replaced] = []
        self.executors = [FakeExecutor(None) for _ in range(3)]
        self.old, self.new, self.newest = (
            Service(
                Square, executor=executor, clock=self.clock, observers=[self.heard], max_batch_size=1, max_queue_size=2
            )
            for executor in self.executors
        )

    async def __aenter__(self) -> "Pair":
        for service in (self.old, self.new, self.newest):
            await service.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        replaced = [each.generation for each in self.replaced]
        for generation in (*replaced, *(each.generation for each in (self.old, self.new, self.newest))):
            await generation.stop(0.0)

    def answer(self, which: int) -> None:
        self.executors[which].respond_next(squares)


async def test_what_was_accepted_is_answered_by_the_old_and_the_rest_by_the_new() -> None:

    async def answering(pair: Pair, which: int) -> None:
        await turns()
        pair.answer(which)

    async with Pair() as pair:
        before = [request(pair.old, item) for item in (1, 2)]
        await turns()
        former = pair.old.replace_with(pair.new)
        after, call = request(pair.old, 3), pair.old.infer(4)
        await turns()
        stopping = asyncio.ensure_future(former.stop(10.0))
        await turns()
        for _ in range(2):
            pair.answer(0)
            pair.answer(1)
            await turns()
        assert [each.output for each in (*before, after)] == [1, 4, 9]
        assert await call == 16
        await stopping
        assert pair.executors[0].stopped and not pair.executors[1].stopped
        assert await asyncio.gather(pair.old.infer(5), *[answering(pair, 1)]) == [25, None]


async def test_draining_waits_for_what_replaced_ones_had_accepted() -> None:
    async with Pair() as pair:
        sent = request(pair.old, 3)
        await turns()
        pair.replaced.append(pair.old.replace_with(pair.new))
        draining = asyncio.ensure_future(pair.old.drain(10.0))
        hurried = asyncio.ensure_future(pair.replaced[0].generation.driver.drain(1.0))
        await turns()
        assert not draining.done()
        pair.clock.advance(2.0)  # who gives it less time does not end the others' wait
        await turns()
        assert hurried.done() and not draining.done()
        pair.answer(0)
        await draining
        assert sent.output == 9


async def test_the_old_one_is_as_ready_as_the_newest() -> None:
    async with Pair() as pair:
        for newer in (pair.new, pair.newest):
            pair.replaced.append(pair.old.replace_with(newer))
        assert pair.old.ready and not pair.old.draining
        sent = request(pair.old, 3)
        await turns()
        pair.answer(2)
        assert sent.output == 9
        await pair.newest.stop(0.0)
        assert pair.old.not_ready_reason == "stopped"
        with pytest.raises(ModelNotReady, match="stopped"):
            request(pair.old, 4)


async def test_a_caller_who_leaves_is_forgotten_by_whoever_has_the_request() -> None:
    async with Pair() as pair:
        running, waiting = request(pair.old, 1), request(pair.old, 2)
        await turns()
        former = pair.old.replace_with(pair.new)
        passed_on, call = request(pair.old, 3), pair.old.infer(4)
        await turns()
        for each in (waiting, passed_on):
            pair.old.cancel(each)
        call.cancel()
        assert pair.executors[1].cancelled == [(0, 1, [0])]
        pair.old.cancel(running)
        assert pair.executors[0].cancelled == [(0, 1, [0])]
        pair.answer(0)
        pair.answer(1)
        await former.stop(10.0)
        assert {each.ends for each in (running, waiting, passed_on)} == {0}
        assert pair.heard.ends == 4


async def test_calls_outside_of_a_full_line_are_answered_by_the_old() -> None:
    async with Pair() as pair:
        calls = [pair.old.infer(item) for item in range(6)]
        await turns()
        stopping = asyncio.ensure_future(pair.old.replace_with(pair.new).stop(10.0))
        calls[5].cancel()
        for _ in range(5):
            await turns()
            pair.answer(0)
        await stopping
        assert [await call for call in calls[:5]] == squares(list(range(5)))


async def test_memory_of_the_old_one_may_be_submitted_to_the_new_one() -> None:
    async with Pair() as pair:
        for executor in pair.executors:
            executor.give_blocks = True
        block = pair.old.reserve(10)
        pair.replaced.append(pair.old.replace_with(pair.new))
        sent = request(pair.old, block)
        assert pair.old.reserve(10) is pair.executors[1].blocks[0]
        await turns()
        pair.executors[1].respond_next(lambda batch: [len(each.view) for each in batch])
        assert sent.output == 10
        assert pair.executors[0].blocks[0].shares == 0


async def test_a_stop_ends_the_generations_that_were_replaced_too() -> None:
    async with Pair() as pair:
        pair.old.replace_with(pair.new)
        await pair.old.stop(0.0)
        assert [executor.stopped for executor in pair.executors] == [True, True, False]


async def test_a_stop_accepts_no_more_while_replaced_ones_finish() -> None:
    async with Pair() as pair:
        sent = request(pair.old, 3)
        await turns()
        pair.replaced.append(pair.old.replace_with(pair.new))
        stopping = asyncio.ensure_future(pair.old.stop(10.0))
        await turns()
        with pytest.raises((Draining, ModelNotReady)):
            await pair.old.infer(4)
        pair.answer(0)
        await stopping
        assert sent.output == 9


async def test_whoever_holds_a_service_reaches_the_newest_and_keeps_none_between() -> None:
    clock = FakeClock()

    def fresh() -> Service:
        return Service(Square, executor=FakeExecutor(squares), clock=clock)

    service = fresh()
    await service.start()
    between: list[weakref.ref[Driver]] = []
    for _ in range(1500):
        new = fresh()
        await new.start()
        former = service.replace_with(new)
        await former.stop(0.0)
        between.append(weakref.ref(former.generation.driver))
    del former, new
    call, sent = service.infer(3), request(service, 4)
    await turns()
    assert (await call, sent.output) == (9, 16)
    gc.collect()
    assert sum(each() is not None for each in between) == 0
    await service.stop(0.0)
