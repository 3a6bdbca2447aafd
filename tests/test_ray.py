"""`@weir.ray.batch` does what Ray's own tests want of `@serve.batch` (`test_batching.py`), and what it promises beyond. None of it needs Ray."""

import asyncio
import inspect
import pickle
from collections.abc import Callable, Coroutine
from typing import Any

import cloudpickle
import pytest

from weir.errors import ModelError
from weir.ray import batch

WAIT = 1000.0  # seconds: a batch that is not full waits for ever


async def turns(count: int = 50) -> None:
    """Let the event loop do all that it can do by now."""
    for _ in range(count):
        await asyncio.sleep(0)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main` as a test, which ends within seconds."""
    asyncio.run(asyncio.wait_for(main(), 60))


def as_function_or_method(function: Callable[..., Any], in_class: bool, **options: Any) -> Any:
    """Return `function` decorated, or the same as a method of an instance."""
    if not in_class:
        return batch(**options)(function)

    async def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return await function(*arguments, **keywords)

    async def generator(self: Any, key1: Any, key2: Any) -> Any:
        async for each in function(key1, key2):
            yield each

    async def pair(self: Any, key1: Any, key2: Any) -> Any:
        return await function(key1, key2)

    async def single(self: Any, requests: Any) -> Any:
        return await function(requests)

    count = len(inspect.signature(function).parameters)
    chosen: Any = generator if inspect.isasyncgenfunction(function) else pair if count == 2 else single
    kind = type("Holder", (), {chosen.__name__: batch(**options)(chosen)})
    return getattr(kind(), chosen.__name__)


in_class = pytest.mark.parametrize("in_class", [True, False], ids=["method", "function"])


def test_what_can_be_decorated_and_how() -> None:
    async def function(requests: list[Any]) -> list[Any]:
        return requests

    def plain(requests: list[Any]) -> list[Any]:
        return requests

    for options in (
        {},
        {"max_batch_size": 10, "batch_wait_timeout_s": 1.5},
        {"max_batch_size": 1.0},
        {"batch_wait_timeout_s": 0},
    ):
        assert callable(batch(**options)(function))
    assert callable(batch(function))
    for decorate in (batch, batch(max_batch_size=2)):
        with pytest.raises(TypeError, match="async def"):
            decorate(plain)
    with pytest.raises(ValueError, match="max_batch_size=0: must be 1 or more"):
        batch(max_batch_size=0)
    with pytest.raises(TypeError, match=r"max_batch_size=1\.1: must be a whole number"):
        batch(max_batch_size=1.1)  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(ValueError, match=r"batch_wait_timeout_s=-0\.1: must be 0 or more"):
        batch(batch_wait_timeout_s=-0.1)
    with pytest.raises(TypeError, match="batch_wait_timeout_s='a': must be a number"):
        batch(batch_wait_timeout_s="a")  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(ValueError, match="max_concurrent_batches=0"):
        batch(max_concurrent_batches=0)
    with pytest.raises(TypeError, match="batch_size_fn=3: must be a function"):
        batch(batch_size_fn=3)  # type: ignore[call-overload]  # wrong on purpose


@in_class
def test_batches_of_one_do_not_wait(in_class: bool) -> None:
    async def echo(requests: list[str]) -> list[str]:
        if "raise" in requests:
            raise ZeroDivisionError("it raised")
        return requests

    async def main() -> None:
        call = as_function_or_method(echo, in_class, max_batch_size=1, batch_wait_timeout_s=WAIT)
        assert await call("hi") == "hi"
        with pytest.raises(ZeroDivisionError, match="it raised"):
            await call("raise")

    run(main)


@in_class
def test_calls_that_come_while_a_batch_runs_share_the_next_one(in_class: bool) -> None:
    seen: list[list[str]] = []
    go = asyncio.Event()

    async def echo(requests: list[str]) -> list[str]:
        seen.append(list(requests))
        await go.wait()
        if "raise" in requests:
            raise ZeroDivisionError
        return requests

    async def main() -> None:
        call = as_function_or_method(echo, in_class, max_batch_size=2, batch_wait_timeout_s=0)
        first = asyncio.ensure_future(call("hi1"))
        await turns()
        others = [asyncio.ensure_future(call(each)) for each in ("hi2", "raise")]
        await turns()
        assert seen == [["hi1"]]
        go.set()
        assert await first == "hi1"
        for other in others:
            with pytest.raises(ZeroDivisionError):
                await other
        assert seen == [["hi1"], ["hi2", "raise"]]

    run(main)


def test_no_batch_is_closed_before_it_can_run() -> None:
    """`serve.batch` would have cut one at the end of its timer, long before the function is free, and another for the rest."""
    seen: list[int] = []
    go = asyncio.Event()

    @batch(max_batch_size=10, batch_wait_timeout_s=0)
    async def echo(requests: list[int]) -> list[int]:
        seen.append(len(requests))
        await go.wait()
        return requests

    async def main() -> None:
        calls = [asyncio.ensure_future(echo(0))]
        await turns()
        for number in range(1, 11):
            calls.append(asyncio.ensure_future(echo(number)))
            await turns()  # so that no two come together
        go.set()
        assert await asyncio.gather(*calls) == list(range(11))
        assert seen == [1, 10]

    run(main)


@in_class
def test_a_batch_waits_until_it_is_full(in_class: bool) -> None:
    async def echo(requests: list[str]) -> list[str]:
        if "raise" in requests:
            raise ZeroDivisionError
        return requests

    async def main() -> None:
        call = as_function_or_method(echo, in_class, max_batch_size=3, batch_wait_timeout_s=WAIT)
        for words in (["a", "b", "c"], ["a", "raise", "c"]):
            calls = [asyncio.ensure_future(call(word)) for word in words[:2]]
            await turns()
            assert not any(each.done() for each in calls)
            calls.append(asyncio.ensure_future(call(words[2])))
            results = await asyncio.gather(*calls, return_exceptions=True)
            if "raise" in words:
                assert all(isinstance(result, ZeroDivisionError) for result in results)
                assert len({id(result) for result in results}) == 1
            else:
                assert results == words

    run(main)


def test_more_calls_than_a_batch_takes() -> None:
    @batch(max_batch_size=2, batch_wait_timeout_s=WAIT)
    async def double(requests: list[int]) -> list[int]:
        return [2 * each for each in requests]

    async def main() -> None:
        assert await asyncio.gather(*map(double, range(10))) == list(range(0, 20, 2))

    run(main)


@pytest.mark.parametrize("mode", ["positional", "by name", "mixed", "out of order"])
@pytest.mark.parametrize("length", [None, 0, 2, 5], ids=["function", "0 yields", "2 yields", "5 yields"])
@in_class
def test_arguments_and_generators(mode: str, length: int | None, in_class: bool) -> None:
    async def pairs(key1: list[str], key2: list[str]) -> list[tuple[str, str]]:
        return list(zip(key1, key2, strict=True))

    async def several(key1: list[str], key2: list[str]) -> Any:
        for number in range(length or 0):
            yield [(number, *pair) for pair in zip(key1, key2, strict=True)]

    def called(call: Any, key1: str, key2: str) -> Any:
        if mode == "positional":
            return call(key1, key2)
        if mode == "by name":
            return call(key1=key1, key2=key2)
        return call(key1, key2=key2) if mode == "mixed" else call(key2=key2, key1=key1)

    async def main() -> None:
        call = as_function_or_method(
            pairs if length is None else several, in_class, max_batch_size=2, batch_wait_timeout_s=WAIT
        )
        both = [called(call, "hi1", "hi2"), called(call, "hi3", "hi4")]
        if length is None:
            assert await asyncio.gather(*both) == [("hi1", "hi2"), ("hi3", "hi4")]
        else:
            assert [[each async for each in one] for one in both] == [
                [(number, "hi1", "hi2") for number in range(length)],
                [(number, "hi3", "hi4") for number in range(length)],
            ]

    run(main)


@pytest.mark.parametrize("streaming", [True, False], ids=["generator", "coroutine"])
@in_class
def test_callers_who_leave_and_later_ones(in_class: bool, streaming: bool) -> None:
    go = asyncio.Event()
    finished: list[int] = []

    async def pairs(key1: list[str], key2: list[str]) -> list[tuple[str, str]]:
        await go.wait()
        finished.append(len(key1))
        return list(zip(key1, key2, strict=True))

    async def stream(key1: list[str], key2: list[str]) -> Any:
        yield await pairs(key1, key2)

    async def main() -> None:
        call = as_function_or_method(
            stream if streaming else pairs, in_class, max_batch_size=2, batch_wait_timeout_s=WAIT
        )

        def start() -> list[Any]:
            both = [call("hi1", "hi2"), call("hi3", "hi4")]
            return [asyncio.ensure_future(anext(each) if streaming else each) for each in both]

        alone = asyncio.ensure_future(anext(call("x", "y")) if streaming else call("x", "y"))
        await turns()
        alone.cancel()  # while it waits: its place in the batch is free again
        await turns()
        first, second = start()
        await turns()
        first.cancel()
        await turns()
        assert not second.done()
        second.cancel()
        await turns()
        assert first.cancelled()
        assert second.cancelled()
        assert finished == []
        go.set()
        assert await asyncio.gather(*start()) == [("hi1", "hi2"), ("hi3", "hi4")]

    run(main)


@pytest.mark.parametrize("streaming", [True, False], ids=["generator", "coroutine"])
def test_a_call_that_is_cancelled_after_its_error(streaming: bool) -> None:
    healthy: list[bool] = []

    async def pairs(key1: list[str], key2: list[str]) -> list[tuple[str, str]]:
        if not healthy:
            raise ValueError("not yet")
        return list(zip(key1, key2, strict=True))

    async def stream(key1: list[str], key2: list[str]) -> Any:
        yield await pairs(key1, key2)

    async def main() -> None:
        call = batch(max_batch_size=2, batch_wait_timeout_s=WAIT)(stream if streaming else pairs)

        def start() -> list[Any]:
            both = [call("hi1", "hi2"), call("hi3", "hi4")]
            return [asyncio.ensure_future(anext(each) if streaming else each) for each in both]

        failed = start()
        await turns()
        for task in failed:
            task.cancel()
            assert isinstance(task.exception(), ValueError)
        healthy.append(True)
        assert await asyncio.gather(*start()) == [("hi1", "hi2"), ("hi3", "hi4")]

    run(main)


@in_class
def test_setters_hold_for_later_calls_and_what_waits_is_run_at_once(in_class: bool) -> None:
    """`serve.batch` would let the batch that has begun wait on under the former settings."""
    seen: list[int] = []

    async def pairs(key1: list[str], key2: list[str]) -> list[tuple[str, str]]:
        seen.append(len(key1))
        return list(zip(key1, key2, strict=True))

    async def main() -> None:
        call = as_function_or_method(pairs, in_class, max_batch_size=2, batch_wait_timeout_s=WAIT)
        assert (call._get_max_batch_size(), call._get_batch_wait_timeout_s()) == (2, WAIT)
        await asyncio.gather(call("a", "b"), call("c", "d"))
        call.set_max_batch_size(3)
        call.set_batch_wait_timeout_s(15000)
        assert (call._get_max_batch_size(), call._get_batch_wait_timeout_s()) == (3, 15000)
        await asyncio.gather(*[call("a", "b") for _ in range(3)])
        waiting = [asyncio.ensure_future(call("a", "b")) for _ in range(2)]
        await turns()
        call.set_max_batch_size(1)
        call.set_batch_wait_timeout_s(0)
        assert await call("e", "f") == ("e", "f")
        await asyncio.gather(*waiting)
        assert sorted(seen) == [1, 2, 2, 3]
        with pytest.raises(ValueError, match="max_batch_size=0"):
            call.set_max_batch_size(0)

    run(main)


@pytest.mark.parametrize("fault", ["raises", "gives too many"])
def test_generators_that_fail(fault: str) -> None:
    @batch(max_batch_size=2, batch_wait_timeout_s=WAIT)
    async def stream(numbers: list[int]) -> Any:
        for step in range(5):
            if step == 2 and fault == "raises":
                raise RuntimeError("in the middle")
            yield numbers * (2 if step == 2 else 1)

    async def main() -> None:
        for generator in [stream(1), stream(2)]:
            assert [await anext(generator) for _ in range(2)]
            with pytest.raises(
                RuntimeError if fault == "raises" else ModelError,
                match="in the middle" if fault == "raises" else "returned 4 results for 2 items",
            ):
                await anext(generator)
            with pytest.raises(StopAsyncIteration):
                await anext(generator)

    run(main)


@pytest.mark.parametrize("end", [StopIteration, StopAsyncIteration])
def test_callers_who_get_no_more(end: type[Exception]) -> None:
    @batch(max_batch_size=4, batch_wait_timeout_s=WAIT)
    async def one_after_the_other(numbers: list[int]) -> Any:
        for ended in range(1, 5):
            yield [end] * ended + numbers[ended:]

    async def main() -> None:
        generators = [one_after_the_other(number) for number in range(4)]
        assert [[each async for each in generator] for generator in generators] == [[], [1], [2, 2], [3, 3, 3]]

    run(main)


def test_setters_while_a_generator_runs() -> None:
    @batch(max_batch_size=2, batch_wait_timeout_s=WAIT)
    async def thrice(numbers: list[int]) -> Any:
        for _ in range(3):
            yield numbers

    async def main() -> None:
        early = [thrice(1), thrice(2)]
        assert [await anext(each) for each in early] == [1, 2]
        thrice.set_max_batch_size(3)
        late = [thrice(number) for number in (3, 4, 5)]
        assert [[each async for each in generator] for generator in (*early, *late)] == [
            [1, 1], [2, 2], [3, 3, 3], [4, 4, 4], [5, 5, 5],
        ]  # fmt: skip

    run(main)


def test_sizes_of_items() -> None:
    seen: list[list[int]] = []

    @batch(max_batch_size=10, batch_wait_timeout_s=0, batch_size_fn=sum)
    async def echo(sizes: list[int]) -> list[int]:
        seen.append(sizes)
        return sizes

    async def main() -> None:
        assert await asyncio.gather(*map(echo, [6, 6])) == [6, 6]
        assert seen == [[6], [6]]
        with pytest.raises(RuntimeError, match="batch_size_fn says 12 for one item, more than max_batch_size=10"):
            await echo(12)
        seen.clear()
        assert await asyncio.gather(*map(echo, [2, 3, 5])) == [2, 3, 5]
        assert seen == [[2, 3, 5]]

    run(main)


def test_calls_on_different_instances_are_never_batched_together() -> None:
    class Adder:
        def __init__(self, number: int) -> None:
            self.number = number

        @batch(max_batch_size=4, batch_wait_timeout_s=0)
        async def add(self, numbers: list[int]) -> list[int]:
            return [self.number + each for each in numbers]

    class Derived(Adder):
        async def add(self, number: int) -> int:  # type: ignore[override]  # as it looks from outside
            return -int(await super().add(number))

    async def main() -> None:
        one, ten, derived = Adder(1), Adder(10), Derived(100)
        calls = [adder.add(number) for number in range(3) for adder in (one, ten, derived)]
        assert await asyncio.gather(*calls) == [1, 10, -100, 2, 11, -101, 3, 12, -102]

    run(main)


def test_several_batches_at_once() -> None:
    running: list[int] = []
    most: list[int] = []
    go = asyncio.Event()

    @batch(max_batch_size=1, batch_wait_timeout_s=0, max_concurrent_batches=2)
    async def echo(numbers: list[int]) -> list[int]:
        running.extend(numbers)
        most.append(len(running))
        await go.wait()
        running.remove(numbers[0])
        return numbers

    async def main() -> None:
        calls = [asyncio.ensure_future(echo(number)) for number in range(5)]
        await turns()
        assert sorted(running) == [0, 1]
        go.set()
        assert await asyncio.gather(*calls) == list(range(5))
        assert max(most) == 2

    run(main)


def test_the_policy_decides_when_no_wait_is_given() -> None:
    @batch(max_batch_size=8, policy="control-limit:3")
    async def sizes(numbers: list[int]) -> list[int]:
        return [len(numbers)] * len(numbers)

    async def main() -> None:
        assert await asyncio.gather(*map(sizes, range(3))) == [3, 3, 3]

    run(main)


def test_a_class_with_a_batched_method_travels_by_value() -> None:
    class Traveller:
        @batch(max_batch_size=2, batch_wait_timeout_s=0)
        async def add(self, numbers: list[int]) -> list[int]:
            return [each + 1 for each in numbers]

    async def main() -> None:
        assert await Traveller().add(1) == 2
        arrived = pickle.loads(cloudpickle.dumps(Traveller))
        assert await asyncio.gather(*map(arrived().add, range(4))) == [1, 2, 3, 4]

    run(main)
