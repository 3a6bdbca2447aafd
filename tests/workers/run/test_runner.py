from collections.abc import Callable
from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rings import subcases
from tests.streaming_models import Count, Prefixes, Raising, Script
from tests.workers.runs import Predict, run, started

from weir import Last, Model, WeirError
from weir.errors import Cancelled, InvalidRequest, ModelError, ValidationFailed
from weir.messages import JSON, MSGPACK, OBJECT, Batch, EventKind, Events
from weir.model import Example, Tensor
from weir.workers.run.runner import RunnableModel, Runner, warmup_batches


class Square(Model):
    def predict(self, batch: list[Any]) -> list[Any]:
        if 13 in batch:
            raise ValueError("unlucky")
        return [x * x for x in batch]


class Life(Model):
    """Notes in which order things happen."""

    examples = (2, Example(3, 9))
    warmup_sizes = (1, 4)

    def __init__(self, **params: Any) -> None:
        self.params = params
        self.log: list[Any] = []

    def load(self) -> None:
        self.log.append(("load", self.worker_index))

    def predict(self, batch: list[Any]) -> list[Any]:
        self.log.append(("predict", batch))
        self.params["made"].append(self)
        return [x * x for x in batch]

    def unload(self) -> None:
        self.log.append("unload")


def test_the_order_of_a_life() -> None:
    made: list[Life] = []
    runner = started(Life, {"made": made, "power": 2}, worker_index=3)
    assert run(runner, [5]) == [25]
    runner.stop()
    assert made[0].params["power"] == 2
    assert made[0].log == [("load", 3), ("predict", [2]), ("predict", [2, 3, 2, 3]), ("predict", [5]), "unload"]


def test_a_model_that_accepts_it_receives_what_went_wrong_in_the_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []

    class Picky(Life):
        def predict(self, batch: list[Any]) -> list[Any]:
            raise ValueError("no")

        def unload(self, error: BaseException | None = None) -> None:
            told.append(error)
            raise OSError("nothing to free")

    with pytest.raises(ModelError, match="ValueError: no") as raised:
        started(Picky)
    assert told == [raised.value]
    assert "unload raised" in caplog.text


@subcases(
    ("attributes", "error", "message"),
    [
        ({"examples": (1, 13)}, ModelError, "example 1 in a batch of 8: predict raised ValueError: unlucky"),
        (
            {"Input": int, "examples": ("no number",)},
            ValidationFailed,
            "example 0 in a batch of 1",
        ),  # it runs the whole way
    ],
)
def test_a_warm_up_that_fails_names_the_example_and_the_size(
    attributes: dict[str, Any], error: type[WeirError], message: str
) -> None:
    with pytest.raises(error, match=f"warm-up of .*, {message}") as caught:
        started(type("Unlucky", (Square,), attributes))
    if isinstance(caught.value, ModelError):
        assert caught.value.original_type == "ValueError"
        assert "in predict" in caught.value.remote_traceback


@pytest.mark.parametrize(
    ("encode", "content_type", "decode"),
    [
        (msgspec.json.encode, JSON, msgspec.json.decode),
        (msgspec.msgpack.encode, MSGPACK, msgspec.msgpack.decode),
        (lambda value: value, OBJECT, lambda value: value),
    ],
)
@given(values=st.lists(st.integers(-1000, 1000) | st.just("no number")))
def test_bytes_in_bytes_out_and_bad_items_fail_alone(
    encode: Any, content_type: str, decode: Any, values: list[Any]
) -> None:
    outputs = run(Square, [encode(value) for value in values], content_type, content_type)
    for value, output in zip(values, outputs, strict=True):
        if value in ("no number", 13):
            assert isinstance(output, ModelError)
        else:
            assert decode(output) == value * value


def test_events_say_which_failed_and_how_long_it_took() -> None:
    runner = started(Square)
    clean = runner.compute(runner.prepare(Batch(7, [b"1", b"2"], JSON, JSON)))
    assert (clean.batch_id, clean.outputs, clean.indices, clean.kinds) == (7, [b"1", b"4"], None, None)
    assert clean.final
    mixed = runner.compute(runner.prepare(Batch(8, [b"1", b"{"], JSON, JSON)))
    assert mixed.kinds == [EventKind.DONE, EventKind.ERROR]
    assert mixed.timing is not None
    assert all(seconds >= 0 for seconds in mixed.timing)


