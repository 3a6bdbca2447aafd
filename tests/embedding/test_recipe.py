"""What is computed of a text: names of poolings, today's and those of bert-as-service."""

import pytest

from weir.embedding.recipe import OLD_NAMES, Pooling, pooling_named, poolings_named
from weir.errors import SettingsError


@pytest.mark.parametrize("pooling", Pooling)
def test_a_pooling_is_found_by_its_name(pooling: Pooling) -> None:
    assert pooling_named(pooling.value) is pooling
    assert pooling_named(pooling.value.upper()) is pooling or pooling.value.upper() in OLD_NAMES


@pytest.mark.parametrize(("name", "pooling"), OLD_NAMES.items())
def test_the_old_names_are_understood(name: str, pooling: Pooling) -> None:
    assert pooling_named(name) is pooling


def test_an_unknown_pooling_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match="pooling='median': must be one of none, max, mean"):
        pooling_named("median")


def test_several_are_joined_unless_one_stands_alone() -> None:
    assert poolings_named("cls + REDUCE_MEAN") == (Pooling.CLS, Pooling.MEAN)
    assert poolings_named("none") == (Pooling.NONE,)
    with pytest.raises(SettingsError, match="'mean\\+none': none stands alone"):
        poolings_named("mean+none")
