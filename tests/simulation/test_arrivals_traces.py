from pathlib import Path

import numpy as np
import pytest

from weir.errors import SettingsError
from weir.simulation.arrivals import read_trace, write_trace
from weir.simulation.engine import SimulatedRequest
from weir.telemetry.logs import ArrivalLog


def test_what_is_written_is_read_to_the_bit(tmp_path: Path) -> None:
    times = np.cumsum(np.random.default_rng(1).exponential(0.001, 1000))
    times -= times[0]
    rows = np.random.default_rng(2).integers(1, 9, 1000)
    write_trace(tmp_path / "it.csv", times, rows)
    read = read_trace(tmp_path / "it.csv")
    assert np.array_equal(read[0], times)
    assert np.array_equal(read[1], rows)


def test_rows_are_one_if_nothing_is_said(tmp_path: Path) -> None:
    write_trace(tmp_path / "it.csv", [0.0, 0.5])
    assert (tmp_path / "it.csv").read_text() == "arrival_s,rows\n0.0,1\n0.5,1\n"
    (tmp_path / "bare.csv").write_text("arrival_s\n3\n3.5\n\n")
    times, rows = read_trace(tmp_path / "bare.csv")
    assert times.tolist() == [0.0, 0.5]  # from the first on
    assert rows.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: must be the header arrival_s,rows; is ''"),
        ("time,rows\n0,1\n", "line 1: must be the header"),
        ("arrival_s,rows\n0,1\n1\n", "line 3: '1': must have 2 value(s)"),
        ("arrival_s,rows\n0,1\n1,1,1\n", "line 3: '1,1,1': must have 2 value(s)"),
        ("arrival_s,rows\n0,1\nsoon,1\n", "line 3: 'soon,1': must be a number of seconds and a whole number of rows"),
        ("arrival_s,rows\n0,1\n1,1.5\n", "line 3: '1,1.5': must be a number of seconds and a whole number of rows"),
        ("arrival_s,rows\n0,1\nnan,1\n", "line 3: 'nan,1': the arrival must be finite"),
        ("arrival_s,rows\n0,1\n2,1\n\n1,1\n", "line 5: '1,1': arrives before the line above, at 2"),
        ("arrival_s,rows\n0,0\n", "line 2: '0,0': rows must be 1 or more"),
        ("arrival_s,rows\n1,1\n", "at least two requests, at different times; this one has 1"),
        ("arrival_s,rows\n1,1\n1,1\n", "at least two requests, at different times"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "it.csv"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_trace(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="cannot be read"):
        read_trace(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_trace(tmp_path / "nowhere.csv")


def test_what_a_server_records_is_read(tmp_path: Path) -> None:
    path = tmp_path / "it.csv"
    with ArrivalLog(path) as recorder:
        recorder.answered("square", [SimulatedRequest(0, 7.5), SimulatedRequest(1, 7.75, rows=3)], None, 8.0)
    times, rows = read_trace(path)
    assert times.tolist() == [0.0, 0.25]
    assert rows.tolist() == [1, 3]
