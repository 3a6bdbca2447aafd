import io
import json
import logging
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import FakeRequest
from tests.rings import subcases
from tests.served import MODELS, serving, until

from weir import errors
from weir.frontends.http.application import code_of
from weir.messages import CURRENT_TRACE, Request, Trace
from weir.simulation.arrivals import read_trace
from weir.telemetry import TelemetrySettings, logs
from weir.telemetry.output import LOST
from weir.testing import FakeClock


def lines_of(settings: TelemetrySettings, stream: io.StringIO, *events: tuple[str, dict[str, Any]]) -> list[str]:
    with logs.logging_to(settings, stream):
        for event, values in events:
            logs.get_logger("weir.test").info(event, **values)
    return stream.getvalue().splitlines()


def test_text_is_for_people() -> None:
    (line,) = lines_of(TelemetrySettings(), io.StringIO(), ("ready", {"models": ["square", "cube"], "workers": 2}))
    assert "ready" in line and "models='square, cube'" in line and "workers=2" in line and "\x1b" not in line


def test_json_is_one_document_a_line() -> None:
    lines = lines_of(TelemetrySettings(log_format="json"), io.StringIO(), ("a\nb", {"n": 1}), ("c", {"o": object}))
    first, second = map(json.loads, lines)
    assert (first["event"], first["n"], first["level"], first["logger"]) == ("a\nb", 1, "info", "weir.test")
    assert first["timestamp"].endswith("Z") and second["o"] == repr(object)


@subcases(("level", "written"), [("info", ["worse"]), ("debug", ["GET", "worse"]), ("error", [])])
def test_the_level_drops_what_is_less_severe(level: str, written: list[str]) -> None:
    """And requests that libraries send are written only for debugging."""
    root, stream = logging.getLogger(), io.StringIO()
    before = (root.handlers, root.level)
    with logs.logging_to(TelemetrySettings(log_format="json", log_level=level), stream=stream):
        for name in ("httpx", "httpx2"):
            logging.getLogger(name).info("GET")
            logging.getLogger(name).warning("worse")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line["logger"]) for line in lines] == [
        (event, name) for name in ("httpx", "httpx2") for event in written
    ]
    assert (root.handlers, root.level, logging.getLogger("httpx").level) == (*before, logging.NOTSET)


@subcases("key", ["password", "API_TOKEN", "Authorization", "api-key", "client_secret"])
def test_secrets_never_reach_a_line(key: str) -> None:
    event = ("start", {key: "hunter2", "env": {key: "hunter2", "plain": "shown"}})
    for settings in (TelemetrySettings(), TelemetrySettings(log_format="json")):
        (line,) = lines_of(settings, io.StringIO(), event)
        assert "hunter2" not in line and "shown" in line


def test_the_observer_writes_of_workers_by_severity() -> None:
    stream = io.StringIO()
    with logs.logging_to(TelemetrySettings(log_format="json"), stream):
        observer = logs.LogObserver(logs.get_logger("weir.workers"))
        observer.worker_changed("square", 0, "starting", "")
        observer.worker_changed("square", 0, "ready", "")
        observer.worker_changed("square", 0, "lost", "killed by signal 9")
        observer.worker_changed("square", 0, "failed", "load raised")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("worker ready", "info"), ("worker lost", "warning"), ("worker failed", "error"),
    ]  # fmt: skip
    assert lines[1]["reason"] == "killed by signal 9" and "reason" not in lines[0]


def test_a_file_that_cannot_be_written_is_a_wrong_setting(tmp_path: Path) -> None:
    settings = TelemetrySettings(log_file=str(tmp_path / "missing" / "weir.log"))
    with (
        pytest.raises(errors.SettingsError, match="cannot be written: No such file or directory"),
        logs.logging_to(settings),
    ):
        raise AssertionError("unreachable")


def test_tracebacks_show_no_values_of_variables() -> None:
    stream = io.StringIO()
    with logs.logging_to(TelemetrySettings(), stream):
        fails_with("hunter2")
    assert "ValueError: odd" in stream.getvalue() and "Traceback" in stream.getvalue()
    assert "hunter2" not in stream.getvalue()


def fails_with(password: str) -> None:
    try:
        raise ValueError("odd" if password else "even")
    except ValueError:
        logs.get_logger("weir").exception("failed")


@subcases("log_format", ["json", "text"])
def test_a_line_within_a_traced_request_carries_its_trace(log_format: str) -> None:
    settings, stream = TelemetrySettings(log_format=log_format), io.StringIO()
    token = CURRENT_TRACE.set(Trace(0xAB, 1))
    try:
        with logs.logging_to(settings, stream):
            logs.get_logger("weir.test").info("one")
            logging.getLogger("weir.grpc").error("two")
            logs.get_logger("weir.test").info("three", trace_id="its own")
    finally:
        CURRENT_TRACE.reset(token)
    one, two, three = stream.getvalue().splitlines()
    assert f"{0xAB:032x}" in one and f"{0xAB:032x}" in two and "its own" in three
    assert "trace_id" not in lines_of(settings, io.StringIO(), ("four", {}))[0]


