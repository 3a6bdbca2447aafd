from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.served import MODELS
from tests.telemetry.test_recorder import ask, code_of, dispatch

import weir
from weir.bench import InProcessTarget, LoadSettings, Report, bench, run_bench
from weir.bench.target import batches_of, decode_items, read_counts, read_payloads
from weir.errors import SettingsError
from weir.messages import Reason, Timing
from weir.telemetry.exposition import Exposition
from weir.telemetry.recorder import Metrics

pytestmark = pytest.mark.usefixtures("nothing_is_left_by_module")


def shown(metrics: Metrics, namespace: str = "weir") -> str:
    return Exposition(metrics, code_of, namespace=namespace).render()[0].decode()


def run_batch(metrics: Metrics, size: int, reason: Reason) -> None:
    requests = [ask(1.0)] * size
    batch = dispatch(requests, at=1.25, reason=reason)
    metrics.own("square").dispatched("square", batch)
    metrics.own("square").computed("square", batch, Timing(0.0, 0.5, 0.0), 2.0)
    metrics.own("square").answered("square", requests, None, 2.0)


def test_batches_are_what_was_counted_in_between() -> None:
    metrics = Metrics()
    run_batch(metrics, 7, Reason.DELAY)
    before = read_counts(shown(metrics), "square")
    for size, reason in ((1, Reason.IDLE), (3, Reason.SIZE), (4, Reason.SIZE)):
        run_batch(metrics, size, reason)
    found = batches_of(read_counts(shown(metrics), "square") - before)
    assert found.count == 3 and found.reasons == {"size": 2, "idle": 1} and found.sizes == {"1": 1, "4": 2}
    assert batches_of(read_counts(shown(metrics, "own_name"), "square")) == batches_of(
        read_counts(shown(metrics), "square")
    )
    assert found.mean_rows == pytest.approx(8 / 3)
    assert [found.queue_time_ms, found.predict_time_ms, found.total_time_ms] == pytest.approx([250.0, 500.0, 1000.0])


def test_what_is_no_metrics_page_is_reported() -> None:
    with pytest.raises(SettingsError, match="/metrics cannot be read"):
        read_counts('weir_batches_total{model="square" 5', "square")


def test_data_is_the_body_itself_or_a_file_or_the_lines_of_one(tmp_path: Path) -> None:
    whole, lines = tmp_path / "a.json", tmp_path / "a.jsonl"
    whole.write_text("[1,\n2]\n")
    lines.write_text('1\n\n"two"\n{"three": 3}\n')
    assert read_payloads("3") == [b"3"]
    assert read_payloads(f"@{whole}") == [b"[1,\n2]\n"]
    assert read_payloads(f"@{lines}") == [b"1", b'"two"', b'{"three": 3}']
    assert read_payloads([1, "two"]) == [b"1", b'"two"']
    assert decode_items([b"1", b'"two"']) == [1, "two"]


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.ndjson"
    empty.write_text("\n")
    for data, wrong in (
        (f"@{empty}", "must have at least one value"), ("@nowhere.json", "cannot be read: No such file"),
        ([], "must have at least one value"), ([object()], "data: .*object"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=wrong):
            read_payloads(data)
    with pytest.raises(SettingsError, match="must be JSON for a model in this process"):
        decode_items([b"three"])


# Models in this process as targets.

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
