"""Every page does what it shows."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documentation.pages import ROOT, Server, all_pages, do


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, Server]]:
    """The servers that several pages ask."""
    servers: dict[str, Server] = {}
    yield servers
    for server in servers.values():
        server.end()


@pytest.mark.nightly
@pytest.mark.parametrize("page", all_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_does_what_it_shows(page: Path, tmp_path: Path, shared: dict[str, Server]) -> None:
    do(page, tmp_path, shared)


def test_a_page_that_shows_something_else_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo 1\n2\n```\n")
    with pytest.raises(AssertionError, match="printed:\n1\n"):
        do(page, tmp_path, {})
