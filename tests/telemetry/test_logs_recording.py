import random
import signal
from pathlib import Path

import httpx
import pytest
from tests.served import MODELS, Served, serving

from weir.errors import Cancelled, DeadlineExceeded, InvalidRequest, ModelNotFound, Overloaded, SettingsError
from weir.messages import Request
from weir.simulation.arrivals import read_trace
from weir.telemetry.logs import WRITTEN_AT_ONCE, ArrivalLog, recorders
from weir.testing import FakeClock, FakeRequest


def ask(arrival: float, rows: int = 1) -> Request:
    return FakeRequest(3, arrival=arrival, rows=rows)


def recorded(path: Path) -> list[tuple[float, int]]:
    header, *lines = path.read_text().splitlines()
    assert header == "arrival_s,rows"
    return [(float(at), int(rows)) for at, rows in (line.split(",") for line in lines)]


def test_arrivals_are_written_in_order_from_the_first(tmp_path: Path) -> None:
    with ArrivalLog(tmp_path / "a.csv") as recorder:
        recorder.answered("square", [ask(1000.5), ask(1000.25, rows=3)], None, 1001.0)
        recorder.answered("square", [ask(1000.0)], Cancelled("left"), 1001.5)
    assert recorded(tmp_path / "a.csv") == [(0.0, 1), (0.25, 3), (0.5, 1)]


def test_requests_that_found_no_room_or_time_are_arrivals_and_wrong_ones_are_not(tmp_path: Path) -> None:
    clock = FakeClock(1000.0)
    with ArrivalLog(tmp_path / "a.csv", "square", clock=clock) as recorder:
        recorder.refused("square", "http", Overloaded("full"))
        clock.advance(0.5)
        recorder.refused("square", "http", DeadlineExceeded("too late"))
        recorder.refused("square", "http", InvalidRequest("not JSON"))
        recorder.refused("circle", "http", Overloaded("full"))
        recorder.refused("circle", "http", ModelNotFound("none"))
        recorder.answered("circle", [ask(1000.0)], None, 1001.0)
    assert recorded(tmp_path / "a.csv") == [(0.0, 1), (0.5, 1)]


def test_what_is_kept_is_bounded_and_sorts_what_ends_out_of_order(tmp_path: Path) -> None:
    count = 5 * WRITTEN_AT_ONCE
    arrivals = [1000.0 + index / 1000 for index in range(count)]
    rng = random.Random(1)
    ends = sorted(range(count), key=lambda index: index + rng.uniform(0, 90))
    with ArrivalLog(tmp_path / "a.csv", kept=100) as recorder:
        for index in ends:
            recorder.answered("square", [ask(arrivals[index])], None, 2000.0)
        assert count - 100 - WRITTEN_AT_ONCE <= written(recorder)
    assert [round(at * 1000) for at, _ in recorded(tmp_path / "a.csv")] == list(range(count))


def test_lines_ascend_even_where_one_request_had_its_end_much_too_late(tmp_path: Path) -> None:
    count = 2 * WRITTEN_AT_ONCE
    with ArrivalLog(tmp_path / "a.csv", kept=1) as recorder:
        recorder.answered("square", [ask(1000.0 + index) for index in range(count)], None, 2000.0)
        recorder.answered("square", [ask(999.0)], None, 2000.0)
    times = [at for at, _ in recorded(tmp_path / "a.csv")]
    assert len(times) == count + 1 and times == sorted(times) and times[0] == 0.0


def written(recorder: ArrivalLog) -> int:
    assert recorder._file is not None
    recorder._file.flush()
    return len(recorded(recorder.path))


def test_nothing_is_noted_before_it_is_open_or_after_it_is_closed(tmp_path: Path) -> None:
    recorder = ArrivalLog(tmp_path / "a.csv")
    recorder.answered("square", [ask(1.0)], None, 2.0)
    recorder.open()
    recorder.close()
    recorder.close()
    recorder.answered("square", [ask(1.0)], None, 2.0)
    assert recorded(tmp_path / "a.csv") == []


def test_a_file_that_cannot_be_written_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"record=.*nowhere.*cannot be written: No such file"):
        ArrivalLog(tmp_path / "nowhere" / "a.csv").open()


def test_each_of_several_models_has_a_file() -> None:
    assert [recorder.path for recorder in recorders("x/a.csv", ["square"])] == [Path("x/a.csv")]
    several = recorders("x/a.csv", ["square", "circle"])
    assert [recorder.path for recorder in several] == [Path("x/a.square.csv"), Path("x/a.circle.csv")]


def test_a_server_records_until_its_end(tmp_path: Path) -> None:
    with serving(f"{MODELS}:Square", "--record", tmp_path / "a.csv") as (served, client):
        for _ in range(3):
            assert client.post("/infer/square", content=b"3").json() == 9
        assert client.post("/infer/square/batch", content=b"[1, 2, 3, 4]").status_code == 200
        assert client.post("/infer/square", content=b"three").status_code == 400
        assert client.post("/infer/circle", content=b"3").status_code == 404
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
    times, rows = (values.tolist() for values in read_trace(tmp_path / "a.csv"))
    assert rows == [1, 1, 1, 4, 1]  # what is not JSON is found out by the worker, so it was in the line too
    assert times[0] == 0.0 and times == sorted(times)


def test_a_server_of_two_models_records_each(tmp_path: Path) -> None:
    with Served(f"{MODELS}:Square", f"{MODELS}:Power", "--record", tmp_path / "a.csv") as served:
        served.until_ready()
        for name in ("square", "square", "power"):
            assert httpx.post(f"{served.url}/infer/{name}", content=b"3").status_code == 200
        served.signal(signal.SIGINT)
        assert served.wait() == 0
    assert len(recorded(tmp_path / "a.square.csv")) == 2
    assert len(recorded(tmp_path / "a.power.csv")) == 1


def test_a_full_disk_ends_the_recording_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    for count in (1, 10_000):
        recorder = ArrivalLog("/dev/full", kept=100)
        with recorder:
            for _ in range(count):
                recorder.refused("m", "http", Overloaded("full"))
        recorder.close()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["record='/dev/full': cannot be written any more: No space left on device"] * 2