def test_a_full_disk_is_logged_once_and_ends_nothing() -> None:
    stream = io.StringIO()
    with logs.logging_to(TelemetrySettings(log_file="/dev/full", log_format="json"), stream):
        for _ in range(3):
            logs.get_logger("weir").info("a line")
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert sorted(events) == ["a line"] * 3 + ["log_file='/dev/full': cannot be written: No space left on device"]


def logged(
    *acts: Callable[[logs.LogObserver], None], limit: logs.RateLimit | None = None, log_format: str = "json"
) -> str:
    """Return what the observer writes when these are told."""
    stream = io.StringIO()
    with logs.logging_to(TelemetrySettings(log_format=log_format), stream):
        observer = logs.LogObserver(logs.get_logger("weir"), limit)
        for act in acts:
            act(observer)
    return stream.getvalue()


def bad(kind: str = "ValueError") -> errors.ModelError:
    trace = f'Traceback (most recent call last):\n  File "model.py", line 3, in predict\n{kind}: no\n'
    return errors.ModelError(f"predict raised {kind}: no", original_type=kind, remote_traceback=trace)


def test_an_error_of_a_model_is_logged_with_its_traceback() -> None:
    (line,) = map(json.loads, logged(lambda observer: observer.failed("square", [bad()], 0.0)).splitlines())
    about = {"event": "model error", "level": "error", "model": "square", "type": "ValueError"}
    assert {**line, **about, "error": "predict raised ValueError: no"} == line
    assert 'File "model.py", line 3, in predict' in line["exception"]
    text = logged(lambda observer: observer.failed("square", [bad()], 0.0), log_format="text")
    assert '\n    File "model.py", line 3, in predict\n' in text
    refused = logged(
        lambda observer: observer.refused("square", "http", errors.ModelError("measure raised")),
        lambda observer: observer.refused("square", "http", errors.Overloaded("full")),
    )
    assert [json.loads(line)["type"] for line in refused.splitlines()] == ["ModelError"]


def test_errors_are_limited_by_model_and_type() -> None:
    clock = FakeClock()
    observe: list[Callable[[logs.LogObserver], None]] = [
        lambda observer: observer.failed("square", [bad()] * 100, 0.0),
        lambda observer: observer.failed("square", [bad("KeyError")], 0.0),
        lambda observer: observer.failed("cube", [bad()], 0.0),
        lambda observer: clock.advance(59.0),
        lambda observer: observer.failed("square", [bad()], 0.0),
        lambda observer: clock.advance(1.0),
        lambda observer: observer.failed("square", [bad()] * 2, 0.0),
    ]
    lines = list(map(json.loads, logged(*observe, limit=logs.RateLimit(clock=clock)).splitlines()))
    assert [(line["model"], line["type"]) for line in lines] == [
        *[("square", "ValueError")] * 5, ("square", "KeyError"), ("cube", "ValueError"), *[("square", "ValueError")] * 2,
    ]  # fmt: skip
    assert [line.get("held_back") for line in lines] == [None] * 7 + [96, None]


def test_types_of_errors_that_a_model_makes_up_are_not_kept_for_ever() -> None:
    limit = logs.RateLimit(clock=FakeClock())
    for number in range(10 * logs.MOST_KINDS):
        limit.pass_on(number)
    assert len(limit._begun) <= logs.MOST_KINDS


@subcases("log_format", ["json", "text"])
def test_the_access_log_has_a_line_for_each_request(log_format: str) -> None:
    stream = io.StringIO()
    with logs.logging_to(TelemetrySettings(log_format=log_format), stream):
        access = logs.AccessLog(logs.get_logger("weir.access"), code_of)
        answered, failed = (FakeRequest(1, arrival=10.0, frontend=frontend) for frontend in ("http", "grpc"))
        access.answered("square", [answered, answered], None, 10.25)
        access.answered("square", [failed], errors.DeadlineExceeded("late"), 11.0)
        access.refused("", "http", errors.Overloaded("full"))
    first, *_ = lines = stream.getvalue().splitlines()
    if log_format == "text":
        assert first.endswith("request [weir.access] code=200 milliseconds=250.0 model=square protocol=http rows=1")
        return
    names = ("event", "model", "protocol", "code", "rows", "milliseconds", "error")
    assert [[json.loads(line).get(name) for name in names] for line in lines] == [
        *[["request", "square", "http", "200", 1, 250.0, None]] * 2,
        ["request", "square", "grpc", "DEADLINE_EXCEEDED", 1, 1000.0, "DeadlineExceeded"],
        ["request", "", "http", "429", None, None, "Overloaded"],
    ]


