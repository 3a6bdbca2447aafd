import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_by_any(nothing_is_left: None) -> None:
    """Every test here must leave no process, no descriptor and no shared memory behind."""
