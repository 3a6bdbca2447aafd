import asyncio
import json
from typing import Any, ClassVar, cast

import numpy
import pytest
from tests.rings import subcases
from tests.serving.kit import Square, serving, squares, turns

import weir
from weir.errors import Conflict, Overloaded
from weir.messages import JSON, Kind
from weir.serving.handle import ModelHealth
from weir.testing import FakeExecutor, FakeRequest


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
        ({"model": Square, "name": "my model"}, "name='my model': must have up to 255 .*; 'my-model' would do"),
        ({"model": None}, r"must implement predict\(batch\)"),
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
    assert all(f"<td>{text}</td>" in service._repr_html_() for text in ("0 rows", "64 rows"))  # in a notebook
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
        rig.executor.answer_next(lambda batch: ["answer" for _ in batch])
        assert [block.shares for block in rig.executor.blocks] == [0, 0, 0, 1]


async def test_an_answer_in_a_block_that_nobody_wants_is_released() -> None:
    async with serving(None) as rig:
        rig.executor.give_blocks = True
        result = rig.executor.reserve(10)
        call, neighbour = rig.service.infer(1), rig.service.infer(2)
        await turns()
        call.cancel()
        rig.executor.answer_next(lambda batch: [result, 4])
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
                "index": 0, "kind": "", "bulk": False, "state": "ready", "pid": None, "in_flight": 1, "restarts": 0, "reason": "",
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
