"""The generated pages are current."""

from pathlib import Path

import pytest
from docs import generate
from docs.generate import PAGES
from tests.documentation.pages import ROOT


@pytest.mark.parametrize("path", PAGES)
def test_generated_page_is_current(path: str) -> None:
    assert (ROOT / path).read_text() == PAGES[path](), f"run: python {Path('docs/generate.py')}"


def test_each_page_that_installs_says_once_that_there_is_no_release_and_a_release_takes_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = generate.pages_that_install()
    assert "docs/reference/tei.md" in pages and "docs/install.md" not in pages
    for path in pages:
        text = (ROOT / path).read_text()
        assert text.count("Not on PyPI yet: [install](") == 1, path
        monkeypatch.setattr(generate, "RELEASED", True)
        assert "PyPI yet" not in generate.with_install_note(
            path
        ) and generate.NOTE_BEGIN not in generate.with_install_note(path)
        monkeypatch.setattr(generate, "RELEASED", False)
