"""A server of everything with two fronts, and the same with one, with whose answers its own are compared."""

from collections.abc import Iterator

import pytest
from tests.fronts.kit import MODELS, SQUARE
from tests.served import Served

# Add comes last: a test loads it again, after which it is the last in lists of models.
ALL = [SQUARE, *[f"{MODELS}:{name}" for name in ("Texts", "Mean", "Counts", "Measured", "Add")]]


def serving(fronts: int) -> Iterator[Served]:
    with Served(*ALL, "--max-body-size", 1 << 20, "--grpc-port", 0, "--fronts", fronts) as running:
        yield running.until_grpc().until_ready()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    yield from serving(2)


@pytest.fixture(scope="session")
def single() -> Iterator[Served]:
    yield from serving(1)
