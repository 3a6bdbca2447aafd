"""collate.py: dispatches to batches, events to answers."""

import numpy
from tests.batching.mill import Asked, Mill, listed, many
from tests.rings import subcases

from weir.batching.collate import Lost, deliver, dropped_in, entries_of, fail_entries, is_done, responses_in, to_batch
from weir.batching.request_state import gathered
from weir.errors import InvalidRequest, ModelCrashed, ModelError, WorkerLost
from weir.messages import JSON, NO_RESPONSE, OBJECT, Dispatch, EventKind, Events, Kind, Reason, Wakeup


def tensors(rows: int) -> Asked:
    """Return a request of tensors."""
    return Asked({"x": numpy.arange(rows)}, kind=Kind.TENSORS, rows=rows)


def dispatch(*requests: Asked, slices: list[tuple[int, int] | None] | None = None, undivided: bool = False) -> Dispatch:
    """Return a dispatch of these."""
    rows = sum(request.form.rows for request in requests)
    return Dispatch(
        1, 0, list(requests), slices, rows, float(rows), Reason.IDLE, rows, 0.0, None, Wakeup.ARRIVAL, 0.0, 2, undivided
    )


def test_a_plain_batch() -> None:
    batch = to_batch(dispatch(*many(3), undivided=True))
    assert (batch.batch_id, batch.payloads, batch.content_types, batch.accepts, batch.attempt) == (
        1, [0, 1, 2], OBJECT, OBJECT, 2,
    )  # fmt: skip


def test_content_types_that_differ_are_listed_one_by_one() -> None:
    batch = to_batch(dispatch(Asked(b"1", content_type=JSON), Asked(2), listed(2, accept=JSON)))
    assert batch.payloads == [b"1", 2, 0, 1]
    assert batch.content_types == [JSON, OBJECT, OBJECT, OBJECT]
    assert batch.accepts == [OBJECT, OBJECT, JSON, JSON]


def test_entries_of_slices() -> None:
    first, second, third = Asked("item"), listed(9), tensors(9)
    batch = to_batch(cut := dispatch(first, second, third, slices=[None, (3, 5), (2, 4)]))
    assert batch.payloads[:3] == ["item", 3, 4]
    assert batch.payloads[3]["x"].tolist() == [2, 3]
    assert entries_of(cut) == [(first, 0, 1), (second, 3, 4), (second, 4, 5), (third, 2, 4)]
    assert entries_of(cut) is entries_of(cut)


def test_plain_answers_reach_those_that_still_wait() -> None:
    requests = many(3)
    requests[1].settled = True
    cut = dispatch(*requests, undivided=True)
    assert deliver(cut, Events(1, "abc")) == [(requests[0], "a"), (requests[2], "c")]  # type: ignore[arg-type]  # a text is a sequence too
    assert all(request.settled for request in requests)
    assert deliver(cut, Events(1, ["x", "y", "z"])) == []


def test_answers_one_by_one_in_any_order() -> None:
    first, second = Asked("item"), listed(2)
    cut = dispatch(first, second)
    error = InvalidRequest("bad")
    assert deliver(cut, Events(1, [error], indices=[2], kinds=[EventKind.ERROR], final=False)) == []
    assert is_done((second, 1, 2))
    assert not is_done((second, 0, 1))
    assert deliver(cut, Events(1, ["b"], indices=[1], final=False)) == [(second, ["b", error])]
    assert deliver(cut, Events(1, ["late"], indices=[1], final=False)) == []
    assert deliver(cut, Events(1, ["a"], indices=[0])) == [(first, "a")]


def test_parts_are_remembered_and_end_nothing() -> None:
    cut = dispatch(*many(2), undivided=True)
    kinds = [EventKind.PART, EventKind.DONE]
    assert deliver(cut, Events(1, ["part", "done"], kinds=kinds, final=False)) == [(cut.requests[1], "done")]
    assert cut.begun == {0}
    deliver(cut, Events(1, ["part"], indices=[0], kinds=[EventKind.PART], final=False))
    assert cut.begun == {0}


