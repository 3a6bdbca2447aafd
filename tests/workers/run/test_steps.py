import array
import itertools
import math
import os
from collections import UserDict
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rings import subcases
from tests.workers.runs import run

from weir.errors import (
    InvalidRequest,
    ModelError,
    SettingsError,
    TooLarge,
    UnsupportedMediaType,
    ValidationFailed,
    kind_of,
)
from weir.messages import JSON, MSGPACK, OBJECT, OCTETS, has_failed
from weir.model import Model, Tensor
from weir.wire.tensors import to_arrays
from weir.wire.values import ANY_CONTAINERS
from weir.workers.run import steps
from weir.workers.run.steps import each


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


def together(call: Any, *, halves: bool = True, judge: Any = None) -> steps.TogetherStep:
    return steps.TogetherStep(
        "predict", call, judge or (lambda returned, _: returned), halves=halves, fatal=steps.ENDS_THE_PROCESS
    )


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

    results = each(step, [0, 1, InvalidRequest("before"), 3, 4, 5, 6, 7], steps.fault_of("preprocess"))
    assert seen == [0, 1, 3, 4, 5, 6, 7]
    assert [getattr(result, "message", result) for result in results] == [
        "preprocess raised ValueError: 0", -1, "before", "preprocess raised ValueError: 3",
        "preprocess raised RuntimeError: StopIteration", "five", "preprocess raised ValueError: 6", -7,
    ]  # fmt: skip


class Panic(BaseException):
    """What a Rust extension raises when it panics: no Exception."""


