from pathlib import Path

import pytest
from tests.telemetry.test_recorder import ask, code_of, dispatch

from weir.bench.target import batches_of, read_counts, read_payloads
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
    assert found.count == 3 and found.reasons == {"size": 2, "idle": 1}
    assert batches_of(read_counts(shown(metrics, "own_name"), "square")) == batches_of(
        read_counts(shown(metrics), "square")
    )
    assert found.mean_rows == pytest.approx(8 / 3)
    assert [found.queue_time_ms, found.predict_time_ms] == pytest.approx([250.0, 500.0])


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


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.ndjson"
    empty.write_text("\n")
    for data, wrong in (
        (f"@{empty}", "must have at least one value"), ("@nowhere.json", "cannot be read: No such file"),
        ([], "must have at least one value"), ([object()], "data: .*object"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=wrong):
            read_payloads(data)
