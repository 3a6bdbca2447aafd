"""The copy button of the documentation takes the commands of a console block, without prompts and output."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

SCRIPT = Path(__file__).resolve().parents[4] / "docs" / "console-copy.js"
# What the site makes of blocks: `gp` is a prompt, `go` output.
PAGE = """<!doctype html><script src="{script}"></script>
<div class="highlight"><button class="md-clipboard" id="console">copy</button><pre><code><span class="gp">$ </span>weir serve square:Square
<span class="gp">$ </span>curl -d <span class="m">3</span> localhost:8000/infer/square
<span class="go">9</span>
</code></pre></div>
<div class="highlight"><button class="md-clipboard" id="python">copy</button><pre><code>x = 1
</code></pre></div>"""


@pytest.mark.browser
def test_copy_button_takes_commands_only(browser: "Chrome", tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGE.format(script=SCRIPT.as_uri()))
    browser.get(page.as_uri())
    taken = {}
    for name in ("console", "python"):
        button = browser.find_element("id", name)
        button.click()
        taken[name] = button.get_attribute("data-clipboard-text")
    assert taken["console"] == "weir serve square:Square\ncurl -d 3 localhost:8000/infer/square"
    assert taken["python"] is None  # the site copies the whole block
