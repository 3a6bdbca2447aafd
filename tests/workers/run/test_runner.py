from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.workers.runs import run, started

from weir.errors import Cancelled, InvalidRequest, ModelError, ValidationFailed
from weir.messages import JSON, MSGPACK, OBJECT, OCTETS, Batch, EventKind
from weir.model import Example, Model, Tensor
from weir.workers.run.runner import Runner, warmup_batches, warmup_sizes


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


def test_a_model_that_wants_to_know_is_told_what_went_wrong_in_the_warm_up(caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize("step", ["__init__", "load"])
def test_what_constructor_or_load_raise_is_raised(step: str) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no weights")

    with pytest.raises(OSError, match="no weights"):
        started(type("Broken", (Square,), {step: fail}))


def test_unknown_parameters() -> None:
    with pytest.raises(TypeError, match="takes no arguments"):
        started(Square, {"power": 3})


def test_a_warm_up_that_fails_names_the_example_and_the_size() -> None:
    class Unlucky(Square):
        examples = (1, 13)

    with pytest.raises(
        ModelError, match="warm-up, example 1 of 8 at once: predict raised ValueError: unlucky"
    ) as caught:
        started(Unlucky)
    assert caught.value.original_type == "ValueError"
    assert "in predict" in caught.value.remote_traceback


def test_a_warm_up_runs_the_whole_way() -> None:
    class Typed(Square):
        Input = int
        examples = ("no number",)

    with pytest.raises(ValidationFailed, match="warm-up, example 0 of 1"):
        started(Typed)


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
    assert (clean.batch_id, clean.outputs, clean.indices, clean.kinds, clean.final) == (
        7,
        [b"1", b"4"],
        None,
        None,
        True,
    )
    mixed = runner.compute(runner.prepare(Batch(8, [b"1", b"{"], JSON, JSON)))
    assert mixed.kinds == [EventKind.DONE, EventKind.ERROR]
    assert isinstance(mixed.outputs[1], InvalidRequest)
    assert mixed.timing is not None
    assert all(seconds >= 0 for seconds in mixed.timing)


def test_each_answer_in_the_form_asked_for() -> None:
    assert run(Square, [b"2", 3, b"\x04"], [JSON, OBJECT, MSGPACK], [MSGPACK, JSON, OBJECT]) == [b"\x04", b"9", 16]


def test_cancelled_entries_are_not_computed() -> None:
    seen: list[Any] = []

    class Seen(Model):
        def predict(self, batch: list[Any]) -> list[Any]:
            seen.append(batch)
            return batch

    runner = started(Seen)
    events = runner.compute(runner.prepare(Batch(1, [0, 1, 2, 3], OBJECT, JSON)), {0, 2, 3})
    assert seen == [[1]]
    assert events.outputs[1] == b"1"
    assert [type(output) for output in events.outputs[2:]] == [Cancelled, Cancelled]
    runner.compute(runner.prepare(Batch(2, [0], OBJECT, JSON)), {0})
    assert seen == [[1]]  # nobody was left


def test_the_time_limit_starts_anew_for_each_half() -> None:
    restarts: list[None] = []
    runner = started(Square)
    runner.compute(runner.prepare(Batch(1, [1, 2, 3, 13], OBJECT, OBJECT)), (), lambda: restarts.append(None))
    assert len(restarts) == 4


def test_without_retry_the_whole_batch_fails() -> None:
    outputs = run(Square, [1, 13, 3], retry_in_halves=False)
    assert [output.original_type for output in outputs] == ["ValueError"] * 3
    assert isinstance(outputs[0].__cause__, ValueError)


def test_ahead_and_after_are_independent() -> None:
    runner = started(Square)
    first, second = (runner.prepare(Batch(number, [number], OBJECT, OBJECT)) for number in (2, 3))
    assert runner.compute(second).outputs == [9]
    assert runner.compute(first).outputs == [4]


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_what_ends_a_process_passes_through(end: type[BaseException]) -> None:
    class Ending(Square):
        def predict(self, batch: list[Any]) -> list[Any]:
            raise end

    with pytest.raises(end):
        run(Ending, [1])
    assert run(started(Ending, fatal=()), [1])[0].original_type == end.__name__


class Pictures(Model):
    def predict(self, batch: list[bytes]) -> list[bytes]:
        return [picture[::-1] for picture in batch]


def test_opaque_bodies() -> None:
    assert run(Pictures, [b"abc", memoryview(b"xyz")], OCTETS, OCTETS) == [b"cba", b"zyx"]


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


def test_a_runner_is_made_without_doing_anything() -> None:
    class Never(Square):
        def __init__(self) -> None:
            raise AssertionError("made too early")

    Runner(Never, {}, worker_index=0, max_batch_size=1, retry_in_halves=True)


@pytest.mark.parametrize("shared", [False, True])
def test_a_model_sees_the_batch_size_that_holds(shared: bool) -> None:
    class Sees(Model):
        max_batch_size = 64

        def load(self) -> None:
            self.seen = self.max_batch_size

        def predict(self, batch: list[Any]) -> list[Any]:
            return [self.seen for _ in batch]

    given = Sees() if shared else None
    runner = Runner(Sees, {}, worker_index=0, max_batch_size=4, retry_in_halves=True, shared=given)
    runner.start()
    assert run(runner, [0]) == [4]
    assert Sees.max_batch_size == 64


class Plain(Model):
    examples = (1, Example(2, 4), (3, 4))


class Arrays(Model):
    inputs = (Tensor("x", "FP32", [-1, 2]),)
    outputs = (Tensor("y", "FP32", [-1]),)
    examples = ({"x": [[1, 2], [3, 4]]},)


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (2, [1, 2]), (64, [1, 8, 64]), (100, [1, 10, 100])])
def test_sizes(largest: int, sizes: list[int]) -> None:
    assert warmup_sizes(Plain, largest) == sizes


def test_own_sizes_are_kept_within_the_largest() -> None:
    class Own(Plain):
        warmup_sizes = (32, 4, 128)

    class NoWarmup(Plain):
        warmup_sizes = ()

    assert warmup_sizes(Own, 64) == [4, 32, 64]
    assert list(warmup_batches(NoWarmup, 64)) == []


def test_batches_are_filled_with_the_examples_in_turn() -> None:
    batches = [batch.payloads for batch in warmup_batches(Plain, 4)]
    assert batches == [[1], [1, 2], [1, 2, (3, 4), 1]]
    assert list(warmup_batches(Model, 4)) == []


def test_tensors_are_repeated_up_to_the_rows() -> None:
    rows: list[Any] = [[len(entry["x"]) for entry in batch.payloads] for batch in warmup_batches(Arrays, 9)]
    assert rows == [[2], [2], [2, 2, 2, 2]]
    assert next(warmup_batches(Arrays, 9)).payloads[0]["x"].dtype == numpy.float32
