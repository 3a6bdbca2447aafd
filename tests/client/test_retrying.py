"""What is sent again: programs run step by step, without a connection and without waiting."""

from typing import Any

import pytest

from weir import errors
from weir.client import NEVER, ConnectionLost, Retry, Unreachable
from weir.client.calls import Program, Sleep
from weir.client.http_calls import HttpCalls, HttpReply
from weir.client.retrying import retried

LIVE = HttpReply(200, {}, b'{"models": ["a"]}')


def waits(retry: Retry, replies: list[Any]) -> tuple[Any, list[float]]:
    """Return what comes of asking for the models while the server gives `replies`, and the waits in between."""
    program: Program[Any] = retried(retry, HttpCalls().models)
    waited: list[float] = []
    given: Any = None
    while True:
        try:
            step = program.throw(given) if isinstance(given, Exception) else program.send(given)
        except StopIteration as end:
            return end.value, waited
        except errors.WeirError as error:
            return error, waited
        if isinstance(step, Sleep):
            waited.append(step.seconds)
            given = None
        else:
            given = replies.pop(0)


def refusal(status: int, name: str = "", **headers: str) -> HttpReply:
    return HttpReply(status, {**({"weir-error": name} if name else {}), **headers}, b'{"error": "no"}')


def test_a_full_line_is_tried_again_after_the_servers_wait() -> None:
    assert waits(Retry(), [refusal(429, **{"retry-after": "3"}), LIVE]) == (["a"], [3.0])


def test_without_one_waits_double() -> None:
    retry = Retry(times=4, first_wait=0.5, longest_wait=1.5)
    refused = [refusal(503), Unreachable("nobody"), refusal(503), refusal(503)]
    assert waits(retry, [*refused, LIVE]) == (["a"], [0.5, 1.0, 1.5, 1.5])


def test_it_is_not_tried_for_ever() -> None:
    end, waited = waits(Retry(times=1), [refusal(503, "Draining"), refusal(429)])
    assert (type(end), len(waited)) == (errors.Overloaded, 1)
    end, waited = waits(NEVER, [refusal(503, "Draining")])
    assert (type(end), waited) == (errors.Draining, [])


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (refusal(500, "ModelCrashed"), errors.ModelCrashed),
        (refusal(503, "WorkerLost"), errors.WorkerLost),
        (refusal(500), errors.ModelError),
        (refusal(400), errors.InvalidRequest),
        (refusal(408), errors.DeadlineExceeded),
        (ConnectionLost("gone"), ConnectionLost),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_a_model_may_have_been_given_is_never_sent_again(reply: Any, kind: type[Exception]) -> None:
    end, waited = waits(Retry(), [reply, LIVE])
    assert (type(end), waited) == (kind, [])


def test_where_there_is_no_time_for_the_wait_the_refusal_is_the_end() -> None:
    program = retried(Retry(), HttpCalls().models)
    next(program)
    assert program.send(refusal(429, **{"retry-after": "60"})) == Sleep(60.0)
    with pytest.raises(errors.Overloaded, match="no"):
        program.throw(errors.DeadlineExceeded("no time"))
