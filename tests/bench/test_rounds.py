import math
from collections.abc import Callable

from tests.bench.stubs import FakeWaker

from weir.bench.rounds import ClosedLoop, OpenLoop
from weir.bench.target import OK, Ledger
from weir.testing import FakeClock


class Turns:
    """The callbacks of the next turn of a loop."""

    def __init__(self) -> None:
        self.next: list[Callable[[], None]] = []

    def __call__(self, callback: Callable[[], None]) -> None:
        self.next.append(callback)

    def run(self) -> None:
        due, self.next = self.next, []
        for callback in due:
            callback()


class Run:
    """An open loop on a fake clock, with a note of when each request left."""

    def __init__(self, times: list[float], *, late: float = 0.0, spin: float = 0.0) -> None:
        self.clock = FakeClock(0.0)
        self.left: list[tuple[int, float]] = []
        self.ledger = Ledger(times)
        self.turns = Turns()
        self.waker = FakeWaker(self.clock, late)
        self.finished = 0
        self.loop = OpenLoop(
            self.ledger, lambda index: self.left.append((index, self.clock())), clock=self.clock, waker=self.waker,
            soon=self.turns, finished=self._finish, spin=spin,
        )  # fmt: skip
        self.loop.tick()

    def _finish(self) -> None:
        self.finished += 1


def test_requests_leave_at_their_instants_whether_or_not_any_was_answered() -> None:
    run = Run([0.0, 0.5, 0.5, 2.0])
    run.clock.advance(3.0)
    assert run.left == [(0, 0.0), (1, 0.5), (2, 0.5), (3, 2.0)]
    assert run.finished == 1 and run.ledger.begun == 4 and run.ledger.open == 4


def test_nothing_to_send_is_finished_at_once() -> None:
    assert Run([]).finished == 1


def test_what_is_late_leaves_at_once_and_the_rest_is_not_moved() -> None:
    run = Run([1.0, 1.1, 5.0], late=0.5)
    run.clock.advance(6.0)
    assert run.left == [(0, 1.5), (1, 1.5), (2, 5.5)]


def test_the_loop_turns_without_sleep_just_before_an_instant() -> None:
    run = Run([1.0], spin=0.25)
    assert run.waker.times == [0.75]
    run.clock.advance(0.75)
    assert not run.left and len(run.turns.next) == 1
    run.turns.run()
    assert not run.left and len(run.turns.next) == 1
    run.clock.advance(0.25)
    run.turns.run()
    assert run.left == [(0, 1.0)] and run.finished == 1


def test_of_many_that_are_due_some_leave_in_each_turn_so_that_answers_are_read_in_between() -> None:
    run = Run([0.0] * 100)
    first = len(run.left)
    assert 0 < first < 100
    while run.turns.next:
        run.turns.run()
    assert [index for index, _ in run.left] == list(range(100)) and run.finished == 1


def test_a_closed_loop_keeps_its_callers_busy_until_the_end() -> None:
    clock, turns, ledger, finished = FakeClock(0.0), Turns(), Ledger(), []
    under_way: list[int] = []
    loop = ClosedLoop(
        ledger, under_way.append, clock=clock, soon=turns, finished=lambda: finished.append(clock()), concurrency=3,
        end=1.0,
    )  # fmt: skip
    loop.start()
    assert under_way == [0, 1, 2]
    for now in (0.25, 0.5, 0.75, 1.0, 1.25):
        clock.advance(now - clock())
        for index in under_way[:]:
            under_way.remove(index)
            ledger.end(index, clock(), OK)
        assert not under_way  # never from within an end
        turns.run()
        assert len(under_way) == (3 if now < 1.0 else 0)
    assert finished == [1.0]
    assert ledger.begun == ledger.over == 12 and ledger.open == 0
    assert list(ledger.intended) == [0.0] * 3 + [0.25] * 3 + [0.5] * 3 + [0.75] * 3


def test_the_books_keep_what_became_of_each() -> None:
    heard: list[int] = []
    ledger = Ledger([1.0, 2.0, 3.0], heard.append)
    ledger.begun = 3
    ledger.end(1, 2.5, OK)
    ledger.end(0, 4.0, "429 Overloaded")
    assert heard == [1, 0] and ledger.open == 1 and ledger.failed == 1
    assert [ledger.kinds[code] for code in ledger.outcomes] == ["429 Overloaded", OK, ""]
    assert list(ledger.ended)[:2] == [4.0, 2.5] and math.isnan(ledger.ended[2]) and math.isnan(ledger.sent[0])
    assert list(ledger.recent) == [0.5, 3.0]
