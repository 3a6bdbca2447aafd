"""The generated pages are current."""

from pathlib import Path

import pytest
from docs.generate import PAGES
from tests.documentation.pages import ROOT


@pytest.mark.parametrize("path", PAGES)
def test_generated_page_is_current(path: str) -> None:
    assert (ROOT / path).read_text() == PAGES[path](), f"run: python {Path('docs/generate.py')}"
