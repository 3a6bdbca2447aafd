"""The site: every page has a place in its navigation, and links lead to the same pages as in the repository."""

import re

from docs import site
from tests.documentation.pages import ROOT, all_pages, read_blocks

LIMIT = 47_080
"""Words on all pages, without blocks of code. Lower it whenever there are fewer."""


def targets(entries: list[object]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        assert isinstance(entry, dict)
        for value in entry.values():
            found += targets(value) if isinstance(value, list) else [value]
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    places = site.pages()
    contents = ROOT / "docs" / "contents.md"
    in_navigation = targets(list(site.navigation(site.on_site(contents.read_text(), contents, places))))
    assert len(in_navigation) == len(set(in_navigation))
    assert {place for path, place in places.items() if path.is_relative_to(ROOT / "docs")} <= set(in_navigation)
    assert set(in_navigation) <= set(places.values())


def test_links_are_turned_to_where_the_site_has_things() -> None:
    page, change = ROOT / "docs" / "how-to" / "deploy.md", ROOT / "CHANGELOG.md"
    places = {page: "how-to/deploy.md", change: "changelog.md", ROOT / "docs" / "index.md": "index.md"}
    text = "[a](../../CHANGELOG.md#x) [b](../../README.md) [c](../../Makefile) [d](https://x) [e](#f) `[g](../../CHANGELOG.md)`"

    assert site.on_site(text, page, places) == (
        "[a](../changelog.md#x) [b](../index.md) c [d](https://x) [e](#f) `[g](../../CHANGELOG.md)`"
    )
    assert site.on_site("[a](docs/how-to/deploy.md)", change, places) == "[a](how-to/deploy.md)"


def test_there_are_not_more_words_than_there_may_be() -> None:
    assert sum(site.count().values()) <= LIMIT


def test_changes_are_short_and_stand_once() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    entries = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(entries) == len(set(entries))
    assert len(text.split()) < 1_000, "what only developers need stands in the commits"


def test_file_names_are_titles_up_to_a_colon_or_comma() -> None:
    for page in sorted(
        set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "index.md", ROOT / "docs" / "contents.md"}
    ):
        title = re.split("[:,]", page.read_text().partition("\n")[0].removeprefix("# "))[0]
        name = title.lower().removeprefix("the ").removeprefix("coming from ").replace(" ", "-")
        assert name == page.stem


def test_code_fits_beside_the_navigation() -> None:
    wide = [
        f"{page.relative_to(ROOT)}:{block.line}: {line}"
        for page in all_pages()
        for block in read_blocks(page)
        if block.language in ("python", "toml")
        for line in block.text.splitlines()
        if len(line) > 100
    ]
    assert wide == [], "the site shows 100 columns of code that it does not wrap"
