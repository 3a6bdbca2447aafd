"""On ten shapes of traffic, the index reloads models for at least 20 % fewer seconds than LRU, and never for more than 5 % more."""

from benchmarks.policies.on_demand import SHAPES, shares


def test_the_index_reloads_less_than_lru() -> None:
    found = shares(seed=1)
    assert found.keys() == SHAPES.keys()
    assert len(found) == 10
    assert sum(found.values()) / 10 <= 0.8
    assert max(found.values()) <= 1.05
    assert found["Zipf with drift"] <= 0.8
