"""Every link inside the documentation leads somewhere."""

import re
from pathlib import Path

from tests.documentation.pages import FENCE, ROOT, all_pages
from tests.rings import subcases

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
PAGES = [*all_pages(), ROOT / "CHANGELOG.md"]


def prose(page: Path) -> str:
    """Return the page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """Return the names under which the page's headings can be reached, as code hosts make them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@subcases("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for markdown, html in LINK.findall(prose(page)):
        target, _, anchor = (markdown or html).partition("#")
        if re.match(r"\w+:", target):
            continue  # other people's pages are not ours to test
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(markdown or html)
    assert not broken


def test_every_page_is_reached_from_the_contents() -> None:
    seen: set[Path] = set()
    to_read = [ROOT / "README.md"]
    while to_read:
        page = to_read.pop()
        if page in seen:
            continue
        seen.add(page)
        targets = [
            (page.parent / (one or other).partition("#")[0]).resolve() for one, other in LINK.findall(prose(page))
        ]
        to_read += [
            target for target in targets if target.suffix == ".md" and target.is_relative_to(ROOT) and target.exists()
        ]
    assert {page for page in all_pages() if page not in seen} == set()
