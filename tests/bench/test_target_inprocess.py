from typing import Any

import pytest
import uvloop
from tests.served import MODELS

import weir
from weir.bench import InProcessTarget, LoadSettings, Report, bench, run_bench
from weir.errors import SettingsError

pytestmark = pytest.mark.usefixtures("nothing_is_left_by_module")

SETTINGS: dict[str, Any] = {"rate": 400.0, "duration": 0.25, "warm_up": 0.0, "max_lag_ms": 1e9, "arrivals": "constant"}


class Double(weir.Model):
    examples = (weir.Example(3, 6), 4)
    executor = "inline"

    def predict(self, batch: list[int]) -> list[int]:
        return [2 * x for x in batch]


class Picky(Double):
    def predict(self, batch: list[int]) -> list[int]:
        if any(x < 0 for x in batch):
            raise ValueError("negative")
        return batch


class Sums(weir.Model):
    inputs = (weir.Tensor("x", "FP32", [-1, 2]),)
    outputs = (weir.Tensor("y", "FP32", [-1]),)
    examples = ({"x": [[1.0, 2.0]]},)
    executor = "inline"

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"y": batch["x"].sum(axis=1)}


class DoubleService(weir.Service):
    model = Double
    seen = 0

    async def before_batch(self, batch: list[Any]) -> list[Any]:
        DoubleService.seen += len(batch)
        return batch


def run(*targets: InProcessTarget) -> Report:
    return uvloop.run(run_bench(targets, LoadSettings(**{**SETTINGS, "rounds": 1})))


def test_a_model_in_this_process_is_a_target_like_any_other() -> None:
    report = bench(Double, **SETTINGS)
    outcome = report.outcomes["double"]
    assert outcome.requests == outcome.answered == 99 and report.failures == []
    assert outcome.connections is None and outcome.batches is not None
    assert outcome.batches.count * outcome.batches.mean_rows == pytest.approx(99)
    assert sum(outcome.batches.reasons.values()) == outcome.batches.count == sum(outcome.batches.sizes.values())


def test_settings_and_params_reach_the_service_of_each_target() -> None:
    greedy = InProcessTarget(Double, name="greedy", settings={"max_batch_size": 1})
    full = InProcessTarget(
        Double, name="full", settings={"policy": "full", "max_batch_size": 10, "max_queue_delay": 0.2}
    )
    outcomes = run(greedy, full).outcomes
    assert outcomes["greedy"].batches is not None and outcomes["full"].batches is not None
    assert outcomes["greedy"].batches.reasons == {"idle": 99} or outcomes["greedy"].batches.mean_rows == 1.0
    assert outcomes["full"].batches.reasons.get("size", 0) >= 9


def test_models_named_by_text_and_services() -> None:
    power = InProcessTarget(f"{MODELS}:Power", "2", params={"exponent": 3}, settings={"executor": "thread"})
    assert power.name == "power"
    service = InProcessTarget(DoubleService)
    outcomes = run(power, service).outcomes
    assert outcomes["power"].answered == outcomes["double"].answered == 99
    assert DoubleService.seen == 100


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(SettingsError, match="slowtoload: has no examples to send"):
        InProcessTarget(f"{MODELS}:SlowToLoad", params={"begun": "", "gate": ""})
    with pytest.raises(SettingsError, match=r"picky: ModelError: .*negative"):
        run(InProcessTarget(Picky, [-1]))
    with pytest.raises(SettingsError, match="unknown setting"):
        InProcessTarget(Double, settings={"wrkers": 1})


def test_a_tensor_model_is_sent_arrays() -> None:
    report = bench(InProcessTarget(Sums, name="sums"), rate=200, duration=0.2, max_lag_ms=1e9)
    assert report.outcome.answered == report.outcome.requests > 10
