"""grammar.py: one text form for the settings of every policy."""

import pytest

from weir.errors import SettingsError
from weir.policy.loading import build, parse_duration


class Everything:
    """A class with a setting of each type, and one of none."""

    def __init__(  # type: ignore[no-untyped-def]  # one parameter is untyped on purpose
        self, count: int = 1, wait: float = 0.0, name: str = "", loud: bool = False, most: int | None = None, free=None
    ) -> None:
        if name == "boom":
            raise ValueError("boom is no name")
        self.values = (count, wait, name, loud, most, free)


def of(arguments: str | None) -> tuple[object, ...]:
    """Return what Everything was made of."""
    made: Everything = build(Everything, arguments, f"everything:{arguments}")
    return made.values


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5ms", 0.005), ("200us", 0.0002), ("1.5s", 1.5), ("0.25", 0.25), ("3", 3.0), ("1e-3s", 0.001), ("100ms", 0.1)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "ms", "5 minutes", "5m", "--1s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (None, (1, 0.0, "", False, None, None)),
        ("7", (7, 0.0, "", False, None, None)),
        ("count=7,wait=20ms", (7, 0.02, "", False, None, None)),
        ("name=x,loud=true,most=4", (1, 0.0, "x", True, 4, None)),
        ("loud=False,most=none", (1, 0.0, "", False, None, None)),
        ("free=3", (1, 0.0, "", False, None, 3)),
        ("free=3ms", (1, 0.0, "", False, None, 0.003)),
        ("free=true", (1, 0.0, "", False, None, True)),
        ("free=word", (1, 0.0, "", False, None, "word")),
    ],
)
def test_values_take_the_declared_type(arguments: str | None, values: tuple[object, ...]) -> None:
    assert of(arguments) == values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("count=x", r"count='x': must be a whole number"),
        ("wait=soon", r"wait='soon': must be a number, or a duration such as 5ms"),
        ("loud=maybe", r"loud='maybe': must be true or false"),
        ("kount=3", r"no setting 'kount'; it has count, wait, name, loud, most, free"),
        ("count=3,count=4", r"count=4 says count twice; state it once"),
        ("3,count=4", r"count=4 says count twice"),
        ("count=3,4", r"'4' must be key=value; it has count"),
        ("name=boom", r"boom is no name"),
        ("", r"count='': must be a whole number"),
        ("count=1,", r"'' must be key=value"),
    ],
)
def test_mistakes_name_the_whole_text_and_the_rule(arguments: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        of(arguments)
    assert caught.value.message.startswith(f"policy='everything:{arguments}': ")


def test_a_missing_setting_is_named() -> None:
    def make(limit: int) -> int:
        return limit

    with pytest.raises(SettingsError, match="limit must be given, as in make:limit="):
        build(make, None, "make")


def test_what_has_no_settings_says_so() -> None:
    with pytest.raises(SettingsError, match="'3' must be key=value; it has no settings"):
        build(lambda: None, "3", "nothing:3")


def test_annotations_that_cannot_be_evaluated_do_not_matter() -> None:
    def make(limit: "Nowhere") -> object:  # type: ignore[name-defined]  # noqa: F821  # that is the point
        return limit

    assert build(make, "limit=3", "make:limit=3") == 3


def test_catch_all_parameters_are_not_settings() -> None:
    def make(limit: int = 1, *rest: int, **more: int) -> int:
        return limit

    with pytest.raises(SettingsError, match="no setting 'more'; it has limit"):
        build(make, "more=3", "make:more=3")
