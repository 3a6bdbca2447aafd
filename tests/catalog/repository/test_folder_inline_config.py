"""Chains that a load call describes."""

import pytest

from weir.catalog.repository import folder as inline_config
from weir.catalog.repository.folder import InlineConfigs
from weir.catalog.sources import CombinedRepository, TargetRepository
from weir.errors import InvalidRequest, ModelNotFound, SettingsError
from weir.settings import read_model_table

CHAIN = {"platform": "ensemble", "steps": ["one", "two"]}


def heard() -> InlineConfigs:
    return InlineConfigs(read_model_table, dict)


def test_a_chain_is_known_once_it_was_described() -> None:
    chains = heard()
    (model,) = chains.read("both", CHAIN).versions
    assert (model.name, model.platform, model.target, model.folder) == ("both", "ensemble", "", None)
    assert chains.names() == ["both"]
    (again,) = chains.read("both", {"max_queue_size": 7}).versions
    assert again.attributes == model.attributes and again.settings == {"max_queue_size": 7}


def test_only_a_chain_can_be_described() -> None:
    sources = CombinedRepository([TargetRepository([])], heard())
    assert sources.read("both", CHAIN).versions
    with pytest.raises(ModelNotFound, match="there is none of this name"):
        sources.read("other", {"platform": "python", "target": "os:system"})
    with pytest.raises(ModelNotFound):
        sources.read("other")


@pytest.mark.parametrize("name", ["../x", "", "a b", "a/b"])
def test_a_name_is_a_name(name: str) -> None:
    with pytest.raises(ModelNotFound, match="must be of letters"):
        heard().read(name, CHAIN)


def test_there_are_no_files_with_it() -> None:
    with pytest.raises(InvalidRequest, match="a chain has no files"):
        heard().read("both", CHAIN, {"1/model.py": b""})


def test_what_cannot_be_read_is_not_remembered() -> None:
    chains = heard()
    with pytest.raises(SettingsError, match="steps"):
        chains.read("both", {"platform": "ensemble", "steps": [3]})
    assert chains.names() == []


def test_not_more_than_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_config, "MOST_CHAINS", 1)
    chains = heard()
    chains.read("one", CHAIN)
    with pytest.raises(InvalidRequest, match="the most there may be"):
        chains.read("two", CHAIN)
    assert chains.read("one", CHAIN).versions