@subcases("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_ends_the_process_is_passed_on(error: BaseException) -> None:
    def end(_: Any) -> Any:
        raise error

    with pytest.raises(type(error)):
        each(end, [1], steps.fault_of("preprocess"))
    with pytest.raises(type(error)):
        together(end).run([1, 2])
    contained = steps.TogetherStep("predict", end, lambda returned, _: returned, halves=True, fatal=())
    assert contained.run([1])[0].original_type == type(error).__name__
    assert each(end, [1], steps.fault_of("preprocess"), fatal=())[0].original_type == type(error).__name__


def test_other_base_exceptions_are_the_entrys() -> None:
    def panic(value: Any) -> Any:
        raise Panic("the tokenizer panicked")

    assert (
        each(panic, [1], steps.fault_of("preprocess"))[0].message == "preprocess raised Panic: the tokenizer panicked"
    )
    assert together(panic).run([1])[0].message == "predict raised Panic: the tokenizer panicked"


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


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def test_a_model_error_names_step_type_and_text_and_keeps_the_exception() -> None:
    error = caught(KeyError("x"))
    failure = steps.model_error("predict", error)
    assert failure.message == "predict raised KeyError: 'x'"
    assert failure.original_type == "KeyError"
    assert "test_steps.py" in failure.remote_traceback
    assert failure.__cause__ is error
    rude = steps.model_error("predict", caught(Rude()))
    assert rude.message == "predict raised Rude: (its text cannot be had)"
    assert rude.original_type.endswith("test_steps.Rude")


def test_a_text_without_end_is_cut() -> None:
    failure = steps.model_error("predict", caught(ValueError("x" * 10_000_000)))
    assert len(failure.message) < steps.MAX_TEXT + 100
    assert len(failure.remote_traceback) <= steps.MAX_TRACEBACK
    assert "test_steps.py" in failure.remote_traceback


class Staged(Model):
    """Every step of one item, and what each saw."""

    def preprocess(self, item: int) -> int:
        if item < 0:
            raise ValidationFailed("negative", details=[{"loc": [], "msg": "negative", "type": "value"}])
        if item == 13:
            raise LookupError("unlucky")
        return item + 1

    def predict(self, batch: list[int]) -> list[Any]:
        return [InvalidRequest("eight") if x == 8 else x * 10 for x in batch]

    def postprocess(self, item: int, preprocessed: int) -> Any:
        if item == 50:
            raise ZeroDivisionError("fifty")
        return item, preprocessed


def test_each_step_fails_alone() -> None:
    good, negative, unlucky, eight, fifty, last = run(Staged, [1, -1, 13, 7, 4, 2])
    assert (good, last) == ((20, 2), (30, 3))
    assert isinstance(negative, ValidationFailed)
    assert negative.details
    assert (type(unlucky), unlucky.original_type) == (ModelError, "LookupError")
    assert isinstance(eight, InvalidRequest)
    assert (type(fifty), fifty.original_type) == (ModelError, "ZeroDivisionError")
    assert "in postprocess" in fifty.remote_traceback


class InBatches(Model):
    """The batch forms win over the forms of one item."""

    def preprocess(self, item: int) -> int:
        raise AssertionError("never called")

    def preprocess_batch(self, items: list[int]) -> list[Any]:
        if 13 in items:
            raise LookupError("unlucky")
        return [InvalidRequest("negative") if item < 0 else item + 1 for item in items]

    def predict(self, batch: list[int]) -> list[int]:
        return batch

    def postprocess(self, item: int, *preprocessed: Any) -> int:
        raise AssertionError("never called")

    def postprocess_batch(self, items: list[int]) -> list[Any]:
        return [str(item) for item in items]


def test_batch_forms() -> None:
    first, negative, unlucky, last = run(InBatches, [1, -1, 13, 5])
    assert (first, last) == ("2", "6")
    assert isinstance(negative, InvalidRequest)
    assert unlucky.message == "preprocess_batch raised LookupError: unlucky"


@subcases("returned", [tuple, iter, numpy.array, lambda b: map(int, b), lambda b: (x for x in b)])
def test_a_list_a_tuple_an_array_and_an_iterator_are_taken(returned: Callable[[Any], Any]) -> None:
    def predict(self: Any, batch: list[int]) -> Any:
        return returned(batch)

    assert run(predict, [0, 1]) == [0, 1]


class Both(NamedTuple):
    """What is one object, though a tuple."""

    labels: int
    scores: int


class AnswerModel(pydantic.BaseModel):
    """What is one object, though it can be iterated: over its fields."""

    a: int
    b: int


class Table:
    """Is to numpy and to `len` what pandas.DataFrame is: two rows, and iterating yields the names of two columns."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        return numpy.zeros((2, 2))

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[str]:
        return iter(("labels", "scores"))


def test_an_endless_iterator_is_not_read_where_batches_are_filled_up() -> None:
    class Filled(Model):
        allowed_batch_sizes = (4,)

        def predict(self, batch: list[int]) -> Any:
            return (x for x in batch) if batch[0] else itertools.count()

    assert run(Filled, [1, 2]) == [1, 2]
    (error, _) = run(Filled, [0, 2])
    assert error.message.startswith(
        "predict returned more than 4 results for 4 items, must be one for each; predict gets a list"
    )


@subcases(
    ("returned", "text"),
    [
        ([1, 2, 3], "predict returned 3 results for 2 items"),
        ([], "predict returned 0 results for 2 items"),
        (None, "predict returned nothing (None) for 2 items, must be a list of 2"),
        (7, "predict returned an int for 2 items"),
        ("ab", "predict returned a str for 2 items"),
        ({1: 2, 3: 4}, "predict returned a dict for 2 items"),
        (numpy.array(3), "is not a list"),
        (UserDict({0: "a", 1: "b"}), "predict returned a UserDict for 2 items, must be a list of 2"),
        (MappingProxyType({0: "a", 1: "b"}), "returned a mappingproxy"),
        (bytearray(b"ab"), "returned a bytearray"),
        (memoryview(b"ab"), "returned a memoryview"),
        (array.array("d", [1, 2]), "returned an array"),
        (numpy.str_("ab"), "returned a str_"),
        (numpy.bytes_(b"ab"), "returned a bytes_"),
        (Both(1, 2), "returned a Both"),
        (AnswerModel(a=1, b=2), "returned an AnswerModel"),
        (Table(), "returned a Table"),
        (range(2), "returned a range"),
        (itertools.count(), "predict returned more than 2 results for 2 items"),
    ],
)
def test_a_wrong_count_or_type_names_both_numbers_and_is_not_retried(returned: Any, text: str) -> None:
    calls = []

    def predict(self: Any, batch: list[int]) -> Any:
        calls.append(len(batch))
        return returned

    outputs = run(predict, [1, 2])
    assert all(isinstance(output, ModelError) and text in output.message for output in outputs)
    assert calls == [2]


@subcases(
    ("postprocess", "wanted"),
    [
        (lambda item: item, False),
        (lambda item, preprocessed: item, True),
        (lambda item, original: item, True),
        (lambda item, preprocessed=None: item, True),
        (lambda item, threshold=0.5: item, False),
        (lambda item, *, threshold: item, False),
        (lambda item, *more: item, True),
        (lambda *items: items, True),
        (str, False),
        (dict.get, True),
        (max, False),
    ],
)
def test_whether_postprocess_wants_the_preprocessed_item(postprocess: Callable[..., Any], wanted: bool) -> None:
    assert steps.takes(postprocess, "preprocessed", 1) is wanted


class Sums(Model):
    inputs = (Tensor("x", "FP32", [-1, -1]), Tensor("w", "INT64", [-1]))
    outputs = (Tensor("sum", "FP64", [-1]),)

    def predict(self, batch: dict[str, Any]) -> Any:
        if (batch["x"] == 13).any():
            raise ValueError("unlucky")
        return {"sum": batch["x"].sum(axis=1) * batch["w"]}


def entry(*rows: list[float]) -> dict[str, Any]:
    return {"x": list(rows), "w": [1] * len(rows)}


def test_a_bad_entry_of_tensors_fails_alone() -> None:
    wide = {"x": [[1, 2, 3]], "w": [1]}
    good, wrong, unlucky, other_shape, last = run(Sums, [entry([1, 2]), {"x": []}, entry([1, 13]), wide, entry([5, 6])])
    assert (good["sum"].tolist(), last["sum"].tolist()) == ([3], [11])
    assert isinstance(wrong, InvalidRequest)
    assert (type(unlucky), unlucky.original_type) == (ModelError, "ValueError")
    assert other_shape["sum"].tolist() == [6]  # it should not have been in this batch, and is computed all the same


class Scaled(Sums):
    def preprocess(self, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "x": item["x"] * 10}

    def postprocess(self, item: dict[str, Any], *preprocessed: Any) -> Any:
        return {"sum": item["sum"] + len(preprocessed[0]["x"])}


def test_a_tensor_model_may_have_the_other_steps_too() -> None:
    assert [output["sum"].tolist() for output in run(Scaled, [entry([1, 2]), entry([3, 4], [5, 6])])] == [
        [31],
        [72, 112],
    ]


class Compiled(Model):
    allowed_batch_sizes = (8, 2)

    def predict(self, batch: list[Any]) -> list[Any]:
        assert len(batch) in (2, 8)
        return [(item, len(batch)) for item in batch]


def test_items_are_filled_up_with_the_last_one() -> None:
    assert run(Compiled, ["a"]) == [("a", 2)]
    assert run(Compiled, ["a", "b"]) == [("a", 2), ("b", 2)]
    assert run(Compiled, list("abc")) == [("a", 8), ("b", 8), ("c", 8)]


FOR_ONE = "predict gets a list of items, so you may have written it for one: "


@subcases(
    ("predict", "items"),
    [
        (lambda x: x**2, [3, 4]), (lambda x: x * 1.5, [3, 4]), (math.sqrt, [3, 4]), (lambda x: x + 1, [3]),
        (lambda x: x.upper(), ["a", "b"]), (lambda x: x["text"], [{"text": "a"}]), (lambda x: {x: 1}, ["a", "b"]),
        (lambda x: (each for each in x**2), [3, 4]),
    ],
)  # fmt: skip
def test_a_predict_for_one_item_that_raises_gets_the_hint(predict: Callable[[Any], Any], items: list[Any]) -> None:
    class ForOne(Model):
        def predict(self, batch: Any) -> Any:
            return predict(batch)

    for answer in run(ForOne, items):
        assert isinstance(answer, ModelError)
        assert FOR_ONE + "return [f(item) for item in batch]" in answer.message


@subcases(
    ("predict", "items"),
    [
        (lambda batch: [x + 1 for x in batch], [[1]]),  # the item is a list
        (lambda batch: [x + 1 for x in batch], ["a"]),
        (lambda batch: [x * x for x in batch], ["a"]),  # "can't multiply sequence by non-int of type 'str'"
        (lambda batch: [float(x) for x in batch], ["list"]),  # a ValueError
        (lambda batch: [None.listed for _ in batch], [1]),  # type: ignore[attr-defined]  # raises, with "listed" in its text
    ],
)
def test_other_mistakes_do_not_get_the_hint(predict: Callable[[Any], Any], items: list[Any]) -> None:
    class Mistaken(Model):
        def predict(self, batch: list[Any]) -> Any:
            return predict(batch)

    (answer,) = run(Mistaken, items)
    assert isinstance(answer, ModelError)
    assert FOR_ONE not in answer.message


@subcases(("file", "hint"), [("weights.pt", f" (the working directory is {os.getcwd()})"), ("/no/weights.pt", "")])
def test_a_relative_path_that_is_not_found_says_from_where(file: str, hint: str) -> None:
    error = FileNotFoundError(2, "No such file or directory", file)
    assert steps.load_error("load", error).message == f"load raised FileNotFoundError: {error}{hint}"


@pytest.mark.parametrize("answer", [math.nan, {"scores": [0.5, -math.inf]}, numpy.array([1.0, math.nan])])
def test_nan_that_json_writes_as_null_is_logged_once(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    writer = steps.ResultWriter(Model, (), "scores")
    assert b"null" in writer.write([None, answer], JSON)[1] and writer.write([answer], JSON)
    assert [each.getMessage() for each in caplog.records] == [
        "'scores' returned NaN or infinity, which JSON has only as null"
    ]


class Point(msgspec.Struct):
    x: int


class Ticket(pydantic.BaseModel):
    x: int


class Typed(Model):
    Input = Point


class TypedByPydantic(Model):
    Input = Ticket


class Numbers(Model):
    content_types = ("text/numbers",)

    def decode(self, body: bytes, content_type: str) -> Any:
        if body == b"secret":
            raise ValidationFailed("no secrets")
        return [int(word) for word in body.split()]


class Words(Model):
    content_types = ("text/words",)

    def decode(self, body: bytes) -> Any:  # type: ignore[override]  # the short form that the contract allows
        return body.split()


class Arrays(Numbers):
    inputs = (Tensor("x", "FP32", [-1, 2]),)
    outputs = (Tensor("y", "FP32", [-1]),)

    def decode(self, body: bytes, content_type: str) -> Any:
        return {"x": [super().decode(body, content_type)]}


def read(model: type[Model], payloads: list[Any], content_types: str | list[str]) -> list[Any]:
    return steps.Reader(model(), steps.ENDS_THE_PROCESS).read(payloads, content_types)


def test_json_msgpack_octets_and_python_values() -> None:
    value = {"a": [1, None, 0.5]}
    json, msgpack = msgspec.json.encode(value), msgspec.msgpack.encode(value)
    strange = object()
    assert read(Model, [json, memoryview(json)], JSON) == [value, value]
    assert read(Model, [msgpack], MSGPACK) == [value]
    assert read(Model, [b"\xff\x00", memoryview(b"abc")], OCTETS) == [b"\xff\x00", b"abc"]
    assert read(Model, [strange], OBJECT) == [strange]
    assert read(Model, [json, strange, msgpack], [JSON, OBJECT, MSGPACK]) == [value, strange, value]


@subcases("bad", [b"", b"{", b"NaN", b"[" * 10_000, b'"\xff"', b"1e999"])
def test_a_malformed_one_fails_alone(bad: bytes) -> None:
    before, error, after = read(Model, [b"1", bad, b"2"], JSON)
    assert (before, after) == (1, 2)
    assert isinstance(error, InvalidRequest)
    assert "application/json" in error.message


def test_a_body_beside_small_ones_may_not_have_too_many_lists() -> None:
    small, refused = read(Model, [b"[]", b"[" + 2 * ANY_CONTAINERS * b"[]," + b"[]]"], JSON)
    assert small == [] and isinstance(refused, TooLarge)


@subcases(("model", "content_type"), itertools.product([Typed, TypedByPydantic], [JSON, MSGPACK]))
def test_one_that_the_schema_refuses_fails_alone(model: type[Model], content_type: str) -> None:
    encode: Any = msgspec.json.encode if content_type == JSON else msgspec.msgpack.encode
    good, wrong, malformed = read(model, [encode({"x": 1}), encode({"x": "a"}), b"\x81"], content_type)
    assert good == model.Input(x=1)
    assert isinstance(wrong, ValidationFailed)
    assert wrong.details[0]["loc"] == ["x"]
    assert isinstance(malformed, InvalidRequest)


@subcases("model", [Typed, TypedByPydantic])
def test_python_values_and_octets_are_validated_too(model: type[Model]) -> None:
    item = model.Input(x=3)
    assert read(model, [item, {"x": 3}], OBJECT) == [item, item]
    assert isinstance(read(model, [{"x": math.pi}], OBJECT)[0], ValidationFailed)
    assert isinstance(read(model, [b"3"], OCTETS)[0], ValidationFailed)


def test_an_error_among_the_payloads_stays() -> None:
    error = InvalidRequest("cannot be unpickled")
    for content_type in (JSON, OBJECT, OCTETS, "image/png"):
        assert read(Model, [error], content_type) == [error]


def test_content_types_of_the_models_own() -> None:
    items = read(Numbers, [b"1 2", b"1 x", b"secret"], "text/numbers")
    assert items[0] == [1, 2]
    assert isinstance(items[1], InvalidRequest)
    assert "text/numbers" in items[1].message
    assert isinstance(items[1].__cause__, ValueError)
    assert isinstance(items[2], ValidationFailed)


def test_an_own_decoded_item_is_validated() -> None:
    class Own(Numbers):
        Input = list[int]

        def decode(self, body: bytes, content_type: str) -> Any:
            return {"a": 1} if body == b"odd" else super().decode(body, content_type)

    good, odd = read(Own, [b"1", b"odd"], "text/numbers")
    assert good == [1]
    assert isinstance(odd, ValidationFailed)


def test_own_types_without_decode_are_only_written() -> None:
    class OnlyWritten(Model):
        content_types = ("image/png",)

        def encode(self, value: Any, content_type: str) -> bytes:
            return bytes(value)

    assert isinstance(read(OnlyWritten, [b"a"], "image/png")[0], UnsupportedMediaType)


def test_an_unknown_content_type_is_named_with_the_known_ones() -> None:
    (error,) = read(Numbers, [b"?"], "image/png")
    assert isinstance(error, UnsupportedMediaType)
    assert "'image/png'" in error.message
    assert "application/json, application/msgpack, application/octet-stream, text/numbers" in error.message


class Picky(pydantic.BaseModel):
    x: int

    @pydantic.field_validator("x")
    @classmethod
    def look_up(cls, value: int) -> int:
        return {1: 1}[value]


def test_a_validator_that_breaks_is_the_models_error() -> None:
    class Breaking(Model):
        Input = Picky

    good, broken = read(Breaking, [b'{"x": 1}', b'{"x": 2}'], JSON)
    assert good.x == 1
    assert isinstance(broken, ModelError)
    assert broken.original_type == "KeyError"


def test_an_input_that_is_no_type() -> None:
    class Wrong(Model):
        Input = 3

    with pytest.raises(SettingsError, match=r"Wrong\.Input=3"):
        steps.Reader(Wrong(), steps.ENDS_THE_PROCESS)


def test_tensors_from_every_form() -> None:
    value = {"x": [[1, 2]]}
    payloads: list[Any] = [msgspec.json.encode(value), msgspec.msgpack.encode(value), value, b"1 2"]
    for arrays in read(Arrays, payloads, [JSON, MSGPACK, OBJECT, "text/numbers"]):
        assert arrays["x"].dtype == numpy.float32
        assert arrays["x"].tolist() == [[1, 2]]
    good, wrong, malformed = read(Arrays, [payloads[0], b'{"x": [1]}', b"{"], JSON)
    assert good["x"].shape == (1, 2)
    assert "tensor 'x': has shape [1]" in wrong.message
    assert isinstance(malformed, InvalidRequest)
    assert isinstance(read(Arrays, [b"12345678"], OCTETS)[0], UnsupportedMediaType)


def test_decode_without_the_content_type() -> None:
    assert read(Words, [b"a b"], "text/words") == [[b"a", b"b"]]


class PointOut(msgspec.Struct):
    x: float


class TicketOut(pydantic.BaseModel):
    x: float


class Shouting(Model):
    content_types = ("text/shout",)

    def encode(self, value: Any, content_type: str) -> Any:
        return value.upper().encode() if value != "count" else len(value)


class Joining(Model):
    content_types = ("text/words",)

    def encode(self, value: Any) -> bytes:  # type: ignore[override]  # the short form that the contract allows
        return " ".join(value).encode()


class Texts(Model):
    inputs = outputs = (Tensor("t", "BYTES", [-1]),)


def write(model: type[Model], answers: list[Any], accepts: str | list[str]) -> list[Any]:
    return steps.Writer(model(), steps.ENDS_THE_PROCESS).write(answers, accepts)


def test_answers_in_json_msgpack_octets_and_as_python_values() -> None:
    strange = object()
    assert write(Model, [1, {"a": numpy.float32(0.5)}], JSON) == [b"1", b'{"a":0.5}']
    assert write(Model, [[1]], MSGPACK) == [b"\x91\x01"]
    assert write(Model, [b"\xff", bytearray(b"a"), memoryview(b"b")], OCTETS) == [b"\xff", b"a", b"b"]
    assert write(Model, [strange], OBJECT) == [strange]
    assert write(Model, [1, strange, [1]], [JSON, OBJECT, MSGPACK]) == [b"1", strange, b"\x91\x01"]


def test_what_is_not_finite_is_null_in_json() -> None:
    assert write(Model, [math.nan, numpy.array([math.inf])], JSON) == [b"null", b"[null]"]


@subcases(("answer", "accept"), itertools.product([object(), "\ud800", {1j: 2}], [JSON, MSGPACK]))
def test_an_answer_that_cannot_be_written_is_the_models_error_alone(answer: Any, accept: str) -> None:
    good, bad = write(Model, [1, answer], accept)
    assert isinstance(good, bytes)
    assert isinstance(bad, ModelError)
    assert f"writing the result ({kind_of(answer)}) as {accept} raised" in bad.message


def test_octets_of_something_else_are_the_callers_error() -> None:
    good, bad = write(Model, [b"1", 1], OCTETS)
    assert good == b"1"
    assert isinstance(bad, UnsupportedMediaType)
    assert "the result is an int, only bytes are written so" in bad.message


def test_an_unknown_form_is_named_with_the_known_ones() -> None:
    error, before = write(Shouting, ["a", InvalidRequest("before")], "image/png")
    assert isinstance(error, UnsupportedMediaType)
    assert "application/json, application/msgpack, application/octet-stream, text/shout" in error.message
    assert before.message == "before"


def test_forms_of_the_models_own() -> None:
    good, no_bytes, broken = write(Shouting, ["hi", "count", 3], "text/shout")
    assert good == b"HI"
    assert no_bytes.message == "encode returned int for text/shout, must be bytes"
    assert isinstance(broken, ModelError)
    assert broken.original_type == "AttributeError"


def test_own_types_without_encode_are_only_read() -> None:
    class OnlyRead(Model):
        content_types = ("image/png",)

        def decode(self, body: bytes, content_type: str) -> Any:
            return body

    assert isinstance(write(OnlyRead, ["a"], "image/png")[0], UnsupportedMediaType)
    assert write(OnlyRead, ["a"], JSON) == [b'"a"']


@subcases("declared", [PointOut, TicketOut])
def test_answers_are_held_against_output(declared: Any) -> None:
    class Typed(Model):
        Output = declared

    answers = [{"x": 1.0}, declared(x=0.5), {"x": numpy.float32(0.5)}, {"x": "one"}, InvalidRequest("before")]
    *good, wrong, before = write(Typed, answers, JSON)
    assert good == [b'{"x":1.0}', b'{"x":0.5}', b'{"x":0.5}']
    assert isinstance(wrong, ModelError)
    assert wrong.message.startswith("the model's result is not a valid Output: ")
    assert wrong.details[0]["loc"] == ["x"]
    assert before.message == "before"
    assert write(Typed, [{"x": 1.0}], OBJECT) == [declared(x=1.0)]


def test_tensors_are_written_in_every_form() -> None:
    arrays = to_arrays({"t": ["ä", "b"]}, Texts.inputs)
    json, msgpack, value = write(Texts, [arrays] * 3, [JSON, MSGPACK, OBJECT])
    assert json == '{"t":["ä","b"]}'.encode()
    assert msgspec.msgpack.decode(msgpack) == {"t": ["ä".encode(), b"b"]}
    assert value is arrays
    (wrong,) = write(Texts, [to_arrays({"t": [b"\xff"]}, Texts.inputs)], JSON)
    assert isinstance(wrong, ModelError)


def test_encode_without_the_content_type() -> None:
    assert write(Joining, [["a", "b"]], "text/words") == [b"a b"]


@subcases("model", [Typed, TypedByPydantic])
def test_a_list_for_one_item_is_refused_with_the_path_for_several(model: type[Model]) -> None:
    (refused,) = read(model, [b'[{"x": 1}, {"x": 2}]'], JSON)
    assert type(refused) is ValidationFailed
    assert refused.message.endswith("; to send several items, POST the list to /infer/NAME/batch")
    (other,) = read(model, [b'{"x": "no"}'], JSON)
    assert "batch" not in other.message


def test_a_body_without_its_type_is_refused_with_the_types_that_are_read() -> None:
    (refused,) = read(Numbers, [b"\x89PNG\r\n"], JSON)
    assert type(refused) is InvalidRequest
    assert refused.message.endswith("; the model reads text/numbers: curl -H 'Content-Type: text/numbers'")
    (other,) = read(Numbers, [b"{"], JSON)
    assert "curl" not in other.message
