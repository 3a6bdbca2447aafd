import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import structlog

from weir.errors import SettingsError
from weir.telemetry.logs import LogObserver, get_logger, logging_to
from weir.telemetry.settings import TelemetrySettings
from weir.telemetry.tracecontext import CURRENT, Trace


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(settings: TelemetrySettings, stream: io.StringIO, *events: tuple[str, dict[str, Any]]) -> list[str]:
    with logging_to(settings, stream):
        for event, values in events:
            get_logger("weir.test").info(event, **values)
    return stream.getvalue().splitlines()


def test_text_is_for_people() -> None:
    (line,) = lines_of(TelemetrySettings(), io.StringIO(), ("worker ready", {"model": "square", "worker": 0}))
    assert "worker ready" in line and "model=square" in line and "\x1b" not in line


def test_text_is_coloured_only_on_a_terminal() -> None:
    (line,) = lines_of(TelemetrySettings(), Terminal(), ("worker ready", {}))
    assert "\x1b" in line


def test_json_is_one_document_a_line() -> None:
    lines = lines_of(TelemetrySettings(log_format="json"), io.StringIO(), ("a\nb", {"n": 1}), ("c", {"o": object}))
    first, second = map(json.loads, lines)
    assert (first["event"], first["n"], first["level"], first["logger"]) == ("a\nb", 1, "info", "weir.test")
    assert first["timestamp"].endswith("Z") and second["o"] == repr(object)


def test_lines_of_other_libraries_look_the_same() -> None:
    stream = io.StringIO()
    with logging_to(TelemetrySettings(log_format="json"), stream):
        logging.getLogger("uvicorn.error").warning("half a request from %s", "::1", extra={"port": 3})
    line = json.loads(stream.getvalue())
    assert (line["event"], line["logger"], line["level"], line["port"]) == (
        "half a request from ::1", "uvicorn.error", "warning", 3,
    )  # fmt: skip


def test_a_traceback_is_part_of_its_json_line() -> None:
    stream = io.StringIO()
    with logging_to(TelemetrySettings(log_format="json"), stream):
        try:
            raise ValueError("odd")
        except ValueError:
            logging.getLogger("library").exception("failed")
            get_logger("weir").exception("failed too")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert "ValueError: odd" in first["exception"] and "ValueError: odd" in second["exception"]


def test_the_level_drops_what_is_less_severe() -> None:
    assert lines_of(TelemetrySettings(log_level="warning"), io.StringIO(), ("quiet", {})) == []


def test_a_file_gets_every_line_as_json_beside_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "weir.log"
    shown = lines_of(TelemetrySettings(log_file=str(file)), io.StringIO(), ("start", {"models": ["square"]}))
    assert "start" in shown[0]
    assert json.loads(file.read_text())["models"] == ["square"]


@pytest.mark.parametrize("key", ["password", "API_TOKEN", "Authorization", "api-key", "client_secret"])
def test_secrets_never_reach_a_line(key: str) -> None:
    event = ("start", {key: "hunter2", "env": {key: "hunter2", "plain": "shown"}})
    for settings in (TelemetrySettings(), TelemetrySettings(log_format="json")):
        (line,) = lines_of(settings, io.StringIO(), event)
        assert "hunter2" not in line and "shown" in line


def test_the_root_logger_is_as_before_afterwards() -> None:
    root = logging.getLogger()
    before = (root.handlers, root.level)
    lines_of(TelemetrySettings(log_level="debug"), io.StringIO(), ("x", {}))
    assert (root.handlers, root.level) == before


def test_the_observer_writes_of_workers_by_severity() -> None:
    stream = io.StringIO()
    with logging_to(TelemetrySettings(log_format="json"), stream):
        observer = LogObserver(get_logger("weir.workers"))
        observer.worker_changed("square", 0, "starting", "")
        observer.worker_changed("square", 0, "ready", "")
        observer.worker_changed("square", 0, "lost", "killed by signal 9")
        observer.worker_changed("square", 0, "failed", "load raised")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("worker ready", "info"), ("worker lost", "warning"), ("worker failed", "error"),
    ]  # fmt: skip
    assert lines[1]["reason"] == "killed by signal 9" and "reason" not in lines[0]


def test_a_wrong_setting_names_key_value_and_rule() -> None:
    with pytest.raises(SettingsError, match=r"log_format='xml': must be one of text, json"):
        TelemetrySettings(log_format="xml")


def test_a_file_that_cannot_be_written_is_a_wrong_setting(tmp_path: Path) -> None:
    settings = TelemetrySettings(log_file=str(tmp_path / "missing" / "weir.log"))
    with pytest.raises(SettingsError, match="cannot be written: No such file or directory"), logging_to(settings):
        raise AssertionError("unreachable")


def test_structlog_is_not_configured_for_the_whole_process() -> None:
    get_logger("weir.test")
    assert not structlog.is_configured()


def test_tracebacks_show_no_values_of_variables() -> None:
    stream = io.StringIO()
    with logging_to(TelemetrySettings(), stream):
        fails_with("hunter2")
    assert "ValueError: odd" in stream.getvalue() and "Traceback" in stream.getvalue()
    assert "hunter2" not in stream.getvalue()


def fails_with(password: str) -> None:
    try:
        raise ValueError("odd" if password else "even")
    except ValueError:
        get_logger("weir").exception("failed")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_line_within_a_traced_request_carries_its_trace(log_format: str) -> None:
    settings, stream = TelemetrySettings(log_format=log_format), io.StringIO()
    token = CURRENT.set(Trace(0xAB, 1))
    try:
        with logging_to(settings, stream):
            get_logger("weir.test").info("one")
            logging.getLogger("weir.grpc").error("two")
            get_logger("weir.test").info("three", trace_id="its own")
    finally:
        CURRENT.reset(token)
    one, two, three = stream.getvalue().splitlines()
    assert f"{0xAB:032x}" in one and f"{0xAB:032x}" in two and "its own" in three
    assert "trace_id" not in lines_of(settings, io.StringIO(), ("four", {}))[0]


def test_a_full_disk_is_said_once_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(TelemetrySettings(log_file="/dev/full"), io.StringIO()):
        for _ in range(3):
            get_logger("weir").info("a line")
    assert capsys.readouterr().err == "weir: log_file='/dev/full': cannot be written: No space left on device\n"
