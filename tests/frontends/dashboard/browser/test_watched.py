"""The page, shown what a test says: fifteen minutes, hostile names, servers that count nothing."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from tests.frontends.dashboard.browser.site import Page, hosted, shown
from tests.frontends.dashboard.kit import Scene
from tests.frontends.http.fast.kit import Square

import weir
from weir.errors import Overloaded
from weir.frontends.dashboard import DashboardSampler, Ring, Sections, Watch, make_dashboard, pages_of
from weir.policy.cost import Prices, Profile
from weir.policy.online.adaptive import SolvedPolicy
from weir.policy.solve.bank import solve_bank

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.browser
HOSTILE = """<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>"&amp;'__proto__"""


class Nobody:
    """A timer that nobody winds."""

    def cancel(self) -> None: ...


def watch_by_hand(scene: Scene) -> Watch:
    """Return a watch that samples only when it is told."""
    return Watch(scene.sampler, Ring(), counted=True, clock=lambda: 0.0, later=lambda *_: Nobody())


@contextmanager
def opened(browser: "Chrome", watch: Watch) -> Iterator[Page]:
    """Show what `watch` has seen."""
    with shown(pages_of(watch).endpoints) as url:
        yield Page(browser, url)


def telling_of(scene: Scene, *clients: str) -> Watch:
    """Return a watch of `scene` that tells of `clients`, too."""
    rows = [{"client": name, "requests": 1} for name in clients]
    sections = Sections(clients=lambda: rows)
    scene.sampler = DashboardSampler(scene.registry, scene.metrics, sections, clock=lambda: scene.now)
    return watch_by_hand(scene)


@pytest.fixture(scope="module")
def long_page(browser: "Chrome") -> Iterator[Page]:
    """Twenty minutes of a request a second, half of them refused in the last minute."""
    scene = Scene("square")
    watch = watch_by_hand(scene)
    watch.look()
    for second in range(1200):
        scene.now += 1
        refused = second >= 1140 and second % 2
        scene.end("square", error=Overloaded("full") if refused else None)
        watch.take(0.0)
    with opened(browser, watch) as page:
        yield page


def in_time(page: Page) -> list[str]:
    return [cells[3] for cells in page.rows("#ends")]


def test_the_last_fifteen_minutes_are_there(long_page: Page) -> None:
    page = long_page
    totals = [cells[4] for cells in page.rows("#ends")]
    assert totals == ["1,170", "30"]
    for span, expected in ((900, ["870", "30"]), (300, ["270", "30"]), (60, ["30", "30"])):
        page.click(f'[name=span][value="{span}"]')
        assert in_time(page) == expected
    page.click('[name=span][value="900"]')
    drawn = page.run("return document.querySelector('#requests .line.a').getAttribute('d')")
    first, last = (float(point.split(" ")[0]) for point in (drawn[1:].split("h")[0], drawn.split("L")[-1]))
    left, right = (
        page.run(f"return document.querySelector('#requests .base').{x}.baseVal.value") for x in ("x1", "x2")
    )
    assert left < first < left + 0.02 * (right - left)
    assert right - 0.02 * (right - left) < last < right
    labels = "return [...document.querySelectorAll('#requests .label')].map(each => each.textContent).filter(Boolean)"
    top, middle, bottom, *times = page.run(labels)
    assert (top, middle, bottom) == ("1 /s", "0.50", "0") and len(set(times)) == 3


def test_looking_back_shows_what_was_then(long_page: Page) -> None:
    page = long_page
    page.click('[name=span][value="300"]')
    slider = page.find("#moment")
    assert page.number("requests", "failed") > 0
    page.run("arguments[0].value = 60; arguments[0].dispatchEvent(new Event('input'))", slider)
    assert page.number("requests", "answered") == 1
    assert page.number("requests", "failed") == 0
    assert "ago" in page.text("#moment-text")
    assert "ago" in str(slider.get_attribute("aria-valuetext"))
    page.run("arguments[0].value = arguments[0].max; arguments[0].dispatchEvent(new Event('input'))", slider)
    assert page.text("#moment-text").startswith("now")