def test_cancelled_entries_are_not_computed() -> None:
    seen: list[Any] = []

    def predict(self: Any, batch: list[Any]) -> list[Any]:
        seen.append(batch)
        return batch

    runner = started(predict)
    events = runner.compute(runner.prepare(Batch(1, [0, 1, 2, 3], OBJECT, JSON)), {0, 2, 3})
    assert seen == [[1]]
    assert events.outputs[1] == b"1"
    assert [type(output) for output in events.outputs[2:]] == [Cancelled, Cancelled]
    runner.compute(runner.prepare(Batch(2, [0], OBJECT, JSON)), {0})
    assert seen == [[1]]  # nobody was left


class Doubled(Model):
    inputs = (Tensor("x", "FP32", [-1, 2]),)
    outputs = (Tensor("y", "FP32", [-1, 2]),)
    examples = ({"x": [[1, 2]]},)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"] * 2}


def test_a_tensor_model_warms_up_and_answers() -> None:
    array = numpy.ones((3, 2), numpy.float32)
    array.setflags(write=False)  # as it comes from shared memory
    objects, text = run(Doubled, [{"x": array}, b'{"x": [[0.5, 1]]}'], [OBJECT, JSON], [OBJECT, JSON])
    assert objects["y"].tolist() == [[2, 2]] * 3
    assert text == b'{"y":[[1.0,2.0]]}'


@subcases("shared", [False, True])
def test_a_model_sees_the_batch_size_that_holds(shared: bool) -> None:
    class Sees(Model):
        max_batch_size = 64

        def load(self) -> None:
            self.seen = self.max_batch_size

        def predict(self, batch: list[Any]) -> list[Any]:
            return [self.seen for _ in batch]

    given = Sees() if shared else None
    runner = Runner(RunnableModel(Sees, {}, 4), 0, shared=given)
    runner.start()
    assert run(runner, [0]) == [4]
    assert Sees.max_batch_size == 64


class Plain(Model):
    examples = (1, Example(2, 4), (3, 4))


class Arrays(Model):
    inputs = (Tensor("x", "FP32", [-1, 2]),)
    outputs = (Tensor("y", "FP32", [-1]),)
    examples = ({"x": [[1, 2], [3, 4]]},)


@subcases(
    ("own", "largest", "sizes"),
    [
        (None, 1, [1]), (None, 2, [1, 2]), (None, 64, [1, 8, 64]), (None, 100, [1, 10, 100]),
        ((32, 4, 128), 64, [4, 32, 64]), ((), 64, []),
    ],
)  # fmt: skip
def test_warm_up_batches_have_a_few_sizes_or_the_models_own(own: Any, largest: int, sizes: list[int]) -> None:
    model = Plain if own is None else type("Own", (Plain,), {"warmup_sizes": own})
    assert [len(batch.payloads) for batch in warmup_batches(model, largest)] == sizes


def test_batches_are_filled_with_the_examples_in_turn() -> None:
    batches = [batch.payloads for batch in warmup_batches(Plain, 4)]
    assert batches == [[1], [1, 2], [1, 2, (3, 4), 1]]
    assert list(warmup_batches(Model, 4)) == []


def test_tensors_are_repeated_up_to_the_rows() -> None:
    rows: list[Any] = [[len(entry["x"]) for entry in batch.payloads] for batch in warmup_batches(Arrays, 9)]
    assert rows == [[2], [2], [2, 2, 2, 2]]
    assert next(warmup_batches(Arrays, 9)).payloads[0]["x"].dtype == numpy.float32


# The generator of a streaming model, driven by a Runner.