def test_the_answers_of_a_streaming_model() -> None:
    requests = many(4)
    cut = dispatch(*requests, undivided=True)
    kinds = [EventKind.PART, EventKind.DONE, EventKind.ERROR]
    events = Events(1, ["a", "b", InvalidRequest("c")], indices=[0, 1, 2], kinds=kinds, final=False)
    assert responses_in(cut, events) == ([(requests[0], "a")], requests[:2], requests[:2], [])
    assert [request for request, _ in deliver(cut, events)] == requests[1:3]
    events = Events(1, ["d", "late", "e", "nobody's"], indices=[0, 1, 3, 9], kinds=[EventKind.PART] * 4, final=False)
    assert responses_in(cut, events) == (
        [(requests[0], "d"), (requests[3], "e")], [requests[0], requests[3]], [requests[3]], ["late"],
    )  # fmt: skip
    assert dropped_in(cut, events) == []
    assert responses_in(cut, Events(1, ["late"], indices=[1], final=False)) == ([], [], [], [])
    final = Events(1, [b"", b""], indices=[0, 3], kinds=[EventKind.END] * 2)
    assert responses_in(cut, final) == ([], [], [], [])
    assert deliver(cut, final) == [(requests[0], NO_RESPONSE), (requests[3], NO_RESPONSE)]


def test_outputs_that_nobody_gets() -> None:
    gone, here = Asked("item"), listed(2)
    gone.settled = True
    cut = dispatch(gone, here)
    deliver(cut, Events(1, ["first"], indices=[1], final=False))
    assert dropped_in(cut, Events(1, ["a", "again", "c"])) == ["a", "again"]
    assert dropped_in(cut, Events(1, ["x"], indices=[7], final=False)) == ["x"]


def test_what_was_gathered_is_left_when_the_whole_fails() -> None:
    request = listed(3)
    assert gathered(request) == []
    deliver(dispatch(request), Events(1, ["a"], indices=[1], final=False))
    assert [each for each in gathered(request) if isinstance(each, str)] == ["a"]
    tensors = Asked({"x": numpy.zeros((4, 1))}, kind=Kind.TENSORS, rows=4)
    cut = dispatch(tensors, slices=[(0, 2)])
    deliver(cut, Events(1, [{"y": 1}], indices=[0], final=False))
    assert gathered(tensors) == [{"y": 1}]


@subcases("indices", [[0], [7], [-1], []])
def test_what_the_worker_forgot_fails_at_the_end(indices: list[int]) -> None:
    first, second = Asked(0), Asked(1)
    ends = deliver(dispatch(first, second, undivided=True), Events(1, ["x"] * len(indices), indices=indices))
    assert first.settled
    assert second.settled
    errors = {id(request): output for request, output in ends if isinstance(output, ModelError)}
    assert id(second) in errors
    assert (id(first) in errors) == (indices != [0])


def test_an_error_ends_tensors_at_once() -> None:
    request = tensors(9)
    first, second = dispatch(request, slices=[(0, 5)]), dispatch(request, slices=[(5, 9)])
    error = ModelError("bad")
    assert deliver(first, Events(1, [error], kinds=[EventKind.ERROR])) == [(request, error)]
    assert deliver(second, Events(1, [{"x": numpy.arange(4)}])) == []


def test_entries_that_do_not_run_again() -> None:
    alone, items, other = Asked(0), listed(2), Asked(1)
    cut = dispatch(alone, items, other)
    ends = fail_entries(Lost(cut, [(alone, 0, 1), (items, 0, 1)], [(other, 0, 1)]), "killed by signal 9")
    assert [request for request, _ in ends] == [alone, other]
    assert isinstance(ends[0][1], ModelCrashed)
    assert "killed by signal 9" in ends[0][1].message
    assert isinstance(ends[1][1], WorkerLost)
    assert ends[1][1].retry_after is not None
    ((request, output),) = deliver(cut, Events(1, ["b"], indices=[2]))
    assert request is items
    assert isinstance(output[0], ModelCrashed)
    assert output[1] == "b"


def test_tensors_larger_than_a_batch_are_divided_and_gathered_in_order() -> None:
    mill = Mill(max_batch_size=4, workers=2)
    request = tensors(11)
    first, second = mill.submit(request)
    mill.finish(second)
    mill.finish(first)
    mill.run_all()
    assert request.ends[0]["x"].tolist() == list(range(11))
