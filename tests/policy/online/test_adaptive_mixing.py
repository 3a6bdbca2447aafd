"""mixing.py: a share of the batches, without chance."""

import pytest

from weir.policy.online.adaptive import Mixing


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 1.0 / 3.0, 0.5, 0.6180339887, 0.99, 1.0])
def test_any_run_of_batches_has_its_share_to_within_one(share: float) -> None:
    mixing, seconds = Mixing(), [0]
    for _ in range(1000):
        mixing.cut(share)
        seconds.append(seconds[-1] + mixing.second)
    for length in (1, 7, 100, 1000):
        for start in range(0, 1001 - length, 13):
            assert abs(seconds[start + length] - seconds[start] - share * length) <= 1.0 + 1e-9


@pytest.mark.parametrize("share", [0.01, 0.25, 1.0 / 3.0, 0.5, 0.6180339887, 0.99])
def test_from_the_start_counts_are_rounded_and_not_cut_off(share: float) -> None:
    mixing, seconds = Mixing(), 0
    for number in range(1, 301):
        mixing.cut(share)
        seconds += mixing.second
        assert abs(seconds - share * number) <= 0.5 + 1e-9


def test_the_share_may_change() -> None:
    mixing, expected, seconds = Mixing(), 0.0, 0
    for number in range(1000):
        share = (number % 10) / 10.0
        mixing.cut(share)
        expected += share
        seconds += mixing.second
        assert abs(seconds - expected) <= 1.0
