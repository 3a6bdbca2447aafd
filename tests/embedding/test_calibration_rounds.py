"""rounds.py: which sizes are measured, and how often."""

from collections.abc import Callable

import pytest

from weir.embedding.calibration import (
    LEAST_TIMES,
    LONGEST_SECONDS,
    MOST_SECONDS,
    MOST_TIMES,
    SERVER_SECONDS,
    TWICE,
    MeasuringRounds,
    Size,
    Timed,
)

Seconds = Callable[[Size, int], float]


def measured(seconds: Seconds, *lengths: int, mixed: bool = False) -> tuple[MeasuringRounds, list[Size]]:
    """Measure: a size takes `seconds` the nth time. Return what came of it, and each size as often as it was measured."""
    rounds, sizes = MeasuringRounds(lengths, mixed=mixed), list[Size]()
    while due := rounds.due():
        assert len(set(due)) == len(due)  # each once in a round
        for size in due:
            rounds.note(size, seconds(size, sizes.count(size)))
            sizes.append(size)
    return rounds, sizes


def steady(size: Size, time: int) -> float:
    """Take 1 ms a token."""
    return 1e-3 * sum(size.lengths)


def test_sizes_double_until_one_takes_long() -> None:
    rounds, sizes = measured(steady, 16, 64, 256)
    assert rounds.timed() == [
        *(Timed(rows, 16, 0.016 * rows, 0) for rows in (1, 2, 4, 8, 16)),
        *(Timed(rows, 64, 0.064 * rows, 0) for rows in (1, 2, 4)),
        Timed(1, 256, 0.256, 0),
    ]
    assert sizes.count(Size(8, 16)) == sizes.count(Size(2, 64)) == LEAST_TIMES
    assert sizes.count(Size(16, 16)) == sizes.count(Size(1, 256)) == TWICE
    assert rounds.agree and rounds.share <= 1


def test_or_until_two_are_clearly_slower() -> None:
    found, _ = measured(lambda size, time: 1e-5 * size.rows ** (1 if size.rows < 8 else 1.5), 16)
    assert [timed.rows for timed in found.timed()] == [1, 2, 4, 8, 16]


def test_sizes_take_turns() -> None:
    _, sizes = measured(steady, 16, 64)
    first = sizes.index(Size(1, 16))
    assert Size(1, 64) in sizes[first : sizes.index(Size(1, 16), first + 1)]


def test_what_is_shorter_is_a_quarter_as_long() -> None:
    rounds, _ = measured(steady, 16, 256, mixed=True)
    found = [timed for timed in rounds.timed() if timed.padding]
    assert [(timed.rows, timed.length, timed.padding) for timed in found] == [(16, 16, 14 * 12), (2, 256, 192)]
    assert [timed.seconds for timed in found] == pytest.approx([0.088, 0.320])
    assert Size(2, 2, 1).lengths == [2, 1]


def test_a_size_is_measured_again_until_two_times_are_close() -> None:
    def seconds(size: Size, time: int) -> float:
        return LONGEST_SECONDS * (1 + (time if time < 5 else 0))

    rounds, sizes = measured(seconds, 16)
    assert (len(sizes), rounds.timed()[0].seconds, rounds.agree) == (6, LONGEST_SECONDS, True)


def test_in_vain() -> None:
    rounds, sizes = measured(lambda size, time: 1.0 / 2**time, 16)
    assert (sizes.count(Size(1, 16)), rounds.agree) == (MOST_TIMES, False)
    rounds, sizes = measured(lambda size, time: SERVER_SECONDS / 2**time, 16)
    assert (sizes.count(Size(1, 16)), rounds.agree) == (LEAST_TIMES, True)  # what the server takes is more


def test_there_is_an_end_also_where_all_takes_long() -> None:
    rounds, sizes = measured(lambda size, time: MOST_SECONDS / 2**time, 16, 64)
    assert ([sizes.count(Size(1, length)) for length in (16, 64)], rounds.agree) == ([TWICE, TWICE], False)


def test_a_size_that_was_slow_by_accident_is_not_the_last() -> None:
    def seconds(size: Size, time: int) -> float:
        return 2 * LONGEST_SECONDS if time == 0 and size.rows == 2 else 1e-3 * sum(size.lengths)

    rounds, _ = measured(seconds, 16)
    assert [timed.rows for timed in rounds.timed()] == [1, 2, 4, 8, 16]
