"""fair_queue.py: whose text enters the queue next."""

from collections import Counter

import pytest

from weir.text_server.fair_queue import REMEMBERED, CallerQueue


class Work:
    """So many texts of one cost."""

    def __init__(self, name: str, texts: int, cost: float = 1.0, priority: int = 0) -> None:
        self.name, self.texts, self.cost, self.key = name, texts, cost, (priority, name)
        self.ready = True


def serve(shares: CallerQueue[Work], count: int) -> list[str]:
    """Let so many texts go, each until the next one goes; return whose they were."""
    served: list[str] = []
    tag = None
    while len(served) < count and (work := shares.next()) is not None:
        if tag is not None:
            shares.ended(tag)
        tag = shares.charge(work.cost)
        work.texts -= 1
        served.append(work.name)
        if not work.texts:
            shares.leave(work.key, work)
    if tag is not None:
        shares.now  # noqa: B018  # the clock is asked while the text is under way
        shares.ended(tag)
    return served


def test_equal_callers_take_turns() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    for work in (Work("a", 50), Work("b", 50)):
        shares.add(work.key, work)
    assert serve(shares, 6) == ["a", "b"] * 3
    assert len(serve(shares, 1000)) == 94
    assert (len(shares), shares.next()) == (0, None)


def test_shares_are_counted_in_tokens() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    for work in (Work("long", 100, 30.0), Work("short", 1000, 10.0)):
        shares.add(work.key, work)
    counts = Counter(serve(shares, 200))
    assert abs(counts["short"] - 3 * counts["long"]) <= 3


def test_a_caller_with_many_requests_has_no_more_than_one_with_one() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    for number in range(100):
        work = Work("many", 10)
        shares.add(work.key, work)
        if number == 50:
            shares.add((0, "one"), Work("one", 1000))
    counts = Counter(serve(shares, 400))
    assert counts == {"many": 200, "one": 200}


def test_who_comes_anew_begins_where_the_others_are() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    first, late = Work("first", 1000), Work("late", 1000)
    shares.add(first.key, first)
    serve(shares, 500)
    shares.add(late.key, late)
    assert abs(Counter(serve(shares, 100))["late"] - 50) <= 1


def test_higher_priority_goes_first() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    for work in (Work("low", 2), Work("high", 2, priority=1)):
        shares.add(work.key, work)
    assert serve(shares, 4) == ["high", "high", "low", "low"]


def test_who_is_not_ready_is_passed_over_until_woken() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    slow, quick = Work("slow", 10), Work("quick", 10)
    slow.ready = False
    for work in (slow, quick):
        shares.add(work.key, work)
    assert serve(shares, 3) == ["quick"] * 3
    quick.ready = False
    assert shares.next() is None
    slow.ready = quick.ready = True
    shares.wake(slow.key, slow)
    shares.wake(quick.key, quick)
    assert serve(shares, 4) == ["slow", "slow", "slow", "quick"]  # it catches up
    shares.wake((0, "nobody"), slow)
    slow.ready = False
    shares.wake(slow.key, slow)
    assert serve(shares, 2) == ["quick", "quick"]


def test_who_leaves_is_forgotten() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    first, second = Work("a", 5), Work("a", 5)
    for work in (first, second):
        shares.add(work.key, work)
    shares.leave(first.key, first)
    shares.leave(first.key, first)
    assert shares.next() is second
    shares.leave(second.key, second)
    shares.leave(second.key, second)
    assert shares.next() is None


def test_who_leaves_is_found_without_looking_at_the_others() -> None:
    # One batch of 40,000 texts with a prompt each is as many members of one share: each was sought for among all.
    compared = 0

    class Watched(Work):
        """Counts how often it is compared."""

        __hash__ = Work.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

    shares: CallerQueue[Work] = CallerQueue()
    members = [Watched("one", 1) for _ in range(2000)]
    for member in members:
        shares.add(member.key, member)
    for member in reversed(members[1000:]):
        shares.leave(member.key, member)
    assert (len(shares), shares.next()) == (1000, members[0])
    assert len(serve(shares, 2000)) == 1000
    shares.leave((0, "one"), members[0])
    assert compared == 0


