import pytest

ONLY_COMPUTE = ("run", "test_cpus", "test_settings", "test_source", "test_timer")


@pytest.fixture(autouse=True)
def nothing_is_left_by_any(request: pytest.FixtureRequest) -> None:
    """Every test here that starts something must leave no process, no descriptor and no shared memory behind."""
    if request.path.stem not in ONLY_COMPUTE and request.path.parent.name not in ONLY_COMPUTE:
        request.getfixturevalue("nothing_is_left")
