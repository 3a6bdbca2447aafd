"""The page for everybody: keyboard, screen readers, both themes, little motion, narrow screens."""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from tests.frontends.dashboard.browser.site import Page, shown
from tests.frontends.dashboard.browser.test_watched import opened, watch_by_hand
from tests.frontends.dashboard.kit import Scene

from weir.errors import Overloaded
from weir.frontends.dashboard import pages_of

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.browser

# The contrast of each text with what is behind it (WCAG 2.2, 1.4.3), of those below 4.5.
_FAINT = """
const parse = color => { const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number); return {rgb: [r, g, b], a}; };
const light = rgb => rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = element => {
  for (let at = element; at; at = at.parentElement) {
    const {rgb, a} = parse(getComputedStyle(at).backgroundColor);
    if (a === 1) return rgb;
  }
  return [255, 255, 255];
};
const faint = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  if (!own || !element.checkVisibility() || element.closest(".hidden, .skip")) continue;
  const style = getComputedStyle(element);
  const color = element.closest("svg") ? style.fill : style.color;
  const [a, b] = [light(parse(color).rgb), light(behind(element))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) faint.push([element.textContent.slice(0, 40), ratio.toFixed(2)]);
}
return faint;
"""
_FOCUS = """
const at = document.activeElement, style = getComputedStyle(at.closest(".choice") ? at.nextElementSibling : at);
return [at.id || at.name || at.className || at.tagName, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
"""
_SIDEWAYS = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
_NAMED = {"button", "radio", "combobox", "slider", "table", "img", "image", "region", "form", "DisclosureTriangle"}


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    scene = Scene("square", "other")
    watch = watch_by_hand(scene)
    watch.look()
    for second in range(120):
        scene.now += 1
        scene.end("square", error=Overloaded("full") if second % 3 else None, times=5)
        watch.take(0.001)
    with shown(pages_of(watch).endpoints) as url:
        yield url


@pytest.fixture
def page(browser: "Chrome", site: str) -> Page:
    opened = Page(browser, site)
    opened.prefer("prefers-color-scheme", "light")
    opened.resize(1280)
    return opened


def ground(page: Page) -> str:
    return str(page.run("return getComputedStyle(document.body).backgroundColor"))


def test_themes_follow_the_system_and_the_switch(page: Page) -> None:
    light = ground(page)
    page.prefer("prefers-color-scheme", "dark")
    dark = ground(page)
    assert light != dark
    page.click("[name=theme][value=light]")
    assert ground(page) == light
    page.prefer("prefers-color-scheme", "light")
    page.click("[name=theme][value=dark]")
    assert ground(page) == dark
    page.browser.refresh()
    page.until(page.updated)
    assert ground(page) == dark
    page.click("[name=theme][value=auto]")
    assert ground(page) == light


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_can_be_read_in_both_themes(page: Page, theme: str) -> None:
    page.click(f"[name=theme][value={theme}]")
    page.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.run(_FAINT) == []
    page.click("[name=theme][value=auto]")


def test_the_keyboard_does_everything(page: Page) -> None:
    from selenium.webdriver import ActionChains, Keys

    def press(*keys: str) -> None:
        ActionChains(page.browser).send_keys(*keys).perform()

    stops = []
    for _ in range(9):
        press(Keys.TAB)
        name, visible = page.run(_FOCUS)
        assert visible, f"the focus on {name} is not seen"
        stops.append(name)
    assert stops[:7] == ["skip", "model", "span", "moment", "theme", "pause", "SUMMARY"]
    press(Keys.ENTER)
    page.until(lambda: page.rows("details[open]"), "the table behind the chart")
    page.run("document.getElementById('pause').focus()")
    press(Keys.SPACE)
    assert (page.text("#verdict"), page.text("#pause")) == ("Paused", "Resume")
    press(Keys.SPACE)
    assert page.text("#pause") == "Pause"
    page.run("document.querySelector('[name=span]:checked').focus()")
    press(Keys.ARROW_RIGHT)
    assert page.text("#batches .span-text") == "in the last 15 min"
    page.run("document.getElementById('moment').focus()")
    press(Keys.ARROW_LEFT)
    assert "ago" in page.text("#moment-text")
    press(Keys.END)
    assert page.text("#moment-text").startswith("now")
    page.run("document.querySelector('#models button').focus()")
    press(Keys.ENTER)
    assert page.run("return document.getElementById('model').value") == "square"
    page.run("document.querySelector('.skip').focus()")
    press(Keys.ENTER)
    assert page.run("return document.activeElement.id") == "figures"


def test_a_screen_reader_finds_names_and_landmarks(page: Page) -> None:
    nodes: list[dict[str, Any]] = page.emulate("Accessibility.getFullAXTree")["nodes"]
    seen = [
        (node["role"]["value"], str(node.get("name", {}).get("value", "")).strip())
        for node in nodes
        if not node["ignored"]
    ]
    unnamed = [role for role, name in seen if role in _NAMED and not name]
    assert unnamed == []
    roles = [role for role, _ in seen]
    for landmark in ("banner", "main", "contentinfo", "status"):
        assert roles.count(landmark) == 1, landmark
    assert {("group", "Time shown"), ("group", "Colours")} <= set(seen)
    names = dict(seen)
    assert names["slider"] == "Look back"
    charts = [name for role, name in seen if role in ("img", "image")]
    assert len(charts) == 4
    assert any("Requests" in name and "highest" in name for name in charts)
    live = page.run(
        "return [...document.querySelectorAll('[aria-live], [role=status], [role=alert]')].map(each => each.id)"
    )
    assert live == ["verdict"]
    repeated = (
        "const ids = [...document.querySelectorAll('[id]')].map(each => each.id); return ids.length - new Set(ids).size"
    )
    assert page.run(repeated) == 0
    assert page.run("return document.documentElement.lang") == "en"
    levels = page.run("return [...document.querySelectorAll('h1, h2, h3')].map(each => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_nothing_moves_for_those_who_want_it_still(page: Page) -> None:
    moves = "return getComputedStyle(document.querySelector('.fill')).transitionDuration"
    page.prefer("prefers-reduced-motion", "reduce")
    assert page.run(moves) in ("0s", "")


@pytest.mark.parametrize("width", [320, 768, 1600])
def test_no_width_makes_the_page_scroll_sideways(page: Page, width: int) -> None:
    page.resize(width)
    assert page.run(_SIDEWAYS) <= 0
    chart = "return document.querySelector('#requests svg').getBoundingClientRect().width"
    assert 200 < page.run(chart) < width


@pytest.mark.parametrize("width", [320, 400])
def test_a_long_name_makes_no_width_scroll_sideways(browser: "Chrome", width: int) -> None:
    with opened(browser, watch_by_hand(Scene("sentiment_of_reviews" * 4))) as page:
        page.resize(width)
        assert "sentiment_of_reviews" in page.text("#verdict")
        assert page.run(_SIDEWAYS) <= 0
