"""access.py: who has the key may call, and nobody else; it is never shown."""

import base64
from pathlib import Path

import pytest
from tests.rings import subcases

from weir.errors import SettingsError, Unauthorized
from weir.protocols.access import Access, AccessSettings, Control, ControlSettings, caller_in
from weir.settings import read_settings

KEY = "s3cret-key"


def keyed(tmp_path: Path, text: str = KEY, control: Control | None = None) -> Access:
    file = tmp_path / "keys"
    file.write_text(text)
    return Access(AccessSettings(api_key_file=str(file)), control)


def headers(value: str, **more: str) -> list[tuple[bytes, bytes]]:
    answer = {"authorization": value, **more}
    return [(name.encode(), text.encode("latin-1")) for name, text in answer.items()]


def basic(password: str, user: str = "anybody") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_without_a_key_anybody_may_call() -> None:
    access = Access()
    assert not access.required
    access.require(None)
    access.require_http([])


@subcases("key", [None, "", "s3cret-ke", "s3cret-keyy", "S3CRET-KEY", " s3cret-key", "\xfc", "\ud800"])
def test_another_key_is_none(tmp_path: Path, key: str | None) -> None:
    """A file may have several."""
    for access in (Access(AccessSettings(api_key=KEY)), keyed(tmp_path, f"one\n\n  {KEY} \r\n")):
        access.require(KEY)
        assert access.required
        with pytest.raises(Unauthorized, match="came without it" if key is None else "another one") as refused:
            access.require(key)
        assert KEY not in str(refused.value)


def test_who_may_control_may_call(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("token")
    access = keyed(tmp_path, control=Control(ControlSettings(control_token_file=str(tmp_path / "token"))))
    access.require("token")
    with pytest.raises(Unauthorized):
        access.require("other")
    with pytest.raises(Unauthorized):
        keyed(tmp_path, control=Control()).require("token")


def test_it_comes_as_a_bearers_token_or_a_password_and_in_no_other_way() -> None:
    access = Access(AccessSettings(api_key=KEY))
    for value in (f"Bearer {KEY}", f"bearer  {KEY} ", basic(KEY), basic(KEY, "")):
        access.require_http(headers(value))
    for value in ("", KEY, f"Bearer{KEY}", f"Token {KEY}", basic("other"), "Basic ???", "Basic", basic("")):
        with pytest.raises(Unauthorized):
            access.require_http(headers(value))


def test_requests_with_a_key_of_bulk_work_are_bulk_whatever_they_state(tmp_path: Path) -> None:
    access = keyed(tmp_path, f"{KEY}\nnightly bulk\n")
    stated = (b"x-weir-class", b"interactive")

    caller, *marked = access.require_http([*headers("Bearer nightly"), stated])
    assert marked == [*headers("Bearer nightly"), (b"x-weir-class", b"bulk")]
    assert access.require_http(headers(basic("nightly"))) == [caller, *headers(basic("nightly")), marked[-1]]
    other, *unmarked = access.require_http([*headers(f"Bearer {KEY}"), stated])
    assert unmarked == [*headers(f"Bearer {KEY}"), stated]
    assert caller_in([caller]) != caller_in([other])
    assert not caller_in(Access().require_http(headers("Bearer nightly")))
    for key in ("nightly bulk", "bulk"):
        with pytest.raises(Unauthorized):
            access.require(key)


def test_pages_of_other_origins_cannot_use_the_password_of_the_browser() -> None:
    access = Access(AccessSettings(api_key=KEY))
    access.require_http(headers(basic(KEY), host="here:8000", origin="http://here:8000"))
    access.require_http(headers(f"Bearer {KEY}", host="here:8000", origin="http://there"))  # it knows the key itself
    with pytest.raises(Unauthorized):
        access.require_http(headers(basic(KEY), host="here:8000", origin="http://there"))


@subcases("text", ["", " \n", "two words", "k\xfcy", "tab\tbed"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    for make, rule in (
        (lambda: keyed(tmp_path, text), r"api_key_file=.*(must hold one or more keys|line 1: must be printable)"),
        (
            lambda: AccessSettings(api_key=text),
            r"api_key: must be printable ASCII without spaces|api_key='': must not be empty",
        ),
    ):
        with pytest.raises(SettingsError, match=rule) as refused:
            make()
        assert not text.strip() or text not in str(refused.value)


def test_settings_that_contradict_each_other_or_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="set one of them"):
        AccessSettings(api_key=KEY, api_key_file="keys")
    with pytest.raises(SettingsError, match=r"api_key_file=.*none'.*cannot be read"):
        Access(AccessSettings(api_key_file=str(tmp_path / "none")))


def test_no_message_and_no_repr_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "weir.toml"
    for flags, environment, text in (
        ({"api_key": [KEY, "again"]}, {}, ""),
        ({}, {"WEIR_API_KEY": f"{KEY} {KEY}"}, ""),
        ({}, {}, "api_key = 123454321"),
    ):
        file.write_text(text)
        with pytest.raises(SettingsError, match="not shown") as refused:
            read_settings(["a:B"], flags, environment, str(file))
        assert KEY not in str(refused.value) and "12345" not in str(refused.value)
    settings = read_settings(["a:B"], {}, {"WEIR_API_KEY": KEY})
    assert settings.access.api_key == KEY
    assert KEY not in repr(settings)
