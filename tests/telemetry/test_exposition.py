"""Triton's names for what a model has done, read by Prometheus' own parser."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.rings import subcases
from tests.streaming_models import Count
from tests.workers.models import Square

import weir
from weir.catalog.registry import Registry
from weir.errors import Cancelled, DeadlineExceeded, InvalidRequest, ModelCrashed, ModelError, Overloaded, WeirError
from weir.frontends.http.application import make_exposition
from weir.serving.service import Service
from weir.telemetry.exposition import reason_of
from weir.telemetry.recorder import Metrics


def shown(metrics: Metrics, registry: Registry, accept: str = "") -> dict[tuple[str, str, str], float]:
    """Return the samples of Triton's names, by name, label of the model and reason."""
    text, _ = make_exposition(metrics, registry, triton_names=True).render(accept)
    return {
        (
            sample.name,
            f"{sample.labels['model']}/{sample.labels['version']}",
            sample.labels.get("reason", ""),
        ): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name.startswith("nv_")
    }


async def test_what_models_have_done() -> None:
    metrics = Metrics()
    services = [
        Service(Square, version="2", observers=[metrics], executor="inline"),
        Service(Count, observers=[metrics], executor="inline"),
    ]
    async with services[0] as square, services[1]:
        await asyncio.gather(*[square.infer(x) for x in range(5)])
        await square.infer_many(range(3))
        with pytest.raises(weir.ModelError):
            await square.infer("x")
    found = shown(metrics, Registry(services))
    statistics = square.statistics
    assert found["nv_inference_request_success", "square/2", ""] == statistics.success.count == 6
    assert found["nv_inference_count", "square/2", ""] == statistics.inference_count >= 8
    assert found["nv_inference_exec_count", "square/2", ""] == statistics.execution_count
    assert found["nv_inference_pending_request_count", "square/2", ""] == 0
    assert found["nv_inference_request_failure", "square/2", "BACKEND"] == 1
    assert found["nv_inference_request_failure", "square/2", "REJECTED"] == 0
    total = found["nv_inference_request_duration_us", "square/2", ""]
    assert total == pytest.approx(1e6 * statistics.success.seconds)
    for step in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert found[f"nv_inference_{step}_duration_us", "square/2", ""] > 0
    assert found["nv_inference_count", "count/", ""] == 0


@subcases(
    ("kind", "reason"),
    [
        (Overloaded, "REJECTED"),
        (DeadlineExceeded, "REJECTED"),
        (Cancelled, "CANCELED"),
        (ModelError, "BACKEND"),
        (ModelCrashed, "BACKEND"),
        (InvalidRequest, "OTHER"),
    ],
)
def test_why_a_request_failed(kind: type[WeirError], reason: str) -> None:
    assert reason_of(kind) == reason


def test_by_default_there_are_none() -> None:
    text, _ = make_exposition(Metrics(), Registry([])).render()
    assert b"nv_" not in text