def test_a_sample_that_came_late_leaves_no_gap(browser: "Chrome") -> None:
    scene = Scene("square")
    watch = watch_by_hand(scene)
    watch.look()
    for seconds in (1, 1, 3.5, 1):
        scene.now += seconds
        scene.end("square", times=7)
        watch.take(0.0)
    with opened(browser, watch) as page:
        page.click('[name=span][value="60"]')
        drawn = page.run("return document.querySelector('#requests .line.a').getAttribute('d')")
        assert drawn.count("M") == 1
        assert drawn.count("L") >= 5
        assert [row[1] for row in page.rows("#ends")] == ["http"]


def test_names_are_shown_and_never_run(browser: "Chrome") -> None:
    scene = Scene("square")
    watch = telling_of(scene, HOSTILE, "b", "team-10", "a")
    for name in (HOSTILE, "__proto__", "constructor"):
        scene.end(name, HOSTILE)
        scene.metrics.transferred(name, HOSTILE, 1, 0)
    watch.look()
    with opened(browser, watch) as page:
        page.complaints()
        page.until(lambda: len(page.rows("#models")) == 4)
        assert {row[0] for row in page.rows("#models")} == {HOSTILE, "__proto__", "constructor", "square"}
        assert [row[0] for row in page.rows("#clients")] == [HOSTILE, "b", "team-10", "a"]  # as it tells of them
        for number in range(4):
            page.click(f"#models tr:nth-child({number + 1}) button")
            assert [row[1] for row in page.rows("#ends")] in ([HOSTILE], [])
        assert page.run("return [window.hacked, document.images.length, document.scripts.length]") == [None, 0, 1]
        assert page.complaints() == []


def test_padding_is_shown_where_it_is_counted(browser: "Chrome") -> None:
    scene = Scene("square")
    registry = CollectorRegistry()
    tokens = Counter("weir_tokens", "", ["model"], registry=registry).labels("square")
    padding = Counter("weir_padding_tokens", "", ["model"], registry=registry).labels("square")
    sections = Sections([tokens, padding])
    scene.sampler = DashboardSampler(scene.registry, scene.metrics, sections, clock=lambda: scene.now)
    watch = watch_by_hand(scene)
    watch.look()
    tokens.inc(190)
    padding.inc(10)
    scene.now += 1
    watch.take(0.0)
    with opened(browser, watch) as page:
        assert page.seen("#padding")
        assert page.number("padding", "waste") == 5
    with opened(browser, watch_by_hand(Scene("square"))) as page:
        assert not page.seen("#padding")


@pytest.mark.parametrize(
    ("texts", "words"), [(True, ["Texts", "Dispatched", "texts"]), (False, ["Requests", "Rows", "rows"])]
)
def test_one_word_stands_for_what_a_model_reads(
    browser: "Chrome", monkeypatch: pytest.MonkeyPatch, texts: bool, words: list[str]
) -> None:
    monkeypatch.setattr(Square, "plain_texts", texts)
    scene = Scene("model", padded=True)
    watch = watch_by_hand(scene)
    watch.look()
    scene.now += 1
    watch.take(0.0)
    with opened(browser, watch) as page:
        assert [page.text(each) for each in ("#requests-title", "#rows-title", "#waiting .unit")] == words
        heads = page.run("return [...document.querySelectorAll('thead th')].map(each => each.textContent)")
        assert page.text("#models thead").startswith(f"ModelState{words[0]}Failed{words[1]}Batches")
        assert f"{words[0]}/s" in heads and not {"Sentences", "Rows" if texts else "Texts"} & set(heads)
        assert f"{words[2]} in a batch" in page.text("#shares")
        assert "nothing computed" in page.text("#padding")


async def test_how_many_workers_there_are_and_why(browser: "Chrome") -> None:
    async with Scene("square", workers="1..16") as scene:

        def look() -> None:
            with opened(browser, watch_by_hand(scene)) as page:
                rows = {cells[0]: cells[-2:] for cells in page.rows("#models")}
                assert rows["square"] == [
                    "1 of 1..16", "too few batches have been run to know what a worker can do"
                ]  # fmt: skip

        await asyncio.to_thread(look)