def ask(arrival: float, rows: int = 1) -> Request:
    return FakeRequest(3, arrival=arrival, rows=rows)


def recorded(path: Path) -> list[tuple[float, int]]:
    header, *lines = path.read_text().splitlines()
    assert header == "arrival_s,rows"
    return [(float(at), int(rows)) for at, rows in (line.split(",") for line in lines)]


def test_arrivals_are_written_in_order_from_the_first(tmp_path: Path) -> None:
    with logs.ArrivalLog(tmp_path / "a.csv") as recorder:
        recorder.answered("square", [ask(1000.5), ask(1000.25, rows=3)], None, 1001.0)
        recorder.answered("square", [ask(1000.0)], errors.Cancelled("left"), 1001.5)
    assert recorded(tmp_path / "a.csv") == [(0.0, 1), (0.25, 3), (0.5, 1)]


def test_requests_without_room_or_time_are_arrivals_and_wrong_ones_are_not(tmp_path: Path) -> None:
    clock = FakeClock(1000.0)
    with logs.ArrivalLog(tmp_path / "a.csv", "square", clock=clock) as recorder:
        recorder.refused("square", "http", errors.Overloaded("full"))
        clock.advance(0.5)
        recorder.refused("square", "http", errors.DeadlineExceeded("too late"))
        recorder.refused("square", "http", errors.InvalidRequest("not JSON"))
        recorder.refused("circle", "http", errors.Overloaded("full"))
        recorder.refused("circle", "http", errors.ModelNotFound("none"))
        recorder.answered("circle", [ask(1000.0)], None, 1001.0)
    assert recorded(tmp_path / "a.csv") == [(0.0, 1), (0.5, 1)]


def test_what_is_kept_is_bounded_and_sorts_what_ends_out_of_order(tmp_path: Path) -> None:
    count = 5 * logs.WRITTEN_AT_ONCE
    arrivals = [1000.0 + index / 1000 for index in range(count)]
    rng = random.Random(1)
    ends = sorted(range(count), key=lambda index: index + rng.uniform(0, 90))
    with logs.ArrivalLog(tmp_path / "a.csv", kept=100) as recorder:
        for index in ends:
            recorder.answered("square", [ask(arrivals[index])], None, 2000.0)
        until(lambda: count - 100 - logs.WRITTEN_AT_ONCE <= written(recorder))
    assert [round(at * 1000) for at, _ in recorded(tmp_path / "a.csv")] == list(range(count))


def written(recorder: logs.ArrivalLog) -> int:
    """How many whole lines the outlet's thread, which may be within one, has written below the header."""
    return recorder.path.read_bytes().count(b"\n") - 1


def test_a_file_that_cannot_be_written_is_a_wrong_setting_recording(tmp_path: Path) -> None:
    with pytest.raises(errors.SettingsError, match=r"record=.*nowhere.*cannot be written: No such file"):
        logs.ArrivalLog(tmp_path / "nowhere" / "a.csv").open()


def test_a_server_records_until_its_end(tmp_path: Path) -> None:
    with serving(f"{MODELS}:Square", f"{MODELS}:Power", "--record", tmp_path / "a.csv") as (served, client):
        for _ in range(3):
            assert client.post("/infer/square", content=b"3").json() == 9
        assert client.post("/infer/square/batch", content=b"[1, 2, 3, 4]").status_code == 200
        assert client.post("/infer/square", content=b"three").status_code == 400
        assert client.post("/infer/circle", content=b"3").status_code == 404
        assert client.post("/infer/power", content=b"3").json() == 9
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
    times, rows = (values.tolist() for values in read_trace(tmp_path / "a.square.csv"))
    assert rows == [1, 1, 1, 4, 1]  # what is not JSON is found out by the worker, so it was in the line too
    assert times[0] == 0.0 and times == sorted(times)
    assert recorded(tmp_path / "a.power.csv") == [(0.0, 1)]
    assert [recorder.path for recorder in logs.recorders("x/a.csv", ["square"])] == [Path("x/a.csv")]


def test_a_full_disk_costs_lines_of_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    lost = LOST["record"]
    for count in (1, 10_000):
        recorder = logs.ArrivalLog("/dev/full", kept=100)
        with recorder:
            for _ in range(count):
                recorder.refused("m", "http", errors.Overloaded("full"))
        recorder.close()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["record='/dev/full': cannot be written: No space left on device"] * 2
    assert LOST["record"] == lost + 10_003
