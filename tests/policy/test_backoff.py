"""The wait before the next try grows with each failure, and is bounded."""

from weir.policy.backoff import Backoff


def test_the_first_death_costs_no_wait_and_each_next_twice_as_long() -> None:
    backoff = Backoff(first=0.1, longest_after_load=1.0)
    assert [backoff.died(suspect=False) for _ in range(7)] == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    backoff.finished()  # a batch: the deaths are forgotten
    assert backoff.died(suspect=False) == 0.0


def test_a_model_that_loads_is_never_away_for_long() -> None:
    backoff = Backoff()
    for _ in range(100):
        backoff.loaded()

        assert backoff.died(suspect=False) <= 1.0


def test_a_death_with_a_suspect_batch_does_not_count() -> None:
    backoff = Backoff(first=0.1)
    backoff.died(suspect=False)

    assert [backoff.died(suspect=True) for _ in range(10)] == [0.0] * 10
    assert backoff.died(suspect=False) == 0.1


def test_what_does_not_load_is_tried_for_ever_and_waited_for_a_few_times() -> None:
    backoff = Backoff(first=0.1, longest=30.0, patience=4)
    seen = [(backoff.failed_to_load(), backoff.failures, backoff.keeps_failing) for _ in range(4)]
    assert seen == [(0.1, 1, False), (0.2, 2, False), (0.4, 3, False), (0.8, 4, True)]
    assert [backoff.failed_to_load() for _ in range(9_999)][8:] == [30.0] * 9_991
    backoff.loaded()
    assert not backoff.keeps_failing
    assert (backoff.failed_to_load(), backoff.failures) == (0.1, 1)


def test_what_the_system_refuses_is_tried_for_ever() -> None:
    backoff = Backoff(first=0.1, longest=30.0, patience=2)

    assert [backoff.refused() for _ in range(20)][:3] == [0.1, 0.2, 0.4]
    assert backoff.refused() == 30.0
    assert backoff.failed_to_load() == 0.1

    backoff.loaded()

    assert backoff.refused() == 0.1
