import json
import os
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from tests.frontends.dashboard.kit import Scene
from tests.frontends.http.fast.kit import Square
from tests.rings import subcases

import weir
from weir.errors import Cancelled, ModelNotFound, Overloaded
from weir.frontends.dashboard import (
    REST,
    DashboardSampler,
    Ring,
    SamplingTimer,
    Sections,
    Watch,
    assets,
    change,
    count,
    make_dashboard,
    use_of,
)
from weir.frontends.http.application import code_of, make_exposition
from weir.frontends.http.asgi import routes_of
from weir.telemetry.recorder import Metrics
from weir.testing import FakeExecutor


async def test_a_sample_has_what_changed_since_the_one_before() -> None:
    async with Scene("square", "idle") as scene:
        await scene.infer("square", 1, 2)
        first, present = scene.sampler.sample()
        assert first is None
        assert present["models"]["square"]["counts"]["rows"][-1] == 2
        scene.now += 1.25
        await scene.infer("square", 3, 4, 5)
        second, present = scene.sampler.sample(late=0.25)
        assert second is not None
        assert (second["seconds"], second["late"], second["at"]) == (1.25, 0.25, 1_000_101.25)
        assert set(second["models"]) == {"square"}
        assert second["models"]["square"]["rows"][-1] == 3
        assert second["models"]["square"]["ends"] == {"python": {"ok": 3}}
        assert present["models"]["square"]["counts"]["rows"][-1] == 5
        scene.now += 1
        third, _ = scene.sampler.sample()
        assert third is not None and third["models"] == {}


async def test_levels_workers_and_settings() -> None:
    async with Scene("square", max_batch_size=7) as scene:
        model = scene.present()["models"]["square"]
        assert (model["ready"], model["levels"]["waiting"], model["settings"]["max_batch_size"]) == (True, 0, 7)
        assert [(worker["index"], worker["state"]) for worker in model["workers"]] == [(0, "ready")]
    model = scene.present()["models"]["square"]
    assert model["ready"] is False and model["reason"]
    _, uncounted = DashboardSampler(scene.registry, None).sample()
    assert "counts" not in uncounted["models"]["square"]
    assert uncounted["models"]["square"]["levels"]["waiting"] == 0


def test_sections_are_shown_where_there_is_something_of_them() -> None:
    scene = Scene("square")
    alone = scene.present()
    assert not {"on_demand", "fronts"} & set(alone)
    assert (alone["clients"], alone["models"]["square"]["residency"]) == ([], None)
    memory = {"memory_bytes": 3, "memory_limit": None}
    clients = [{"client": f"client {number}", "requests": number} for number in range(150)]
    rows = [{"number": 0, "pid": os.getpid()}, {"number": 1, "pid": 1 << 30}]
    scene.registry.on_demand = {"square": "", "unread": ""}
    present = scene.present(Sections(memory=lambda: memory, clients=lambda: clients, fronts=lambda: rows))
    assert present["on_demand"] == {**memory, "models": 2}
    assert present["clients"] == clients[:20]
    first, ended = present["fronts"]
    assert (first["number"], ended) == (0, rows[1])
    assert first["memory_bytes"] > 1 << 20
    assert present["machine"]["memory_bytes"] > 1.5 * alone["machine"]["memory_bytes"]  # their use is the server's


def test_the_use_of_processes() -> None:
    use = use_of(os.getpid())
    assert use is not None and use.memory_bytes > 1 << 20 and use.cpu > 0
    assert use_of(1 << 30) is None
    scene = Scene("square")
    scene.sampler.sample()
    changes, present = scene.sampler.sample()
    assert changes is not None
    assert present["machine"]["memory_bytes"] > 1 << 20
    assert 0 <= changes["machine"]["cpu"] < present["machine"]["cpu"]
    assert present["machine"]["workers_memory_bytes"] == 0


def test_the_use_of_workers_on_other_machines_is_unknown() -> None:
    scene = Scene("square")
    (service,) = scene.registry.all
    elsewhere = service.state(brief=True)
    elsewhere["workers"] = [worker | {"node": "a73d8eb5"} for worker in elsewhere["workers"]]
    with patch.object(service, "state", return_value=elsewhere):
        scene.sampler.sample()
        changes, present = scene.sampler.sample()
    assert changes is not None
    assert changes["machine"]["workers_cpu"] is present["machine"]["workers_memory_bytes"] is None
    assert present["machine"]["memory_bytes"] > 1 << 20