def stream(
    model: type[Model] | Predict, payloads: list[Any], content_type: str | list[str] = OBJECT, accept: str | list[str] = OBJECT,
    cancelled: Any = (), restarted: Callable[[], None] | None = None,
) -> list[Events]:  # fmt: skip
    runner = started(model, max_batch_size=8, streaming=True)
    return list(runner.stream(runner.prepare(Batch(1, payloads, content_type, accept)), cancelled, restarted))


def told(events: list[Events]) -> list[tuple[int, str, Any]]:
    """Entry, kind and output of every event, in order."""
    return [
        (index, EventKind(kind).name, f"{type(output).__name__}: {output}" if isinstance(output, WeirError) else output)
        for each in events
        for index, kind, output in zip(each.indices or (), each.kinds or (), each.outputs, strict=True)
    ]


def test_each_yield_is_sent_at_once_and_the_return_is_the_end() -> None:
    events = stream(Count, [2, 1])
    assert [each.final for each in events] == [False, False, True]
    assert told(events) == [
        (0, "PART", 1), (1, "PART", 1), (0, "PART", 2), (0, "END", b""), (1, "END", b""),
    ]  # fmt: skip
    assert events[-1].timing is not None
    assert all(each.timing is None for each in events[:-1])


def test_last_and_errors_end_an_item_alone_and_what_comes_after_is_dropped() -> None:
    events = stream(Script, [["a", {"last": "b"}, "dropped"], [{"error": "no"}, "dropped", "too"], [None, None, "c"]])
    assert told(events) == [
        (0, "PART", "a"), (1, "ERROR", "InvalidRequest: no"), (0, "DONE", "b"), (2, "PART", "c"), (2, "END", b""),
    ]  # fmt: skip


def test_a_yield_returns_who_is_at_the_end() -> None:
    seen: list[frozenset[int]] = []
    cancelled = {3}

    def predict(self: Any, batch: list[Any]) -> Any:
        seen.append((yield {0: Last("a")}))
        cancelled.add(2)
        seen.append((yield {}))
        seen.append((yield {1: "b", 2: "nobody reads it"}))

    events = stream(predict, list("abcd"), cancelled=cancelled)
    assert seen == [frozenset({0, 3}), frozenset({0, 2, 3}), frozenset({0, 2, 3})]
    assert told(events) == [(0, "DONE", "a"), (1, "PART", "b"), (1, "END", b"")]


def test_indices_are_those_of_the_list_that_predict_got() -> None:
    class Picky(Model):
        streaming = True

        def preprocess(self, item: Any) -> Any:
            if item == "bad":
                raise InvalidRequest("bad")
            return item

        def predict(self, batch: list[Any]) -> Any:
            yield dict(enumerate(batch))

    assert told(stream(Picky, ["bad", "good", "bad", "better"])) == [
        (0, "ERROR", "InvalidRequest: bad"), (2, "ERROR", "InvalidRequest: bad"),
        (1, "PART", "good"), (3, "PART", "better"), (1, "END", b""), (3, "END", b""),
    ]  # fmt: skip


def test_the_generator_is_closed_when_nobody_is_left() -> None:
    closed: list[str] = []

    def predict(self: Any, batch: list[Any]) -> Any:
        try:
            while True:
                yield {0: Last("only")}
        finally:
            closed.append("closed")

    events = stream(predict, ["x"])
    assert closed == ["closed"]
    assert told(events) == [(0, "DONE", "only")]
    assert events[-1].final


def test_a_batch_that_everybody_has_left_is_not_begun() -> None:
    assert told(stream(Raising, ["now", "now"], cancelled={0, 1})) == []


def test_an_error_before_the_first_yield_is_searched_for_in_halves() -> None:
    restarts: list[None] = []
    events = stream(Raising, ["a", "now", "b"], restarted=lambda: restarts.append(None))
    assert told(events) == [
        (0, "PART", "a"), (0, "PART", "A"), (0, "END", b""),
        (1, "ERROR", "ModelError: predict raised RuntimeError: not today"),
        (2, "PART", "b"), (2, "PART", "B"), (2, "END", b""),
    ]  # fmt: skip
    assert len(restarts) == 4
    assert sum(each.final for each in events) == 1


