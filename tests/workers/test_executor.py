"""Executors by name: Weir's own, and those of installed packages."""

from importlib.metadata import EntryPoint

import pytest
from tests.hosted import Square

from weir.errors import SettingsError
from weir.serving.service import Service
from weir.workers.local import InlineExecutor
from weir.workers.settings import EXECUTORS, WorkerSettings


class Mine(InlineExecutor):
    """One of a package."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        EntryPoint("mine", f"{__name__}:Mine", "weir.executors"),
        EntryPoint("gone", "nowhere:X", "weir.executors"),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found if group == "weir.executors" else [])


async def test_a_package_may_bring_an_executor(installed: None) -> None:
    service = Service(Square, executor="mine")
    async with service:
        assert isinstance(service.executor, Mine)
        assert await service.infer(3) == 9


def test_one_that_cannot_be_had_is_refused_by_name(installed: None) -> None:
    with pytest.raises(SettingsError, match=r"executor='none': must be process, .* an entry point weir\.executors"):
        WorkerSettings(executor="none")
    with pytest.raises(SettingsError, match="executor='gone': nowhere:X: ModuleNotFoundError"):
        Service(Square, executor="gone")


def test_each_of_our_own_is_where_its_name_says() -> None:
    for name in ("process", "thread", "inline", "external"):
        assert EXECUTORS.load(name).__name__.lower().startswith(name)
