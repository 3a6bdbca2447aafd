"""Parts that Weir brings and that packages add by entry points."""

import sys
from importlib.metadata import EntryPoint

import pytest

from weir.errors import SettingsError
from weir.plugins import Plugins


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    found = [
        EntryPoint(name, value, "group")
        for name, value in {
            "theirs": "collections:OrderedDict", "ours": "nowhere:Nothing", "broken": "nowhere:Nothing",
        }.items()
    ]  # fmt: skip
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found if group == "group" else [])
    return Plugins("part", "group", {"ours": "fractions:Fraction", "lost": "fractions:Missing"})


def test_our_own_precede_those_of_packages(plugins: Plugins) -> None:
    assert plugins.names() == ["ours", "lost", "broken", "theirs"]
    assert [name in plugins for name in ("ours", "theirs", "none")] == [True, True, False]
    assert str(plugins.make("ours", 1, 2)) == "1/2"
    assert plugins.load("theirs")() == {}


@pytest.mark.parametrize(("name", "message"), [
    ("broken", "part='broken': nowhere:Nothing: ModuleNotFoundError: No module named 'nowhere'"),
    ("lost", "part='lost': fractions:Missing: AttributeError: .*"),
    ("none", r"unknown part 'none'; available: ours, lost, broken, theirs \(entry points group\)"),
])  # fmt: skip
def test_one_that_cannot_be_had_is_named(plugins: Plugins, name: str, message: str) -> None:
    for use in (plugins.load, plugins.make):
        with pytest.raises(SettingsError, match=f"^{message}$"):
            use(name)


def test_one_that_cannot_be_made_is_named(plugins: Plugins) -> None:
    with pytest.raises(SettingsError, match="part='ours': fractions:Fraction: ZeroDivisionError"):
        plugins.make("ours", 1, 0)


def test_our_own_are_found_without_reading_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "importlib.metadata", None)
    assert str(Plugins("part", "group", {"ours": "fractions:Fraction"}).make("ours", 3)) == "3"