def test_an_error_amid_the_stream_is_of_all_who_have_no_end() -> None:
    error = "ModelError: predict raised RuntimeError: not tomorrow"
    assert told(stream(Raising, ["a", "later"])) == [
        (0, "PART", "a"), (1, "PART", "later"), (0, "ERROR", error), (1, "ERROR", error),
    ]  # fmt: skip


def test_a_stream_for_one_item_that_raises_gets_the_hint() -> None:
    def predict(self: Any, text: Any) -> Any:
        for index, word in enumerate(text.split()):
            yield {index: word}

    ((_, kind, message),) = told(stream(predict, ["a b"]))
    assert kind == "ERROR"
    assert message.endswith("so you may have written it for one: yield {index: result, ...} for all items")


@subcases(
    ("given", "message"),
    [
        ("text", "predict yielded a str, must be a dict of results by index"),
        ({7: "x"}, "predict yielded a result for item 7 of a batch of 1"),
        ({-1: "x"}, "predict yielded a result for item -1 of a batch of 1"),
        ({"0": "x"}, "predict yielded a result for item '0' of a batch of 1"),
    ],
)
def test_what_may_not_be_yielded(given: Any, message: str) -> None:
    def predict(self: Any, batch: list[Any]) -> Any:
        yield given

    assert told(stream(predict, ["x"])) == [(0, "ERROR", f"ModelError: {message}")]


def test_predict_must_be_a_generator() -> None:
    def predict(self: Any, batch: list[Any]) -> Any:
        return batch

    text = "ModelError: predict returned a list, must be a generator as the model is streaming"
    assert told(stream(predict, ["x"])) == [(0, "ERROR", text)]


def test_answers_are_postprocessed_and_written_as_each_caller_wants_them() -> None:
    class Dressed(Model):
        streaming = True
        Output = int

        def predict(self, batch: list[Any]) -> Any:
            yield dict(enumerate(batch))

        def postprocess(self, item: Any, preprocessed: Any) -> Any:
            return item * preprocessed

    assert told(stream(Dressed, [3, b"4", "no"], [OBJECT, JSON, OBJECT], [OBJECT, JSON, OBJECT])) == [
        (0, "PART", 9), (1, "PART", b"16"),
        (2, "ERROR", "ModelError: postprocess raised TypeError: can't multiply sequence by non-int of type 'str'"),
        (0, "END", b""), (1, "END", b""),
    ]  # fmt: skip


def test_a_model_that_raises_when_it_is_closed_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def predict(self: Any, batch: list[Any]) -> Any:
        try:
            yield {0: Last("x")}
        finally:
            raise RuntimeError("I will not go")

    assert told(stream(predict, ["x"])) == [(0, "DONE", "x")]
    assert "predict raised when its generator was closed" in caplog.text


def test_tensor_models_get_a_dict_of_arrays_for_each_request() -> None:
    items = [{"x": [[1, 2], [3, 4]]}, {"x": [[5, 6]]}]
    events = stream(Prefixes, items)
    sums = [(index, output["sum"].tolist(), output["rows"].tolist()) for index, kind, output in told(events) if output]
    assert sums == [(0, [[1, 2]], [1]), (1, [[5, 6]], [1]), (0, [[4, 6]], [2])]


def test_tensors_are_held_against_the_declaration() -> None:
    class Wrong(Prefixes):
        def predict(self, batch: list[Any]) -> Any:
            yield {0: {"sum": [[1, 2]]}}

    text = "ModelError: predict returned wrong tensors: tensor 'rows': is missing, the model declares 'sum', 'rows'"
    assert told(stream(Wrong, [{"x": [[1, 2]]}])) == [(0, "ERROR", text)]


def test_whoever_gives_up_closes_the_generator() -> None:
    closed: list[str] = []

    class Endless(Model):
        streaming = True

        def predict(self, batch: list[Any]) -> Any:
            try:
                while True:
                    yield {0: "x"}
            finally:
                closed.append("closed")

    runner = started(Endless)
    given = runner.stream(runner.prepare(Batch(1, ["x"], OBJECT, OBJECT)))
    next(given)
    given.close()
    assert closed == ["closed"]
