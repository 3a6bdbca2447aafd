"""What is sent again, and when: time is an argument."""

from concurrent.futures import Future
from typing import Any

import pytest

from weir.client.embedding_flights import MOST_ASKED, Flight, Flights
from weir.client.failures import Unreachable
from weir.client.retrying import NEVER, Retry
from weir.errors import Cancelled, DeadlineExceeded, InvalidRequest, Overloaded
from weir.wire.zeromq import CANCEL, PENDING, Answer, Failed, Said, Wishes


def flight(deadline: float = 60.0) -> Flight:
    future: Future[Any] = Future()
    return Flight(b'["a"]', 1, Wishes(model="m"), deadline, future, 0.0)


def answer(number: int, **said: Any) -> Answer:
    return Answer(b"", number, Said(**said), None)


def test_a_request_says_how_much_time_is_left() -> None:
    flights = Flights("tcp://x", NEVER)
    sending = flights.add(5, flight(), 20.0)
    assert (sending.payload, sending.number, sending.size, sending.wishes.timeout) == (b'["a"]', 5, 1, 40.0)
    assert sending.wishes.model == "m"


def test_an_answer_ends_a_request() -> None:
    flights, one = Flights("tcp://x", NEVER), flight()
    flights.add(5, one, 0.0)
    assert flights.answered(answer(5), 1.0) == []
    assert one.future.result(0) == answer(5)
    assert flights.answered(answer(5), 1.0) == []  # once more, to nobody
    assert flights.next() is None
    assert len(flights) == 0


def test_what_the_server_does_not_know_is_sent_again() -> None:
    flights = Flights("tcp://x", NEVER)
    flights.add(5, flight(), 0.0)
    flights.add(6, flight(), 0.5)
    assert flights.next() == 1.0
    assert flights.due(0.9, 90) == []
    (asking,) = flights.due(1.0, 91)
    assert (asking.payload, asking.number, asking.wishes.ids) == (PENDING, 91, [5])
    assert flights.next() == 1.5
    (again,) = flights.answered(answer(91, unknown=[5, 8]), 1.2)
    assert (again.number, again.wishes.timeout) == (5, 58.8)
    assert flights.answered(answer(92, unknown=[]), 1.3) == []


def test_so_many_are_asked_about_at_a_time() -> None:
    flights = Flights("tcp://x", NEVER)
    for number in range(MOST_ASKED + 5):
        flights.add(number, flight(), 0.0)
    assert [len(flights.due(1.0, 9999)[0].wishes.ids) for _ in range(2)] == [MOST_ASKED, 5]


def test_what_is_refused_for_now_is_sent_again_later() -> None:
    flights, one = Flights("tcp://x", Retry(times=1, first_wait=0.1)), flight()
    flights.add(5, one, 0.0)
    full = Failed("Overloaded", "full", 429, 2.0)
    assert flights.answered(answer(5, error=full), 1.0) == []
    assert flights.next() == 3.0
    assert flights.due(2.9, 90) == []
    assert flights.answered(answer(90, unknown=[5]), 2.95) == []  # it knows that the server has refused it
    assert [each.number for each in flights.due(3.0, 91)] == [5]
    flights.answered(answer(5, error=full), 3.5)
    with pytest.raises(Overloaded, match="full"):
        one.future.result(0)


def test_what_there_is_no_time_for_is_not_sent_again() -> None:
    flights, one = Flights("tcp://x", Retry(times=9)), flight(deadline=2.0)
    flights.add(5, one, 0.0)
    flights.answered(answer(5, error=Failed("Overloaded", "full", 429, 2.0)), 0.5)
    assert isinstance(one.future.exception(0), Overloaded)


def test_what_is_at_fault_itself_fails() -> None:
    flights, one = Flights("tcp://x", Retry(times=9)), flight()
    flights.add(5, one, 0.0)
    flights.answered(answer(5, error=Failed("InvalidRequest", "texts[3]", 400)), 0.5)
    assert isinstance(one.future.exception(0), InvalidRequest)


def test_what_is_late_ends_and_is_taken_back() -> None:
    flights, one, two = Flights("tcp://x", NEVER), flight(0.5), flight(0.7)
    flights.add(5, one, 0.0)
    flights.add(6, two, 0.0)
    (cancel,) = flights.due(0.6, 90)
    assert (cancel.payload, cancel.wishes.ids) == (CANCEL, [5])
    assert isinstance(one.future.exception(0), Unreachable)
    flights.answered(answer(90, unknown=[]), 0.65)
    flights.due(0.7, 91)
    assert isinstance(two.future.exception(0), DeadlineExceeded)


def test_a_caller_gives_up() -> None:
    flights, one = Flights("tcp://x", NEVER), flight()
    flights.add(5, one, 0.0)
    one.future.cancel()
    flights.answered(answer(5), 0.1)  # crosses its cancelling
    flights.add(6, flight(), 0.0)
    assert flights.cancelled(6)
    assert not flights.cancelled(6)


def test_the_end_ends_all() -> None:
    flights, one, two = Flights("tcp://x", NEVER), flight(), flight()
    flights.add(5, one, 0.0)
    flights.add(6, two, 0.0)
    two.future.cancel()
    assert flights.end(Cancelled("closed")) == [5, 6]
    assert isinstance(one.future.exception(0), Cancelled)