async def test_the_counts_are_those_of_the_metrics_page() -> None:
    async with Scene("square", "other", max_batch_size=4) as scene:
        await scene.infer("square", *range(11))
        await scene.infer("other", 1)
    registry = make_exposition(scene.metrics, scene.registry).registry
    counts, labels = count(scene.metrics, code_of), {"model": "square"}
    shown = counts["square"]
    assert sum(shown["ends"]["python"].values()) == 11
    assert shown["rows"][-1] == registry.get_sample_value("weir_batch_size_sum", labels) == 11
    assert sum(shown["rows"][:-1]) == registry.get_sample_value("weir_batch_size_count", labels)
    for reason, batches in shown["batches"].items():
        assert batches == registry.get_sample_value("weir_batches_total", labels | {"reason": reason})
    assert shown["total"][-1] == registry.get_sample_value("weir_total_time_seconds_sum", labels)
    assert counts["other"]["rows"][-1] == 1


def test_ends_say_code_and_error_and_strangers_names_are_no_labels() -> None:
    metrics = Metrics()
    for name, frontend, error in (
        ("square", "http", Overloaded("full")), ("square", "python", Overloaded("full")),
        ("square", "http", Cancelled("left")), ("whatever", "http", ModelNotFound("none")),
    ):  # fmt: skip
        metrics.refused(name, frontend, error)
    metrics.transferred("square", "http", 10, 20)
    counts = count(metrics, code_of)
    assert counts["square"]["ends"] == {"http": {"429 Overloaded": 1, "499 Cancelled": 1}, "python": {"Overloaded": 1}}
    assert counts["square"]["bytes"] == {"http": [10, 20]}
    assert counts[""]["ends"] == {"http": {"404 ModelNotFound": 1}}
    assert set(counts) == {"square", ""}


def test_what_products_count_joins_their_models() -> None:
    registry = CollectorRegistry()
    tokens = Counter("weir_tokens", "", ["model", "version"], registry=registry)
    padding = Counter("weir_padding_tokens", "", ["model"], registry=registry)
    tokens.labels("text", "2").inc(100)
    padding.labels("text").inc(7)
    assert count(Metrics(), code_of, [tokens, padding]) == {"text/2": {"tokens": 100}, "text": {"padding": 7}}


@subcases(
    ("before", "now", "changed"),
    [
        ({}, {"a": {"b": 2, "c": 0}}, {"a": {"b": 2}}),
        ({"a": {"b": 2}}, {"a": {"b": 2}}, None),
        ({"a": {"b": 2, "h": [1, 2, 3]}}, {"a": {"b": 5, "h": [1, 4, 3]}}, {"a": {"b": 3, "h": [0, 2, 0]}}),
        ({"a": {"h": [1, 2]}}, {"a": {"h": [1, 2]}, "b": {"h": [4, 0]}}, {"b": {"h": [4, 0]}}),
        ({"a": {}, "b": {"n": 1}}, {"a": {"n": 1}}, {"a": {"n": 1}}),
        ({}, {}, None),
    ],
)
def test_changes_leave_out_what_stood_still(before: Any, now: Any, changed: Any) -> None:
    assert change(now, before) == changed


