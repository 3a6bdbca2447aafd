"""The generated pages are current."""

import re
from pathlib import Path

import pytest
from docs import generate
from docs.generate import PAGES
from tests.documentation.pages import ROOT


@pytest.mark.parametrize("path", PAGES)
def test_generated_page_is_current(path: str) -> None:
    assert (ROOT / path).read_text() == PAGES[path](), f"run: python {Path('docs/generate.py')}"


def test_commands_that_install_name_the_source_until_there_is_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = generate.pages_that_install()
    assert {"docs/install.md", "docs/tutorial.md", "docs/reference/tei.md"} <= set(pages)
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        commands = re.findall(r"^pip install .*weir-serving.*$", page.read_text(), re.MULTILINE)
        assert [each for each in commands if f'{generate.SOURCE}"' not in each] == [], page
    monkeypatch.setattr(generate, "SOURCE", "")
    assert 'pip install "weir-serving[embed]"' in generate.with_source("docs/reference/tei.md")
