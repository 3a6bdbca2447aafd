import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.errors import Cancelled, InvalidRequest, ModelError
from weir.workers.faults import ENDS_THE_PROCESS, fault_of
from weir.workers.run.steps import TogetherStep, ValuesOrErrors, each, has_failed


class Halver:
    """A step that doubles numbers, raises when a bad one is in the batch, and counts its calls."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.calls: list[int] = []

    def __call__(self, values: list[int]) -> list[int]:
        self.calls.append(len(values))
        if self.bad.intersection(values):
            raise ValueError("bad one")
        return [2 * value for value in values]


def together(call: Any, *, halves: bool = True, judge: Any = None) -> TogetherStep:
    return TogetherStep("predict", call, judge or (lambda returned, _: returned), halves=halves, fatal=ENDS_THE_PROCESS)


@given(st.integers(1, 64), st.sets(st.integers(0, 63)))
def test_only_the_bad_ones_fail(size: int, bad: set[int]) -> None:
    call, restarts = Halver(bad), [0]

    def restarted() -> None:
        restarts[0] += 1

    results = together(call).run(list(range(size)), restarted)
    for value, result in enumerate(results):
        if value in bad:
            assert isinstance(result, ModelError)
            assert result.original_type == "ValueError"
        else:
            assert result == 2 * value
    assert restarts[0] == len(call.calls) - 1


def test_one_bad_one_among_64_costs_two_calls_a_round() -> None:
    call = Halver({17})
    together(call).run(list(range(64)))
    assert len(call.calls) == 1 + 2 * int(math.log2(64))


def test_without_halves_all_fail_each_with_an_error_of_its_own() -> None:
    call = Halver({1})
    results = together(call, halves=False).run([0, 1, 2])
    assert call.calls == [3]
    assert all(isinstance(result, ModelError) for result in results)
    assert len(set(map(id, results))) == 3


def test_an_error_of_ours_is_that_entrys_only_if_it_was_alone() -> None:
    def refuse(values: list[int]) -> list[int]:
        if 7 in values:
            raise InvalidRequest("seven")
        return values

    assert isinstance(together(refuse).run([1, 7])[1], InvalidRequest)
    both = together(refuse, halves=False).run([1, 7])
    assert [type(result) for result in both] == [ModelError, ModelError]
    assert both[0].original_type == "weir.errors.InvalidRequest"


def test_what_the_judge_refuses_is_everybodys_and_not_retried() -> None:
    def refuse(returned: Any, values: list[int]) -> ValuesOrErrors:
        raise ModelError("wrong count")

    call = Halver(set())
    results = together(call, judge=refuse).run([1, 2, 3])
    assert [result.message for result in results] == ["wrong count"] * 3
    assert call.calls == [3]


def test_a_step_leaves_what_failed_before() -> None:
    failed = InvalidRequest("before")
    call = Halver({3})
    results = together(call).run([1, failed, 2, 3])
    assert results[:3] == [2, failed, 4]
    assert isinstance(results[3], ModelError)
    assert together(call).run([failed]) == [failed]
    assert together(call).run([]) == []
    assert has_failed(results)
    assert not has_failed([1, ValueError()])


def test_a_model_may_destroy_its_list() -> None:
    def destroy(values: list[int]) -> list[int]:
        taken = [values.pop() for _ in range(len(values))][::-1]
        if 2 in taken:
            raise ValueError
        return taken

    results = together(destroy).run([0, 1, 2, 3])
    assert [result for result in results if not isinstance(result, ModelError)] == [0, 1, 3]


def test_each_passes_every_value_once() -> None:
    seen: list[int] = []

    def step(value: int) -> int:
        seen.append(value)
        if value % 3 == 0:
            raise ValueError(value)
        if value == 4:
            raise StopIteration
        if value == 5:
            raise InvalidRequest("five")
        return -value

    results = each(step, [0, 1, InvalidRequest("before"), 3, 4, 5, 6, 7], fault_of("preprocess"))
    assert seen == [0, 1, 3, 4, 5, 6, 7]
    assert [getattr(result, "message", result) for result in results] == [
        "preprocess raised ValueError: 0", -1, "before", "preprocess raised ValueError: 3",
        "preprocess raised RuntimeError: StopIteration", "five", "preprocess raised ValueError: 6", -7,
    ]  # fmt: skip


def test_each_with_a_second_column_stays_aligned() -> None:
    results = each(lambda a, b: 10 // a + b, [1, 0, 5], fault_of("postprocess"), [100, 200, 300])
    assert (results[0], results[2]) == (110, 302)
    assert results[1].original_type == "ZeroDivisionError"


class Panic(BaseException):
    """What a Rust extension raises when it panics: no Exception."""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_ends_the_process_is_passed_on(error: BaseException) -> None:
    def end(_: Any) -> Any:
        raise error

    with pytest.raises(type(error)):
        each(end, [1], fault_of("preprocess"))
    with pytest.raises(type(error)):
        together(end).run([1, 2])
    contained = TogetherStep("predict", end, lambda returned, _: returned, halves=True, fatal=())
    assert contained.run([1])[0].original_type == type(error).__name__
    assert each(end, [1], fault_of("preprocess"), fatal=())[0].original_type == type(error).__name__


def test_other_base_exceptions_are_the_entrys() -> None:
    def panic(value: Any) -> Any:
        raise Panic("the tokenizer panicked")

    assert each(panic, [1], fault_of("preprocess"))[0].message == "preprocess raised Panic: the tokenizer panicked"
    assert together(panic).run([1])[0].message == "predict raised Panic: the tokenizer panicked"


def test_cancelled_is_just_a_failed_entry() -> None:
    gone = Cancelled("left")
    assert each(str, [1, gone], fault_of("encode")) == ["1", gone]


def test_a_generator_that_raises_is_retried_in_halves_as_any_predict() -> None:
    def predict(values: list[Any]) -> Any:
        for value in values:
            if value == 2:
                raise KeyError(value)
            yield -value

    results = together(predict).run([0, 1, 2, 3])
    assert [results[0], results[1], results[3]] == [0, -1, -3]
    assert isinstance(results[2], ModelError)
    assert results[2].original_type == "KeyError"
