"""Metrics of a model's own, from `self.metrics` in a worker to the server's sums and /metrics."""

import asyncio
import os
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import weir
from weir.catalog.registry import Registry
from weir.frontends.http.application import make_exposition
from weir.metrics import MAX_METRICS, MAX_SERIES, ModelMetrics, ReportedMetrics
from weir.telemetry.recorder import Metrics

pytestmark = pytest.mark.usefixtures("nothing_is_left")


class Words(weir.Model):
    """Counts words; the text "die" ends its worker."""

    examples = ("a b",)

    def load(self) -> None:
        self.words = self.metrics.counter("words", "Words read.", labels=["kind"])
        self.length = self.metrics.histogram("text_length", "Characters.", buckets=[4, 8])
        self.metrics.gauge("vocabulary", "Words known.").set(1000 + self.worker_index)

    def predict(self, batch: list[str]) -> list[int]:
        for text in batch:
            if text == "die":
                os._exit(3)
            self.words.inc(len(text.split()), kind="plain")
            self.length.observe(len(text))
        return [len(text) for text in batch]


class Told(weir.Model):
    """Has metrics of the same names as Words, of which one is another kind, and one has the server's first word."""

    def __init__(self, name: str = "acme_words") -> None:
        self.metrics.gauge(name).set(1)
        self.metrics.counter("words", labels=["kind"]).inc(kind="told")
        self.metrics.gauge("text_length").set(5)

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Parts(weir.Model):
    """A streaming model; `metrics` of Alone is its own."""

    streaming = True

    def predict(self, batch: list[int]) -> Any:
        parts = self.metrics.counter("parts_given")
        for place in range(2):
            parts.inc()
            yield dict.fromkeys(range(len(batch)), place)


def shown(metrics: Metrics, *services: weir.Service, namespace: str = "weir") -> dict[tuple[str, ...], float]:
    """Return the samples of models' own metrics: name, and the values of the labels in the order of their names."""
    exposition = make_exposition(metrics, Registry(services), namespace=namespace)
    text, again = exposition.render()[0], exposition.render()[0]
    assert text.count(b"\n") == again.count(b"\n")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.startswith((namespace, "process_"))
    }


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
async def test_what_workers_count_is_added_up_and_outlives_them(executor: str) -> None:
    metrics = Metrics()
    workers = 1 if executor == "inline" else 2
    service = weir.Service(Words, version="3", executor=executor, workers=workers, observers=[metrics])
    async with service:
        gauges = {("vocabulary", "words", "3", str(place)): 1000.0 + place for place in range(workers)}
        assert shown(metrics, service) == gauges  # the warm-up does not count
        assert await asyncio.gather(*[service.infer("one two") for _ in range(5)]) == [7] * 5
        assert await service.infer("a") == 1
        if executor == "process":
            with pytest.raises(weir.ModelCrashed):
                await service.infer("die")
        await service.infer("three")
        found = shown(metrics, service)
        assert found["words_total", "plain", "words", "3"] == 12
        buckets = {name[1]: count for name, count in found.items() if name[0] == "text_length_bucket"}
        assert buckets == {"4.0": 1, "8.0": 7, "+Inf": 7}
        assert found["text_length_count", "words", "3"] == 7
        assert found["text_length_sum", "words", "3"] == 41
        if executor != "process":
            assert gauges.items() <= found.items()


async def test_a_name_of_another_kind_or_of_the_server_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:

    metrics = Metrics()
    first = weir.Service(Words, executor="inline", observers=[metrics])
    second = weir.Service(Told, executor="inline", observers=[metrics])
    async with first, second:
        await first.infer("a b")
        found = shown(metrics, first, second, namespace="acme")
    assert found["words_total", "plain", "words"] == 2 and found["words_total", "told", "told"] == 1
    assert ("text_length", "told", "0") not in found and found["text_length_count", "words"] == 1
    assert not [name for name in found if name[0] == "acme_words"]
    hidden = [record.getMessage() for record in caplog.records if "is not shown" in record.getMessage()]
    assert len(hidden) == 2 and "metric 'acme_words' of model 'told' is not shown" in hidden[0]


async def test_a_streaming_model_reports_with_its_parts() -> None:
    metrics = Metrics()
    async with weir.Service(Parts, executor="thread", observers=[metrics]) as service:
        stream = service.infer_stream(1)
        assert [part async for part in stream] == [0, 1]
        assert shown(metrics, service)["parts_given_total", "parts"] == 2


def test_names_labels_and_buckets_are_checked() -> None:
    metrics = ModelMetrics()
    for name in ("", "2nd", "a-b", "a" * 101, "weir_rows", "nv_x", "tokens_count", "x_bucket"):
        with pytest.raises(weir.SettingsError, match="metric"):
            metrics.gauge(name)
    for label in ("model", "worker", "le", "a b", ""):
        with pytest.raises(weir.SettingsError, match="label"):
            metrics.counter("tokens", labels=[label])
    with pytest.raises(weir.SettingsError, match="label 'a'"):
        metrics.counter("tokens", labels=["a", "a"])
    for buckets in ([], [2, 1], [1, 1], [1, float("inf")], list(range(101))):
        with pytest.raises(weir.SettingsError, match="ascending numbers"):
            metrics.histogram("length", buckets=buckets)
    tokens = metrics.counter("tokens_total", "Tokens.", labels=["kind"])
    assert metrics.counter("tokens", labels=["kind"]) is tokens
    with pytest.raises(weir.SettingsError, match="is declared as"):
        metrics.gauge("tokens", labels=["kind"])
    with pytest.raises(weir.SettingsError, match="is declared as"):
        metrics.counter("tokens")
    with pytest.raises(ValueError, match="labels none: must be kind"):
        tokens.inc()
    with pytest.raises(ValueError, match="labels sort: must be kind"):
        tokens.inc(sort="x")
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be a number"):
            tokens.inc(wrong, kind="x")
    with pytest.raises(ValueError, match="must be a number"):
        metrics.histogram("length").observe(float("nan"))
    assert metrics.take() is None
    for place in range(MAX_METRICS - 2):
        metrics.gauge(f"metric{place}")
    with pytest.raises(weir.SettingsError, match="already has 100 metrics"):
        metrics.gauge("one_more")


def test_the_number_of_series_is_bounded_in_the_worker_and_in_the_server(caplog: pytest.LogCaptureFixture) -> None:
    sums = ReportedMetrics()
    for worker in range(2):
        metrics = ModelMetrics()
        users = metrics.counter("users", labels=["name"])
        for place in range(MAX_SERIES + 5):
            users.inc(name=f"{worker} {place} {'x' * 200}")
        (report,) = metrics.take() or []
        assert len(report.changes) == MAX_SERIES and len(report.changes[0].values[0]) == 100
        sums.add(worker, [report])
    assert len(sums.by_name["users"].series) == MAX_SERIES
    assert [record.getMessage() for record in caplog.records] == [
        "a model has 1000 series of metrics; no more are begun"
    ] * 2


def test_a_label_that_is_no_text_in_utf_8_is_replaced() -> None:
    metrics = ModelMetrics()
    metrics.counter("words", "Words.", labels=["kind"]).inc(kind="a\ud800b")
    (report,) = metrics.take() or []
    assert report.changes[0].values == ("a?b",)
