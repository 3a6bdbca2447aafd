import pytest

from weir.bench.targets.connection import Address, parse_address
from weir.errors import SettingsError


def test_a_url_says_where_to_go() -> None:
    url = "http://localhost:8000/infer/square"
    assert parse_address(url) == Address(url, "localhost", 8000, "/infer/square", "", False)
    assert parse_address("https://a.example/x?y=1")[1:] == ("a.example", 443, "/x?y=1", "", True)
    assert parse_address("http://[::1]:80")[1:] == ("::1", 80, "/", "", False)
    assert parse_address("http://unix:/run/w.sock:/infer/square")[1:] == ("", 0, "/infer/square", "/run/w.sock", False)


@pytest.mark.parametrize(
    ("url", "authority"),
    [
        ("http://a:80/", "a"), ("http://a:81/", "a:81"), ("https://a/", "a"), ("https://a:80/", "a:80"),
        ("http://[::1]:8000/", "[::1]:8000"), ("http://unix:/x:/", "localhost"),
    ],
)  # fmt: skip
def test_the_host_header_names_the_port_where_it_is_not_the_usual_one(url: str, authority: str) -> None:
    assert parse_address(url).authority == authority


@pytest.mark.parametrize(
    "url",
    ["localhost:8000/x", "ftp://a/x", "http:///x", "http://a:port/", "http://unix:/x", "http://a/ä", "http://a/x y"],
)
def test_what_is_no_url_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(SettingsError, match=r"^target .*must be") as caught:
        parse_address(url)
    assert "\n" not in str(caught.value)
