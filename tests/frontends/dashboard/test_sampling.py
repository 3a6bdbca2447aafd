import os
from typing import Any
from unittest.mock import patch

import pytest
from prometheus_client import CollectorRegistry, Counter
from tests.frontends.dashboard.kit import Scene

from weir.errors import Cancelled, ModelNotFound, Overloaded
from weir.frontends.dashboard.sampling import DashboardSampler, change, count, use_of
from weir.frontends.http.pages import code_of, make_exposition
from weir.telemetry.recorder import Metrics


def test_a_sample_has_what_changed_since_the_one_before() -> None:
    scene = Scene("square", "idle")

    async def script() -> None:
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
        assert third is not None
        assert third["models"] == {}

    scene.play(script)


def test_levels_workers_and_settings() -> None:
    scene = Scene("square", max_batch_size=7)

    async def script() -> None:
        _, present = scene.sampler.sample()
        model = present["models"]["square"]
        assert model["ready"] is True
        assert model["levels"]["waiting"] == 0
        assert [(worker["index"], worker["state"]) for worker in model["workers"]] == [(0, "ready")]
        assert model["settings"]["max_batch_size"] == 7

    scene.play(script)
    _, present = scene.sampler.sample()
    assert present["models"]["square"]["ready"] is False
    assert present["models"]["square"]["reason"]


def test_without_metrics_there_are_levels_only() -> None:
    scene = Scene("square")
    _, present = DashboardSampler(scene.registry, None).sample()
    assert "counts" not in present["models"]["square"]
    assert present["models"]["square"]["levels"]["waiting"] == 0


def test_what_models_on_demand_take_is_shown_with_how_many_there_are() -> None:
    scene = Scene("square")
    _, without = scene.sampler.sample()
    assert "on_demand" not in without and without["models"]["square"]["residency"] is None
    memory = {"memory_bytes": 3, "memory_limit": None}
    scene.registry.on_demand = {"square": "", "unread": ""}
    _, present = DashboardSampler(scene.registry, scene.metrics, memory=lambda: memory).sample()
    assert present["on_demand"] == {**memory, "models": 2}


def test_the_use_of_processes() -> None:
    use = use_of(os.getpid())
    assert use is not None
    assert use.memory_bytes > 1 << 20
    assert use.cpu > 0
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
    assert changes["machine"]["workers_cpu"] is None
    assert present["machine"]["workers_memory_bytes"] is None
    assert present["machine"]["memory_bytes"] > 1 << 20


def test_fronts_are_shown_and_their_use_is_the_servers() -> None:
    scene = Scene("square")
    _, alone = scene.sampler.sample()
    assert "fronts" not in alone
    rows = [{"number": 0, "pid": os.getpid()}, {"number": 1, "pid": 1 << 30}]
    _, present = DashboardSampler(scene.registry, scene.metrics, fronts=lambda: rows).sample()
    first, ended = present["fronts"]
    assert (first["number"], ended) == (0, rows[1])
    assert first["memory_bytes"] > 1 << 20
    assert present["machine"]["memory_bytes"] > 1.5 * alone["machine"]["memory_bytes"]


def test_clients_are_those_that_products_tell_of_and_bounded() -> None:
    scene = Scene("square")
    clients = [{"client": f"client {number}", "requests": number} for number in range(150)]
    _, present = DashboardSampler(scene.registry, scene.metrics, clients=lambda: clients).sample()
    assert present["clients"] == clients[:20]
    assert scene.sampler.sample()[1]["clients"] == []


def test_the_counts_are_those_of_the_metrics_page() -> None:
    scene = Scene("square", "other", max_batch_size=4)

    async def script() -> None:
        await scene.infer("square", *range(11))
        await scene.infer("other", 1)

    scene.play(script)
    registry = make_exposition(scene.metrics, scene.registry).registry
    counts = count(scene.metrics, code_of)
    labels = {"model": "square"}
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
    metrics.refused("square", "http", Overloaded("full"))
    metrics.refused("square", "python", Overloaded("full"))
    metrics.refused("square", "http", Cancelled("left"))
    metrics.refused("whatever", "http", ModelNotFound("none"))
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
    counts = count(Metrics(), code_of, [tokens, padding])
    assert counts == {"text/2": {"tokens": 100}, "text": {"padding": 7}}


@pytest.mark.parametrize(
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
