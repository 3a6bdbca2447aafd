"""What a module of tests has left behind is looked at once, at its end: to look takes longer than many of them."""

from collections.abc import Iterator

import pytest
from tests.leaks import no_leaks


@pytest.fixture(scope="module")
def nothing_is_left_by_module() -> Iterator[None]:
    with no_leaks():
        yield
