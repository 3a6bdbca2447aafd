"""The generator of a streaming model, driven by a Runner."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
from tests.streaming_models import Count, Prefixes, Raising, Script
from tests.workers.runs import started

from weir import InvalidRequest, Last, Model, ModelError, WeirError
from weir.messages import JSON, OBJECT, Batch, EventKind, Events


def stream(
    model: type[Model], payloads: list[Any], content_type: str | list[str] = OBJECT, accept: str | list[str] = OBJECT,
    cancelled: Any = (), restarted: Callable[[], None] | None = None,
) -> list[Events]:  # fmt: skip
    runner = started(model, max_batch_size=8)
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

    class Asking(Model):
        streaming = True

        def predict(self, batch: list[Any]) -> Any:
            seen.append((yield {0: Last("a")}))
            cancelled.add(2)
            seen.append((yield {}))
            seen.append((yield {1: "b", 2: "nobody reads it"}))

    events = stream(Asking, list("abcd"), cancelled=cancelled)
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

    class Endless(Model):
        streaming = True

        def predict(self, batch: list[Any]) -> Any:
            try:
                while True:
                    yield {0: Last("only")}
            finally:
                closed.append("closed")

    events = stream(Endless, ["x"])
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("text", "predict yielded a str, must be a dict of answers by index"),
        ({7: "x"}, "predict yielded an answer to item 7 of a batch of 1"),
        ({-1: "x"}, "predict yielded an answer to item -1 of a batch of 1"),
        ({"0": "x"}, "predict yielded an answer to item '0' of a batch of 1"),
    ],
)
def test_what_may_not_be_yielded(given: Any, message: str) -> None:
    class Wrong(Model):
        streaming = True

        def predict(self, batch: list[Any]) -> Any:
            yield given

    assert told(stream(Wrong, ["x"])) == [(0, "ERROR", f"ModelError: {message}")]


def test_numpys_integers_are_indices_too() -> None:
    class Numbered(Model):
        streaming = True

        def predict(self, batch: list[Any]) -> Any:
            yield {numpy.int64(0): "x"}

    assert told(stream(Numbered, ["x"]))[0] == (0, "PART", "x")


def test_predict_must_be_a_generator() -> None:
    class Plain(Model):
        streaming = True

        def predict(self, batch: list[Any]) -> Any:
            return batch

    text = "ModelError: predict returned a list, must be a generator as the model is streaming"
    assert told(stream(Plain, ["x"])) == [(0, "ERROR", text)]


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
    class Stubborn(Model):
        streaming = True

        def predict(self, batch: list[Any]) -> Any:
            try:
                yield {0: Last("x")}
            finally:
                raise RuntimeError("I will not go")

    assert told(stream(Stubborn, ["x"])) == [(0, "DONE", "x")]
    assert "predict raised when it was told that nobody is left" in caplog.text


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


def test_a_failing_warm_up_fails_the_start() -> None:
    class Cold(Raising):
        examples = ("later",)

    with pytest.raises(ModelError, match="warm-up, example 0 of 1 at once: predict raised RuntimeError"):
        started(Cold, max_batch_size=8)


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
