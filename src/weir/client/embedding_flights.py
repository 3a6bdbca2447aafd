"""Requests over ZeroMQ that are under way: what must be sent for them again, and when they end. No I/O; `now` is an argument.

ZeroMQ tells nobody that a message was lost, with a connection or a server. So the server is asked now and then which of the
requests it does not know, and gets those once more: encoding the same text twice does no harm.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from weir.client.failures import Unreachable, of_status
from weir.client.retrying import Retry
from weir.errors import DeadlineExceeded, WeirError
from weir.wire import zeromq
from weir.wire.zeromq import Answer, Failed, Wishes

ASK_INTERVAL = 1.0  # seconds without an answer after which the server is asked whether it knows a request
MOST_ASKED = 1000  # requests that it is asked about at a time


@dataclass
class Flight:
    """A request under way."""

    payload: bytes
    size: int
    wishes: Wishes
    deadline: float
    future: "Future[Any]"
    asked: float  # when it was sent, or last asked about
    tried: int = 0
    again: float | None = None  # when to send it again; the server has refused it


class Sending(NamedTuple):
    """What must be sent: a request, or a command, under its number."""

    payload: bytes
    number: int
    size: int
    wishes: Wishes


class Flights:
    """The requests of one client, by number. `where` is the server's URL, for messages."""

    def __init__(self, where: str, retry: Retry) -> None:
        self._where = where
        self._retry = retry
        self._flights: dict[int, Flight] = {}
        self.heard = False  # the server has answered something

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, number: int, flight: Flight, now: float) -> Sending:
        """A request begins; return what to send."""
        self._flights[number] = flight
        return self._sending(number, flight, now)

    def _sending(self, number: int, flight: Flight, now: float) -> Sending:
        flight.asked, flight.again = now, None
        left = max(0.001, flight.deadline - now)
        return Sending(flight.payload, number, flight.size, replace(flight.wishes, timeout=left))

    def answered(self, answer: Answer, now: float) -> list[Sending]:
        """An answer has come: end its request, or return what must be sent again. An answer to nothing is well."""
        self.heard = True
        if answer.said.unknown is not None:
            return [
                self._sending(number, flight, now)
                for number in answer.said.unknown
                if (flight := self._flights.get(number)) is not None and flight.again is None
            ]
        flight = self._flights.get(answer.id)
        if flight is None:
            return []
        if answer.said.error is not None:
            self._refused(answer.id, flight, answer.said.error, now)
        else:
            _end(self._flights.pop(answer.id).future, answer)
        return []

    def _refused(self, number: int, flight: Flight, failed: Failed, now: float) -> None:
        error = of_status(failed.status, failed.message, name=failed.type, retry_after=failed.retry_after)
        wait = self._retry.wait(error, flight.tried)
        if wait is None or now + wait >= flight.deadline:
            del self._flights[number]
            _fail(flight.future, error)
        else:
            flight.tried += 1
            flight.again = now + wait

    def due(self, now: float, command: int) -> list[Sending]:
        """End what is too late, and return what is to be sent now; `command` is a number for a command."""
        late = [number for number, flight in self._flights.items() if now >= flight.deadline]
        for number in late:
            _fail(self._flights.pop(number).future, self.late())
        sendings = [Sending(zeromq.CANCEL, command, 0, Wishes(ids=late[:MOST_ASKED]))] if late else []
        asked: list[int] = []
        for number, flight in self._flights.items():
            if flight.again is not None:
                if now >= flight.again:
                    sendings.append(self._sending(number, flight, now))
            elif now >= flight.asked + ASK_INTERVAL and len(asked) < MOST_ASKED:
                flight.asked = now
                asked.append(number)
        if asked:
            sendings.append(Sending(zeromq.PENDING, command, 0, Wishes(ids=asked)))
        return sendings

    def next(self) -> float | None:
        """Return when `due` must be called next at the latest; None if nothing is under way."""
        whens = (
            min(flight.deadline, flight.asked + ASK_INTERVAL if flight.again is None else flight.again)
            for flight in self._flights.values()
        )
        return min(whens, default=None)

    def late(self) -> WeirError:
        """Return the error of a request whose time is over."""
        if not self.heard:
            return Unreachable(f"{self._where}: no answer in time, to anything: does a server of Weir's listen there?")
        return DeadlineExceeded(f"{self._where}: no answer in time")

    def cancelled(self, number: int) -> bool:
        """Forget a request that its caller has given up; tell whether it was under way."""
        return self._flights.pop(number, None) is not None

    def end(self, error: WeirError) -> list[int]:
        """End all that is under way with `error`; return their numbers."""
        numbers = list(self._flights)
        for number in numbers:
            _fail(self._flights.pop(number).future, error)
        return numbers


def _end(future: "Future[Any]", answer: Answer) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(answer)


def _fail(future: "Future[Any]", error: WeirError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