def test_workers_of_a_cluster_are_shown_with_their_node(browser: "Chrome") -> None:
    scene = Scene("square")
    (worker,) = scene.services[0].executor.states()
    place = {"node": "4f2a9c0011223344", "address": "10.0.0.7", "gpus": ["0", "3"], "actor": "9b1d5e77aa"}
    for name, value in place.items():
        setattr(worker, name, value)
    with opened(browser, watch_by_hand(scene)) as page:
        heads = page.run(
            "return [...document.querySelectorAll('#workers th[scope=col]')].map(each => each.textContent)"
        )
        row = dict(zip(heads, page.rows("#workers")[0], strict=True))
        assert (row["Node"], row["GPUs"], row["Actor"]) == ("10.0.0.7 4f2a9c00", "0 3", "9b1d5e77aa")


def test_a_server_that_counts_nothing_says_so(browser: "Chrome") -> None:
    scene = Scene("square")
    with shown(make_dashboard(scene.registry, None).endpoints) as url:
        page = Page(browser, url)
        assert page.seen("#uncounted")
        page.until(lambda: page.seen("#memory"), "a sample")
        assert not page.seen("#requests")
        assert not page.seen("#ends")
        assert "takes no requests" in page.text("#verdict")


def test_several_processes_at_one_address_are_distinguished(browser: "Chrome") -> None:
    scenes = [Scene("square"), Scene("square")]
    lives = [watch_by_hand(scene) for scene in scenes]
    turn = iter(range(1_000_000))

    class Turns(Watch):
        def look(self, life: str = "", since: int = 0) -> bytes:
            return lives[next(turn) % 2].look(life, since)

    with opened(browser, Turns(scenes[0].sampler, Ring(), counted=True)) as page:
        page.until(lambda: page.seen("#several"), "the note")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of two models, one with a solved policy, and batch jobs."""
    profile = Profile.linear(alpha_ms=0.02, tau0_ms=0.08, max_batch_size=4)
    policy = SolvedPolicy(solve_bank(profile, Prices(1.0, 1.0), rates=[0.1 * profile.max_rate]))
    solved = weir.Service(Square, name="solved", executor="inline", policy=policy, max_batch_size=4)
    ruled = weir.Service(Square, name="ruled", executor="inline", policy="greedy")
    with hosted(weir.asgi(solved, ruled, batch_dir=str(tmp_path_factory.mktemp("jobs")))) as url:
        yield url


def test_the_page_of_a_policy_says_in_sentences_what_it_does(browser: "Chrome", server: str) -> None:
    for _ in range(3):
        httpx.post(f"{server}/infer/solved/batch", json=[3] * 20).raise_for_status()
    page = Page(browser, server)
    page.complaints()
    browser.get(f"{server}/dashboard/policy.html#solved")
    page.until(lambda: "when a batch is dispatched" in page.text("#told"), "the policy")
    assert "Now it dispatches once" in page.text("#told") and "rows arrive per second" in page.text("#told")
    assert ["4", "0.16 ms"] in page.rows("#told section:last-child")
    browser.get(f"{server}/dashboard/policy.html#ruled")
    page.until(lambda: "The policy greedy decides for 1 worker" in page.text("#told"), "the other policy")
    assert "It follows a fixed rule; nothing was solved." in page.text("#told")
    assert page.complaints() == []


def test_the_api_page_has_what_is_served_before_the_server_itself(browser: "Chrome", server: str) -> None:
    page = Page(browser, server)
    browser.get(f"{server}/docs")
    titles = page.until(
        lambda: page.run("return [...document.querySelectorAll('h2')].map(each => each.textContent)"), "the API"
    )
    assert titles == ["solved", "ruled", "batch jobs", "server", "Open Inference Protocol"]
    paths = page.run("return [...document.querySelectorAll('.route > summary code')].map(each => each.textContent)")
    assert [path for path in paths if path.startswith("/dashboard")] == ["/dashboard"]
    seen = page.run(
        "return [...document.querySelectorAll('.headers input')].filter(each => each.checkVisibility()).length"
    )
    assert (seen, page.run("return document.querySelectorAll('.route[open]').length")) == (0, 1)
