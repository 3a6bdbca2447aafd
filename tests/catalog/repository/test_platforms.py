"""Platforms that packages bring."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.repository.shelf import services, write

from weir import Model, SettingsError
from weir.catalog.repository import platforms
from weir.catalog.sources import ModelToServe


class Table:
    """Serves a file of lines as a model that answers with the line of a number."""

    def load(self, model: ModelToServe) -> type[Model]:
        assert model.folder is not None
        lines = (model.folder / model.target).read_text().splitlines()

        class Lines(Model):
            def predict(self, batch: list[int]) -> list[Any]:
                return [lines[number] for number in batch]

        return Lines


def broken() -> None:
    raise KeyError("no")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "tests.catalog.repository.test_platforms"
    found = [
        EntryPoint(name, f"{here}:{what}", platforms.ENTRY_POINTS)
        for name, what in (("table", "Table"), ("bad", "broken"))
    ]
    monkeypatch.setattr(platforms, "entry_points", lambda group: found)


def test_a_package_may_bring_a_platform(tmp_path: Path, installed: None) -> None:
    files = {"one/1/lines.txt": "a\nb", "one/config.toml": 'platform = "table"\nfile = "lines.txt"'}
    (service,) = services(write(tmp_path, files), "one")
    assert (service.platform, service.model.__name__) == ("table", "Lines")


def test_one_that_cannot_be_made_is_named(tmp_path: Path, installed: None) -> None:
    folder = write(tmp_path, {"one/1/x": "", "one/config.toml": 'platform = "bad"'})
    with pytest.raises(SettingsError, match=r"platform='bad': .*:broken: KeyError: 'no'"):
        services(folder, "one")
    folder = write(tmp_path, {"one/1/x": "", "one/config.toml": 'platform = "none"'})
    with pytest.raises(SettingsError, match="there are python, onnx, ensemble, bad, table"):
        services(folder, "one")