def test_requests_of_one_caller_take_turns() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    many, one = Work("a", 1000), Work("a", 1)
    many.name, one.name = "many", "one"
    for work in (many, one):
        shares.add(work.key, work)
    assert serve(shares, 4) == ["many", "one", "many", "many"]


def test_who_had_more_is_not_forgiven_it_by_leaving() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    greedy, other = Work("greedy", 10), Work("other", 1000)
    shares.add(greedy.key, greedy)
    shares.add(other.key, other)
    other.ready = False
    assert serve(shares, 10) == ["greedy"] * 10
    other.ready = True
    shares.wake(other.key, other)
    again = Work("greedy", 10)
    shares.add(again.key, again)
    assert serve(shares, 9) == ["other"] * 9


def test_one_text_of_a_new_caller_is_due_whatever_is_under_way() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    flood, new = Work("flood", 1000), Work("new", 2)
    shares.add(flood.key, flood)
    tags = []
    for _ in range(100):
        assert shares.next() is flood
        tags.append(shares.charge(1.0))
    assert not shares.due
    shares.add(new.key, new)
    assert (shares.next(), shares.due) == (new, True)
    first = shares.charge(1.0)
    assert tags[0] < first <= tags[1]
    assert (shares.next(), shares.due) == (new, False)
    for tag in tags[:2]:
        shares.ended(tag)
    assert (shares.next(), shares.due) == (new, True)


def test_of_thousands_of_callers_who_leave_those_are_remembered_who_have_had_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forgotten, forget = list[int](), CallerQueue._forget

    def counted(shares: CallerQueue[Work]) -> None:
        forgotten.append(len(shares._away))
        forget(shares)

    monkeypatch.setattr(CallerQueue, "_forget", counted)
    shares: CallerQueue[Work] = CallerQueue()
    slow = Work("slow", 1)
    shares.add(slow.key, slow)
    shares.next()
    shares.charge(1.0)  # its text stays under way, and holds virtual time
    slow.ready = False
    for number in range(10 * REMEMBERED):
        one = Work(f"{number}", 1)
        shares.add(one.key, one)
        assert shares.next() is one
        shares.charge(10.0 + number)
        shares.leave(one.key, one)
    assert forgotten == [2 * REMEMBERED] * 9
    assert len(shares._away) < 2 * REMEMBERED
    assert max(shares._away.values()) > 10 * REMEMBERED


def test_virtual_time_stands_still_while_a_text_out_of_turn_is_under_way() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    flood = Work("flood", 9)
    shares.add(flood.key, flood)
    assert (shares.hold(), shares.hold()) == (0.0, 0.0)
    assert shares.next() is flood
    tags = [shares.charge(5.0)]
    shares.ended(tags.pop())
    assert shares.next() is flood
    tag = shares.charge(5.0)
    shares.release()
    assert (shares.now, shares.hold()) == (0.0, 0.0)
    shares.release()
    shares.release()
    assert (shares.now, shares.hold()) == (tag, tag)
    assert len(shares._tags) == 1  # of texts that have ended no tag is kept


def test_callers_who_are_away_are_forgotten_once_the_others_have_had_as_much() -> None:
    shares: CallerQueue[Work] = CallerQueue()
    for number in range(3 * REMEMBERED):
        work = Work(str(number), 1)
        shares.add(work.key, work)
        serve(shares, 1)
    assert len(shares._away) <= REMEMBERED
    stays = Work("stays", 10)
    shares.add(stays.key, stays)
    for number in range(3 * REMEMBERED):
        work = Work(f"again {number}", 1)
        shares.add(work.key, work)
        shares.leave(work.key, work)
    assert len(shares._away) <= REMEMBERED
