"""Property tests give the same examples in every run, however slow the machine; and a check for leaks, for those that ask."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from tests.leaks import no_leaks

settings.register_profile("weir", deadline=None, derandomize=True)
settings.load_profile("weir")


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """The test leaves no process, no descriptor and no shared memory behind."""
    with no_leaks():
        yield