class Timers:
    """A clock with at most one timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: float | None = None
        self._callback: Callable[[], None] | None = None

    def later(self, seconds: float, callback: Callable[[], None]) -> "Timers":
        self.due, self._callback = self.now + seconds, callback
        return self

    def cancel(self) -> None:
        self.due = None

    def fire(self, late: float = 0.0) -> None:
        assert self.due is not None and self._callback is not None
        self.now, self.due = self.due + late, None
        self._callback()


def make_timer(patience: float = 900.0) -> tuple[SamplingTimer, Timers, list[float]]:
    delays, timers = list[float](), Timers()
    return SamplingTimer(delays.append, patience=patience, clock=lambda: timers.now, later=timers.later), timers, delays


def test_nothing_beats_while_nobody_looks() -> None:
    timer, timers, delays = make_timer(patience=3.0)
    assert (timers.due, delays, timer.running) == (None, [], False)
    timer.look()
    assert (timers.due, delays, timer.running) == (1.0, [0.0], True)
    timers.fire(late=0.25)  # which moves no other
    assert (delays[-1], timers.due) == (0.25, 2.0)
    for _ in range(3):
        timers.fire()
    assert (timers.due, len(delays), timer.running) == (None, 4, False)
    timer.look()
    timers.fire(late=2.0)  # what was missed is not made up for
    assert (delays[-1], timers.due) == (2.0, 8.0)
    timer.stop()
    timer.stop()
    assert timers.due is None


def test_it_beats_slowly_while_nobody_looks_once_it_has_begun() -> None:
    timer, timers, delays = make_timer(patience=2.0)
    timer.begin()
    timer.begin()
    assert (delays, timers.due) == ([0.0], REST)
    timers.fire()
    assert (len(delays), timers.due) == (2, 2 * REST)
    timer.look()  # at once, and every second from now on
    assert (len(delays), timers.due) == (3, REST + 1.0)
    for _ in range(4):
        timers.fire()
    assert (len(delays), timers.due) == (7, REST + 3.0 + 2 * REST)
    timer.stop()
    assert timers.due is None


def test_the_ring_keeps_the_newest_within_its_bounds() -> None:
    ring = Ring(kept=3, kept_bytes=10)
    for number in range(1, 6):
        ring.put(b"%d" % number)
    assert ring.since(0) == (5, [b"3", b"4", b"5"])
    assert ring.since(4) == (5, [b"5"])
    assert ring.since(5) == ring.since(99) == (5, [])
    ring.put(b"123456789")
    assert ring.since(0) == (6, [b"5", b"123456789"])
    assert ring.size_bytes == 10
    ring.put(b"far too large")
    assert ring.since(0) == (7, [])
    assert Ring().since(0) == (0, [])


def test_a_long_answer_comes_in_parts() -> None:
    ring = Ring()
    for number in range(1, 5):
        ring.put(b"%d" % number * 4)
    assert ring.since(0, 8) == (2, [b"1111", b"2222"])
    assert ring.since(2, 8) == (4, [b"3333", b"4444"])
    assert ring.since(0, 1) == (1, [b"1111"])


def watched(scene: Scene, ring: Ring) -> tuple[Watch, Timers]:
    timers = Timers()
    return Watch(scene.sampler, ring, counted=True, clock=lambda: timers.now, later=timers.later), timers


async def test_whoever_looks_gets_what_is_new_to_him() -> None:
    async with Scene("square") as scene:
        watch, timers = watched(scene, Ring())
        first = json.loads(watch.look())
        assert (first["samples"], first["last"], first["more"]) == ([], 0, False)
        assert first["now"]["models"]["square"]["ready"] is True
        for _ in range(3):
            scene.now += 1
            await scene.infer("square", 1)
            timers.fire()
        assert [sample["number"] for sample in json.loads(watch.look(first["life"], 1))["samples"]] == [2, 3]
        again = json.loads(watch.look(first["life"], 3))
        assert (again["samples"], again["last"]) == ([], 3)
        assert again["now"]["models"]["square"]["counts"]["rows"][-1] == 3
        stranger = json.loads(watch.look("of another process", 2))
        assert [sample["models"]["square"]["rows"][-1] for sample in stranger["samples"]] == [1, 1, 1]
        assert stranger["server"]["buckets"]["rows"][0] == 1


def test_a_day_of_watching_keeps_fifteen_minutes() -> None:
    scene, ring = Scene("square"), Ring()
    watch, timers = watched(scene, ring)
    watch.look()
    for _ in range(2000):
        scene.now += 1
        timers.fire()
        watch.timer.look()
    _, samples = ring.since(0)
    assert len(samples) == 900
    assert json.loads(samples[-1])["at"] - json.loads(samples[0])["at"] == 899


ABROAD = re.compile(r"""(?:src|href|url|import|from)\s*[=(]?\s*["'(]?\s*(?:https?:)?//""")


async def get(app: Any, *paths: str) -> list[httpx.Response]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weir") as client:
        return [await client.get(path) for path in paths]


@pytest.fixture
def page() -> Starlette:
    scene = Scene("square")
    return Starlette(routes=routes_of(make_dashboard(scene.registry, scene.metrics).endpoints))


async def test_every_part_of_the_page_is_ours_and_kept_apart_from_strangers(page: Starlette) -> None:
    paths = [f"/dashboard/{name}" for name in assets() if name != "page.html"]
    assert {"/dashboard/main.js", "/dashboard/style.css"} < set(paths)
    for answer in await get(page, "/dashboard", *paths):
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not ABROAD.search(answer.text), answer.url
        assert "innerHTML" not in answer.text
        if answer.url.path.endswith(".js"):
            assert answer.headers["content-type"].startswith("text/javascript")
            assert set(re.findall(r'from "\./([^"]+)"', answer.text)) <= set(assets())


async def test_the_page_has_neither_script_nor_style_of_its_own(page: Starlette) -> None:
    (answer,) = await get(page, "/dashboard")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", answer.text)
    loaded = set(re.findall(r'(?:src|href)="([^"]+)"', answer.text))
    assert {"dashboard/main.js", "dashboard/style.css"} <= loaded
    parts = await get(page, *[f"/{path}" for path in loaded if path.startswith("dashboard/")])
    assert {part.status_code for part in parts} == {200}


async def test_the_data_is_json_whatever_the_query(page: Starlette) -> None:
    queries = ("", "?since=-1", "?since=x&life=%00", "?since=99999999999999999999")
    for answer in await get(page, *[f"/dashboard/data{query}" for query in queries]):
        assert (answer.headers["content-type"], answer.headers["cache-control"]) == ("application/json", "no-store")
        assert answer.json()["samples"] == []


async def test_an_application_under_another_server_has_the_page() -> None:
    hosted = weir.asgi(Square, executor=FakeExecutor(list))
    page, index, openapi = await get(hosted, "/dashboard", "/", "/openapi.json")
    assert page.text.startswith("<!doctype html>")
    for shown in (index.json()["pages"], openapi.json()["paths"]):
        assert [path for path in shown if path.startswith("/dashboard")] == ["/dashboard"]
