"""budget.py: how large batches should be, from how long they take."""

import pytest

from weir.embedding.calibration import MAX_ROWS, Timed, choose


def timings(price: float, each: float, slower_from: int = 10**9) -> list[Timed]:
    """Return how long batches take that cost `price` and `each` per token, twice as much of those beyond `slower_from` tokens."""
    found = []
    for length in (16, 64, 256):
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            tokens = rows * length
            found.append(Timed(rows, length, price + each * tokens + each * max(0, tokens - slower_from)))
    return found


def test_a_cpu_on_which_larger_batches_are_slower() -> None:
    budget = choose(timings(1e-4, 1e-5, slower_from=128))
    assert 64 <= budget.max_batch_cost <= 256
    assert budget.max_batch_size == budget.max_batch_cost // 8
    assert budget.tokens_per_second == pytest.approx(1e5, rel=0.2)


def test_an_accelerator_on_which_a_batch_costs_as_much_as_a_thousand_tokens() -> None:
    budget = choose(timings(1e-3, 1e-6))
    assert budget.max_batch_cost >= 16_384
    assert budget.max_padding == pytest.approx(1000 / 2, rel=0.05)
    assert budget.max_batch_size == MAX_ROWS


def test_where_nothing_is_gained_batches_are_small() -> None:
    budget = choose(timings(0.0, 1e-3))
    assert budget.max_batch_cost == 16
    assert (budget.max_batch_size, budget.max_padding) == (2, 0.5)


def test_a_batch_is_large_enough_to_be_worth_what_it_costs_the_server() -> None:
    assert 256 <= choose(timings(0.0, 1e-5)).max_batch_cost <= 1024
    assert 64 <= choose(timings(0.0, 1e-4)).max_batch_cost <= 128


def test_one_size_and_times_that_make_no_sense() -> None:
    assert choose([Timed(1, 4, 0.1)]).max_batch_size == 1
    assert choose([Timed(1, 64, 0.2), Timed(2, 64, 0.1), Timed(4, 64, 0.05)]).max_padding == 8.0


def test_settings() -> None:
    settings = choose(timings(0.0, 1e-3)).settings()
    assert settings == {
        "padded": True, "max_batch_cost": 16.0, "max_batch_size": 2, "max_padding": 0.5, "padding_cost": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(("share", "found"), [(0.0, 0.0), (0.2, 0.2), (1.0, 1.0), (1.5, 1.0), (-0.1, 0.0)])
def test_what_padding_costs_is_measured_beside_it(share: float, found: float) -> None:
    even = timings(4e-3, 1e-4)
    mixed = [
        Timed(32, 16, 4e-3 + 1e-4 * (176 + 336 * share), 336),
        Timed(8, 64, 4e-3 + 1e-4 * (176 + 336 * share), 336),
    ]
    budget = choose(even + mixed)
    assert budget.padding_cost == pytest.approx(found, abs=1e-3)
    assert budget.max_batch_cost == choose(even).max_batch_cost
    assert budget.max_padding == choose(even).max_padding
