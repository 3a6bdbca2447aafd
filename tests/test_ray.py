"""`@weir.ray.batch` does what Ray's own tests want of `@serve.batch` (`test_batching.py`), and what it promises beyond. None of it needs Ray."""

import asyncio
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import pytest
from tests.rings import subcases
from tests.waiting import turns

from weir.errors import ModelError
from weir.ray import batch

WAIT = 1000.0  # seconds: a batch that is not full waits for ever

pytestmark = pytest.mark.timeout(60)


async def started(calls: Iterable[Any]) -> list[asyncio.Future[Any]]:
    """Return the calls as tasks, when they wait in a batch or run."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await turns(50)
    return tasks


async def echo(requests: list[Any]) -> list[Any]:
    if "raise" in requests:
        raise ZeroDivisionError("it raised")
    return requests


async def pairs(key1: list[str], key2: list[str]) -> list[tuple[str, str]]:
    return list(zip(key1, key2, strict=True))


def test_what_can_be_decorated_and_how() -> None:
    assert callable(batch(echo))
    accepted: list[dict[str, Any]] = [{}, {"max_batch_size": 10, "batch_wait_timeout_s": 1.5}, {"max_batch_size": 1.0}]
    for options in accepted:
        assert callable(batch(**options)(echo))
    for decorate in (batch, batch(max_batch_size=2)):
        with pytest.raises(TypeError, match="async def"):
            decorate(lambda requests: requests)


@subcases(
    ("options", "kind", "words"),
    [
        ({"max_batch_size": 0}, ValueError, "max_batch_size=0: must be 1 or more"),
        ({"max_batch_size": 1.1}, TypeError, r"max_batch_size=1\.1: must be a whole number"),
        ({"batch_wait_timeout_s": -0.1}, ValueError, r"batch_wait_timeout_s=-0\.1: must be 0 or more"),
        ({"batch_wait_timeout_s": "a"}, TypeError, "batch_wait_timeout_s='a': must be a number"),
        ({"max_concurrent_batches": 0}, ValueError, "max_concurrent_batches=0"),
        ({"batch_size_fn": 3}, TypeError, "batch_size_fn=3: must be a function"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        batch(**options)


async def test_batches_of_one_do_not_wait() -> None:
    call: Any = batch(max_batch_size=1, batch_wait_timeout_s=WAIT)(echo)
    assert await call("hi") == "hi"
    with pytest.raises(ZeroDivisionError, match="it raised"):
        await call("raise")


async def test_calls_that_come_while_a_batch_runs_share_the_next_one() -> None:
    """`serve.batch` would have cut one at the end of its timer, long before the function is free, and another for the rest."""
    seen: list[list[Any]] = []
    go = asyncio.Event()

    @batch(max_batch_size=10, batch_wait_timeout_s=0)
    async def call(requests: list[Any]) -> list[Any]:
        seen.append(list(requests))
        await go.wait()
        return await echo(requests)

    calls = [*await started([call(0)])]
    for item in (1, 2, "raise"):
        calls += await started([call(item)])  # so that no two come together
    assert seen == [[0]]
    go.set()
    first, *others = await asyncio.gather(*calls, return_exceptions=True)
    assert first == 0 and [type(each) for each in others] == [ZeroDivisionError] * 3
    assert seen == [[0], [1, 2, "raise"]]


async def test_a_batch_waits_until_it_is_full() -> None:
    call: Any = batch(max_batch_size=3, batch_wait_timeout_s=WAIT)(echo)
    for words in (["a", "b", "c"], ["a", "raise", "c"]):
        calls = await started(map(call, words[:2]))
        assert not any(each.done() for each in calls)
        results = await asyncio.gather(*calls, call(words[2]), return_exceptions=True)
        if "raise" in words:
            assert isinstance(results[0], ZeroDivisionError) and results == [results[0]] * 3
        else:
            assert results == words
    assert await asyncio.gather(*map(call, range(9))) == list(range(9))  # more than a batch takes


CALLS: dict[str, Callable[..., Any]] = {
    "positional": lambda call, key1, key2: call(key1, key2),
    "by name": lambda call, key1, key2: call(key1=key1, key2=key2),
    "mixed": lambda call, key1, key2: call(key1, key2=key2),
    "out of order": lambda call, key1, key2: call(key2=key2, key1=key1),
}


@subcases("mode", CALLS)
async def test_arguments_of_functions_methods_and_generators(mode: str) -> None:
    class Holder:
        @batch(max_batch_size=2, batch_wait_timeout_s=WAIT)
        async def pairs(self, key1: list[str], key2: list[str]) -> list[tuple[str, str]]:
            return await pairs(key1, key2)

        @batch(max_batch_size=2, batch_wait_timeout_s=WAIT)
        async def several(self, key1: list[str], key2: list[str]) -> Any:
            for number in range(lengths[0]):
                yield [(number, *pair) for pair in await pairs(key1, key2)]

    holder = Holder()
    for call in (batch(max_batch_size=2, batch_wait_timeout_s=WAIT)(pairs), holder.pairs):
        both = [CALLS[mode](call, *keys) for keys in (("hi1", "hi2"), ("hi3", "hi4"))]
        assert await asyncio.gather(*both) == [("hi1", "hi2"), ("hi3", "hi4")]
    for lengths in ([0], [2], [5]):
        both = [CALLS[mode](holder.several, *keys) for keys in (("hi1", "hi2"), ("hi3", "hi4"))]
        assert [[each async for each in one] for one in both] == [
            [(number, *keys) for number in range(lengths[0])] for keys in (("hi1", "hi2"), ("hi3", "hi4"))
        ]


@subcases("streaming", [True, False])
async def test_callers_who_leave_and_later_ones(streaming: bool) -> None:
    go = asyncio.Event()
    healthy: list[bool] = []

    async def gated(key1: list[str], key2: list[str]) -> list[tuple[str, str]]:
        await go.wait()
        if not healthy:
            raise ValueError("not yet")
        return await pairs(key1, key2)

    async def stream(key1: list[str], key2: list[str]) -> Any:
        yield await gated(key1, key2)

    call: Any = batch(max_batch_size=2, batch_wait_timeout_s=WAIT)(stream if streaming else gated)

    async def start(*keys: tuple[str, str]) -> list[asyncio.Future[Any]]:
        return await started(anext(call(*each)) if streaming else call(*each) for each in keys)

    (alone,) = await start(("x", "y"))
    alone.cancel()  # while it waits: its place in the batch is free again
    await turns(50)
    first, second = await start(("hi1", "hi2"), ("hi3", "hi4"))
    first.cancel()
    await turns(50)
    assert first.cancelled() and not second.done()
    second.cancel()
    await turns(50)
    assert second.cancelled()
    go.set()
    for task in await start(("hi1", "hi2"), ("hi3", "hi4")):
        task.cancel()  # after its error
        assert isinstance(task.exception(), ValueError)
    healthy.append(True)
    assert await asyncio.gather(*await start(("hi1", "hi2"), ("hi3", "hi4"))) == [("hi1", "hi2"), ("hi3", "hi4")]


async def test_setters_hold_for_later_calls_and_what_waits_is_run_at_once() -> None:
    """`serve.batch` would let the batch that has begun wait on under the former settings."""
    seen: list[int] = []

    @batch(max_batch_size=2, batch_wait_timeout_s=WAIT)
    async def call(requests: list[Any]) -> list[Any]:
        seen.append(len(requests))
        return requests

    assert (call._get_max_batch_size(), call._get_batch_wait_timeout_s()) == (2, WAIT)
    await asyncio.gather(*map(call, range(2)))
    call.set_max_batch_size(3)
    call.set_batch_wait_timeout_s(15000)
    assert (call._get_max_batch_size(), call._get_batch_wait_timeout_s()) == (3, 15000)
    await asyncio.gather(*map(call, range(3)))
    waiting = await started(map(call, range(2)))
    call.set_max_batch_size(1)
    call.set_batch_wait_timeout_s(0)
    assert await call("e") == "e"
    await asyncio.gather(*waiting)
    assert sorted(seen) == [1, 2, 2, 3]
    with pytest.raises(ValueError, match="max_batch_size=0"):
        call.set_max_batch_size(0)


@subcases(
    ("fault", "kind", "words"),
    [("raises", RuntimeError, "in the middle"), ("gives too many", ModelError, "returned 4 results for 2 items")],
)
async def test_generators_that_fail(fault: str, kind: type[Exception], words: str) -> None:
    @batch(max_batch_size=2, batch_wait_timeout_s=WAIT)
    async def stream(numbers: list[int]) -> Any:
        for step in range(5):
            if step == 2 and fault == "raises":
                raise RuntimeError("in the middle")
            yield numbers * (2 if step == 2 else 1)

    for generator in [stream(1), stream(2)]:
        assert [await anext(generator) for _ in range(2)]
        with pytest.raises(kind, match=words):
            await anext(generator)
        with pytest.raises(StopAsyncIteration):
            await anext(generator)


@subcases("end", [StopIteration, StopAsyncIteration])
async def test_callers_who_get_no_more(end: type[Exception]) -> None:
    @batch(max_batch_size=4, batch_wait_timeout_s=WAIT)
    async def one_after_the_other(numbers: list[int]) -> Any:
        for ended in range(1, 5):
            yield [end] * ended + numbers[ended:]

    generators = [one_after_the_other(number) for number in range(4)]
    assert [[each async for each in generator] for generator in generators] == [[], [1], [2, 2], [3, 3, 3]]


async def test_setters_while_a_generator_runs() -> None:
    @batch(max_batch_size=2, batch_wait_timeout_s=WAIT)
    async def twice(numbers: list[int]) -> Any:
        for _ in range(2):
            yield numbers

    early = [twice(1), twice(2)]
    assert [await anext(each) for each in early] == [1, 2]
    twice.set_max_batch_size(3)
    late = [twice(number) for number in (3, 4, 5)]
    rest = [[each async for each in generator] for generator in (*early, *late)]
    assert rest == [[1], [2], [3, 3], [4, 4], [5, 5]]


async def test_sizes_of_items() -> None:
    seen: list[list[int]] = []

    @batch(max_batch_size=10, batch_wait_timeout_s=0, batch_size_fn=sum)
    async def call(sizes: list[int]) -> list[int]:
        seen.append(sizes)
        return sizes

    assert await asyncio.gather(*map(call, [6, 6])) == [6, 6]
    with pytest.raises(RuntimeError, match="batch_size_fn says 12 for one item, more than max_batch_size=10"):
        await call(12)
    assert await asyncio.gather(*map(call, [2, 3, 5])) == [2, 3, 5]
    assert seen == [[6], [6], [2, 3, 5]]


async def test_calls_on_different_instances_are_never_batched_together() -> None:
    class Adder:
        def __init__(self, number: int) -> None:
            self.number = number

        @batch(max_batch_size=4, batch_wait_timeout_s=0)
        async def add(self, numbers: list[int]) -> list[int]:
            return [self.number + each for each in numbers]

    class Derived(Adder):
        async def add(self, number: int) -> int:  # type: ignore[override]  # as it looks from outside
            return -int(await super().add(number))

    one, ten, derived = Adder(1), Adder(10), Derived(100)
    calls = [adder.add(number) for number in range(3) for adder in (one, ten, derived)]
    assert await asyncio.gather(*calls) == [1, 10, -100, 2, 11, -101, 3, 12, -102]


async def test_a_class_with_a_batched_method_travels_by_value() -> None:
    class Traveller:
        @batch(max_batch_size=2, batch_wait_timeout_s=0)
        async def add(self, numbers: list[int]) -> list[int]:
            return [each + 1 for each in numbers]

    assert await Traveller().add(1) == 2
    arrived = pickle.loads(cloudpickle.dumps(Traveller))
    assert await asyncio.gather(*map(arrived().add, range(4))) == [1, 2, 3, 4]


async def test_several_batches_at_once() -> None:
    running: list[int] = []
    most: list[int] = []
    go = asyncio.Event()

    @batch(max_batch_size=1, batch_wait_timeout_s=0, max_concurrent_batches=2)
    async def call(numbers: list[int]) -> list[int]:
        running.extend(numbers)
        most.append(len(running))
        await go.wait()
        running.remove(numbers[0])
        return numbers

    calls = await started(map(call, range(5)))
    assert sorted(running) == [0, 1]
    go.set()
    assert await asyncio.gather(*calls) == list(range(5))
    assert max(most) == 2


async def test_the_policy_decides_when_no_wait_is_given() -> None:
    @batch(max_batch_size=8, policy="control-limit:3")
    async def sizes(numbers: list[int]) -> list[int]:
        return [len(numbers)] * len(numbers)

    assert await asyncio.gather(*map(sizes, range(3))) == [3, 3, 3]
