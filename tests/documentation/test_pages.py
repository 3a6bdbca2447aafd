"""Every page does what it shows."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documentation.pages import ROOT, Block, Server, all_pages, do, matches, read_blocks, run_python


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


def test_reads_blocks_with_their_line_and_language(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n```python\nx = 1\n```\n<!-- not run: a reason -->\n```console\n$ a\nb\n```\n```\nplain\n```\n"
    )
    assert read_blocks(page) == [
        Block("python", "x = 1\n", 2, False),
        Block("console", "$ a\nb\n", 6, True),
        Block("", "plain\n", 10, False),
    ]


def test_blocks_of_a_page_share_a_namespace_and_may_await(tmp_path: Path) -> None:
    namespace: dict[str, object] = {}
    run_python(Block("python", "x = 1\n", 1, False), tmp_path, namespace)
    run_python(Block("python", "import asyncio\nawait asyncio.sleep(0)\ny = x + 1\n", 1, False), tmp_path, namespace)
    assert namespace["y"] == 2


def test_a_page_that_shows_something_else_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo 1\n2\n```\n")
    with pytest.raises(AssertionError, match="printed:\n1\n"):
        do(page, tmp_path, {})


@pytest.mark.parametrize(
    ("printed", "expected", "right"),
    [("9\n", "9", True), ("9", "8", False), ('{"a": 0.1234}', '{"a": 0.1...}', True), ("a\nb\nc\n", "a\n...\nc", True)],
)
def test_dots_stand_for_anything(printed: str, expected: str, right: bool) -> None:
    assert matches(printed, expected) is right
