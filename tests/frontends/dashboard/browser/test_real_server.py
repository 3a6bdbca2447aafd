"""The page of a real server, under load: its numbers are those of /metrics."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.catalog.repository.shelf import PLAIN, write
from tests.frontends.dashboard.browser.site import Page
from tests.served import Served, serving

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.browser
MODELS = Path(__file__).parent / "loaded_models.py"
Labels = dict[str, str]


class Metrics:
    """What /metrics says at one moment."""

    def __init__(self, client: httpx.Client) -> None:
        families = text_string_to_metric_families(client.get("/metrics").text)
        self.samples = [sample for family in families for sample in family.samples]
        self.at = time.monotonic()

    def sum(self, name: str, **labels: str) -> float:
        return sum(
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, httpx.Client]]:
    jobs = tmp_path_factory.mktemp("jobs")
    with serving(f"{MODELS}:Steady", f"{MODELS}:Narrow", "--batch-dir", jobs) as server:
        yield server


@pytest.fixture
def page(browser: "Chrome", served: tuple[Served, httpx.Client]) -> Page:
    return Page(browser, served[0].url)


def infer(url: str, model: str, count: int, at_once: int) -> None:
    """Put `count` questions, so many at once; whatever the answers."""

    async def call() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            turns = asyncio.Semaphore(at_once)

            async def one(number: int) -> None:
                async with turns:
                    await client.post(f"/infer/{model}", json=number)

            await asyncio.gather(*[one(number) for number in range(count)])

    asyncio.run(call())


@contextmanager
def load(url: str, model: str, at_once: int) -> Iterator[None]:
    """Keep `at_once` questions under way while the block runs."""
    over = threading.Event()

    async def call() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def one() -> None:
                while not over.is_set():
                    await client.post(f"/infer/{model}", json=3)
                    await asyncio.sleep(0.02)

            await asyncio.gather(*[one() for _ in range(at_once)])

    thread = threading.Thread(target=asyncio.run, args=(call(),))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def shown_totals(page: Page) -> dict[str, list[str]]:
    """Return of each model requests, failed, rows and batches, as the page writes them."""
    return {cells[0]: cells[2:6] for cells in page.rows("#models")}


def counted_totals(metrics: Metrics) -> dict[str, list[str]]:
    totals = {}
    for model in ("steady", "narrow"):
        ended = metrics.sum("weir_requests_total", model=model)
        good = metrics.sum("weir_requests_total", model=model, code="200")
        rows, batches = (metrics.sum(f"weir_batch_size_{which}", model=model) for which in ("sum", "count"))
        totals[model] = [f"{round(number):,}" for number in (ended, ended - good, rows, batches)]
    return totals


def test_under_load_the_numbers_are_those_of_the_metrics(
    page: Page, served: tuple[Served, httpx.Client]
) -> None:  # fmt: skip
    server, client = served
    with load(server.url, "steady", at_once=4):
        page.until(lambda: page.number("requests", "answered") > 0)
        before = Metrics(client)
        for _ in range(6):
            page.rested()
        rate = page.number("requests", "answered")
        p50, p99 = (page.number("time", name) for name in ("p50", "p99"))
        after = Metrics(client)
        assert page.text("#verdict") == "Keeping up"
    counted = after.sum("weir_requests_total", code="200") - before.sum("weir_requests_total", code="200")
    expected = counted / (after.at - before.at)
    assert expected > 0
    assert 0.6 * expected < rate < 1.6 * expected
    assert 0.0 < p50 <= p99 < 1000.0

    infer(server.url, "narrow", 60, at_once=30)
    infer(server.url, "nothing", 3, at_once=1)
    metrics = Metrics(client)
    wanted = counted_totals(metrics) | {"(no such model)": ["3", "3", "0", "0"]}
    page.until(lambda: shown_totals(page) == wanted, "the same totals")
    assert metrics.sum("weir_requests_total", code="429") > 0
    ends = {
        (code.split()[0], frontend): int(total.replace(",", "")) for code, frontend, _, _, total in page.rows("#ends")
    }
    for (code, frontend), total in ends.items():
        assert total == metrics.sum("weir_requests_total", code=code, frontend=frontend)
    assert sum(ends.values()) == metrics.sum("weir_requests_total")
    assert [code for code, *_ in page.rows("#ends")] == ["200", "404 ModelNotFound", "429 Overloaded"]
    requests = int(page.rows("#frontends")[0][2].replace(",", ""))
    assert requests == metrics.sum("weir_requests_total", frontend="http")


def test_overload_and_the_queue_are_shown(page: Page, served: tuple[Served, httpx.Client]) -> None:
    server, _ = served
    with load(server.url, "narrow", at_once=24):
        verdict = "const shown = document.querySelector('#verdict'); return [shown.textContent, shown.dataset.mood]"
        page.until(lambda: page.run(verdict) == ["Overloaded: requests are refused", "bad"], "the verdict")
        page.until(lambda: page.number("requests", "failed") > 0)
        page.until(lambda: page.number("waiting", "waiting") > 0, "a line")
        page.until(lambda: "refused" in page.text("#requests .note-line"), "the share that is refused")
    page.until(lambda: page.text("#verdict") == "Idle", "quiet again")


def test_pause_really_pauses_and_catches_up(page: Page, served: tuple[Served, httpx.Client]) -> None:
    server, client = served
    page.until(lambda: shown_totals(page).items() >= counted_totals(Metrics(client)).items())
    page.click("#pause")
    assert page.text("#verdict") == "Paused"
    frozen = page.run("return document.querySelector('main').textContent")
    page.requested()
    life = client.get("/dashboard/data").json()["life"]
    last = client.get("/dashboard/data").json()["last"]
    infer(server.url, "steady", 50, at_once=5)
    page.until(lambda: client.get(f"/dashboard/data?life={life}").json()["last"] >= last + 3, "three more samples")
    assert page.run("return document.querySelector('main').textContent") == frozen
    assert not [url for url in page.requested() if "/dashboard/data" in url]
    page.click("#pause")
    page.until(lambda: shown_totals(page).items() >= counted_totals(Metrics(client)).items(), "what was missed")
    good = Metrics(client).sum("weir_requests_total", code="200")
    code, _, _, in_time, total = page.rows("#ends")[0]
    assert (code, in_time, total) == ("200", f"{round(good):,}", f"{round(good):,}")


def test_workers_are_the_processes(page: Page, served: tuple[Served, httpx.Client]) -> None:
    server, _ = served
    page.click("#models button")
    page.until(lambda: page.run("return document.getElementById('model').value") == "steady")
    rows = page.until(lambda: page.rows("#workers"))
    assert [(row[0], row[2], row[4]) for row in rows] == [("steady", "ready", "0")]
    assert int(rows[0][7]) in {process.pid for process in server.children()}
    assert rows[0][5].endswith("MB")


def test_shared_devices_are_shown(browser: "Chrome", page: Page) -> None:
    assert not page.seen("#devices-part")
    turns = ("--device-group", "gpu0", "--device-order", "longest")
    with serving(f"{MODELS}:Steady", f"{MODELS}:Narrow", *turns) as (server, client):
        shared = Page(browser, server.url)
        for number in range(4):
            assert client.post("/infer/steady", json=number).status_code == 200
        shared.until(lambda: [row[5] for row in shared.rows("#devices")] == ["4", "0"], "the turns")
        steady, narrow = shared.rows("#devices")
        assert steady[:4] == ["gpu0", "steady", "longest", " 100 %"] and steady[7] == "the device was free"
        assert narrow[:4] == ["gpu0", "narrow", "longest", " 0 %"] and narrow[7] == "–"
        assert shared.seen("#devices-part")


def test_models_on_demand_are_shown_with_their_memory(browser: "Chrome", page: Page, tmp_path: Path) -> None:
    assert not page.seen("#demand-part")
    for name, needs in (("one", "6GB"), ("two", "6GB"), ("large", "12GB"), ("uncalled", "1GB")):
        config = f'needs_memory = "{needs}"\narena_bytes = 0\n'
        write(tmp_path, {f"{name}/1/model.py": PLAIN.format(answer=9), f"{name}/config.toml": config})
    on_demand = ("--model-repository", tmp_path, "--model-control", "on-demand", "--model-memory", "10GB")
    with serving(*on_demand) as (server, client):
        there = Page(browser, server.url)
        there.until(
            lambda: (
                there.text("#demand-memory") == "0 of 4 loaded · 0 MB of 10 GB · measured, or stated if that is more"
            ),
            "nothing loaded",
        )
        for name in ("one", "two", "large"):
            assert client.post(f"/infer/{name}", json=3).status_code == (503 if name == "large" else 200)
        there.until(lambda: there.text("#demand-memory").startswith("1 of 4 loaded · 6 GB of 10 GB"), "two loaded")
        rows = {row[0]: row for row in there.rows("#demand")}
        assert [*rows] == ["two/1", "one/1", "large/1"]
        assert {name: row[1] for name, row in rows.items()} == {
            "one/1": "evicted", "two/1": "loaded", "large/1": "failed"
        }  # fmt: skip
        assert rows["one/1"][2] == "–" and rows["two/1"][2].endswith(" MB")
        assert rows["one/1"][6] == "evicted for 'two/1'" and rows["large/1"][6].startswith("it takes 12GB")


def test_jobs_and_classes_of_work_are_shown(page: Page, served: tuple[Served, httpx.Client]) -> None:
    _, client = served
    assert (page.text("#jobs-counts"), page.rows("#jobs")) == ("0 running · 0 waiting · 0 done · 0 failed", [])
    made = []
    for url, count in (("/infer/steady", 300), ("/infer/other", 2)):  # the second is not the endpoint of its job
        lines = [f'{{"custom_id": "{number}", "url": "{url}", "body": {number}}}' for number in range(count)]
        file = client.post("/v1/files", files={"file": "\n".join(lines).encode()}, data={"purpose": "batch"}).json()[
            "id"
        ]
        job = {"input_file_id": file, "endpoint": "/infer/steady", "completion_window": "1h"}
        made.append(client.post("/v1/batches", json=job).json()["id"])
    page.until(lambda: page.text("#jobs-counts") == "0 running · 0 waiting · 1 done · 1 failed", "the end of both")
    failed, done = page.rows("#jobs")
    assert failed[:4] == [made[1], "/infer/steady", "failed", " 0 %"]
    assert done[:7] == [made[0], "/infer/steady", "completed", " 100 %", "300", "300", "0"]
    assert page.find("#jobs progress").get_attribute("max") == "1"
    assert page.seen("#classes")
    page.until(lambda: page.text("#classes .note-line") == "waiting: 0 interactive · 0 bulk", "nothing waiting")


def test_a_server_that_ends_is_missed_and_found_again(browser: "Chrome") -> None:
    with serving(f"{MODELS}:Steady") as (server, _):
        page = Page(browser, server.url)
    page.until(lambda: "does not answer" in page.text("#verdict"), "the word that nobody answers")
    assert page.find("#verdict").get_attribute("data-mood") == "bad"


def test_fronts_have_rows(browser: "Chrome", page: Page) -> None:
    assert not page.seen("#fronts-part")
    with serving(f"{MODELS}:Steady", "--fronts", "2") as (fronted, _):
        shown = Page(browser, fronted.url)
        shown.until(lambda: shown.rows("#fronts"))
        rows = shown.rows("#fronts")
        assert [row[0] for row in rows] == ["0", "1"]
        assert all("MB" in row[4] and int(row[6]) for row in rows)
