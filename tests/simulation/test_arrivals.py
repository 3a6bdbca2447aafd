from pathlib import Path

import numpy as np
import pytest
from tests.rings import subcases

from weir.errors import SettingsError
from weir.simulation import arrivals as processes
from weir.simulation.engine import SimulatedRequest
from weir.telemetry.logs import ArrivalLog

CAPACITY = 1000.0
TEXTS = [
    "poisson:0.7", "poisson:rate=200", "gamma:0.7,cv=2", "gamma:rate=50,cv=0.5", "mmpp:0.7", "mmpp:0.5,burst=inf,share=0.1",
    "mmpp:0.7,burst=3,share=0.5,period=200ms", "on-off:0.5,on=100ms,off=300ms", "sine:0.5,depth=0.8,period=1s",
    "ramp:0.1,to=0.9,period=2s", "ramp:0.9,to=0.1,period=2s", "constant:0.7", "poisson:0.6,rows=4",
]  # fmt: skip


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


@subcases("text", TEXTS)
def test_the_mean_rate_is_the_one_requested(text: str) -> None:
    arrivals = processes.parse_arrivals(text, capacity=CAPACITY)
    times = arrivals.times(rng(), 200_000)
    assert len(times) == 200_000 and times[0] > 0.0 and np.all(np.diff(times) >= 0.0)
    assert arrivals.sizes(0, len(times)).sum() / times[-1] == pytest.approx(arrivals.rate, rel=0.06)


@subcases(
    ("text", "rate"),
    [("poisson:0.7", 700.0), ("poisson:rate=200", 200.0), ("ramp:0.1,to=0.9", 500.0), ("ramp:rate=100,to=300", 200.0)],
)
def test_a_bare_number_is_a_load_and_a_rate_a_rate(text: str, rate: float) -> None:
    assert processes.parse_arrivals(text, capacity=CAPACITY).rate == pytest.approx(rate)


@subcases("text", TEXTS)
def test_times_are_the_same_in_blocks_and_however_many_are_requested(text: str) -> None:
    arrivals = processes.parse_arrivals(text, capacity=CAPACITY)
    times = arrivals.times(rng(), 2 * processes.BLOCK + 7)
    blocks = list(arrivals.blocks(rng(), len(times)))
    assert max(map(len, blocks)) <= processes.BLOCK and np.array_equal(np.concatenate(blocks), times)
    assert np.array_equal(arrivals.times(rng(), 100), times[:100])


def test_gaps_of_poisson_and_gamma_have_their_coefficient_of_variation() -> None:
    for arrivals, cv in (
        (processes.Poisson(100.0), 1.0),
        (processes.GammaRenewal(100.0, 2.0), 2.0),
        (processes.GammaRenewal(100.0, 0.25), 0.25),
    ):
        gaps = np.diff(arrivals.times(rng(), 200_000))
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02)


def test_the_phases_of_a_modulated_process_have_their_rates_and_shares() -> None:
    arrivals = processes.MarkovModulated(1000.0, burst=9.0, share=0.25, period=40.0)
    times = arrivals.times(rng(), 1_000_000)
    counts = np.histogram(times, bins=np.arange(0.0, times[-1], 0.25))[0] / 0.25
    busy = counts > 1500.0  # the rates are 1000 / 3 and 3000
    assert counts[busy].mean() == pytest.approx(3000.0, rel=0.03)
    assert counts[~busy].mean() == pytest.approx(1000.0 / 3.0, rel=0.03)
    assert busy.mean() == pytest.approx(0.25, abs=0.1)


def test_off_is_silence() -> None:
    arrivals = processes.OnOff(500.0, on=0.1, off=0.3)
    phase = np.mod(arrivals.times(rng(), 100_000), 0.4)
    assert phase.max() <= 0.1 + 1e-9
    assert np.histogram(phase, bins=4, range=(0.0, 0.1))[0] == pytest.approx([25_000] * 4, rel=0.05)


MIDDLES = np.arange(0.05, 1.0, 0.1)


@pytest.mark.parametrize(
    ("arrivals", "shape"),
    [
        (processes.Sine(1000.0, depth=0.8, period=1.0), 1.0 + 0.8 * np.sin(2.0 * np.pi * MIDDLES)),
        (processes.Ramp(1000.0, climb=3.0, period=1.0), 0.5 + MIDDLES),
    ],
    ids=["sine", "ramp"],
)
def test_a_rate_that_varies_is_followed(arrivals: processes.Arrivals, shape: processes.Floats) -> None:
    phase = np.mod(arrivals.times(rng(), 400_000), 1.0)
    assert np.histogram(phase, bins=10, range=(0.0, 1.0))[0] / 40_000 == pytest.approx(shape, abs=0.05)


def test_constant_gaps_are_equal_to_the_last_bit_of_the_time() -> None:
    times = processes.parse_arrivals("constant:0.5", capacity=CAPACITY).times(rng(), 100_000)
    assert (times[0], times[-1]) == (1 / 500.0, 100_000 / 500.0)


def test_a_trace_plays_what_was_recorded() -> None:
    trace = processes.RecordedArrivals(np.array([5.0, 6.0, 6.0, 8.0]), np.array([1, 2, 3, 2]))
    assert trace.times(rng(1), 100).tolist() == trace.times(rng(2), 100).tolist() == [0.0, 1.0, 1.0, 3.0]
    assert (trace.times(rng(), 2).tolist(), trace.sizes(1, 3).tolist(), trace.length) == ([0.0, 1.0], [2, 3], 4)
    # 3 gaps of 1 s on average, and one more after the last.
    assert (trace.rate, trace.request_rate) == pytest.approx((8 / 4.0, 1.0))
    long = np.arange(2.5 * processes.BLOCK)
    blocks = list(processes.RecordedArrivals(long).blocks(rng(), len(long)))
    assert len(blocks) == 3 and np.array_equal(np.concatenate(blocks), long)


@subcases(
    ("text", "times", "rows"),
    [("arrival_s,rows\n0,1\n2,3\n", [0.0, 2.0], [1, 3]), ("arrival_s\n3\n3.5\n\n", [0.0, 0.5], [1, 1])],
)
def test_a_trace_from_a_file(text: str, times: list[float], rows: list[int], tmp_path: Path) -> None:
    (tmp_path / "it.csv").write_text(text)
    arrivals = processes.parse_arrivals(f"trace:{tmp_path / 'it.csv'}")
    assert (arrivals.times(rng(), 10).tolist(), arrivals.sizes(0, 2).tolist()) == (times, rows)


@subcases(
    ("text", "message"),
    [
        ("pareto:0.5", "'pareto:0.5': must be one of poisson, gamma, mmpp, on-off, sine, ramp, constant, trace"),
        ("poisson", "must state the load or the rate, one of them"),
        ("poisson:", "load='': must be a number"),
        ("poisson:0.7,rate=200", "must state the load or the rate, one of them"),
        ("poisson:much", "load='much': must be a number"),
        ("poisson:-1", "load=-1: must be greater than 0"),
        ("poisson:rate=inf", "rate=inf: must be greater than 0, and finite"),
        ("poisson:0.7,cv=2", "no setting 'cv=2'; it has rate, rows"),
        ("poisson:0.7,5", "no setting '5'"),
        ("poisson:0.7,rows=0", "rows=0: must be 1 or more"),
        ("poisson:0.7,rows=1.5", "rows='1.5': must be a whole number"),
        ("gamma:0.7,cv=0", "cv=0.0: must be greater than 0, and finite"),
        ("gamma:0.7,cv=1,cv=2", "cv=2: cv is given twice"),
        ("mmpp:0.7,share=1", "share=1.0: must lie between 0 and 1"),
        ("mmpp:0.7,burst=0.5", "burst=0.5: must be 1 or more"),
        ("on-off:0.7,on=soon", "on='soon': must be a duration such as 1s"),
        ("on-off:0.7,off=0", "off=0.0: must be greater than 0"),
        ("sine:0.7,depth=1.5", "depth=1.5: must be from 0 to 1"),
        ("ramp:0.7", "to: must be given"),
        ("ramp:0.7,to=-1", "to=-1: must be 0 or more"),
        ("trace:", "the file must be given"),
        ("trace:nowhere.csv", "'nowhere.csv' cannot be read"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        processes.parse_arrivals(text, capacity=CAPACITY)
    assert message in caught.value.message


def test_a_load_needs_a_capacity() -> None:
    with pytest.raises(SettingsError, match="a load needs a profile"):
        processes.parse_arrivals("poisson:0.7")
    assert processes.parse_arrivals("poisson:rate=5").rate == 5.0


@subcases("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_process_checks_its_rate(rate: float) -> None:
    with pytest.raises(SettingsError, match="rate="):
        processes.Poisson(rate)


@subcases("times", [[], [1.0], [1.0, 1.0], [2.0, 1.0]])
def test_a_trace_checks_its_times(times: list[float]) -> None:
    with pytest.raises(SettingsError, match="at least two arrivals, ascending"):
        processes.RecordedArrivals(np.array(times))


@subcases(
    ("text", "message"),
    [
        ("\xff\xfe", "cannot be read"),
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
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError) as caught:
        processes.read_trace(path)
    assert message in caught.value.message and str(path) in caught.value.message


def test_what_a_server_records_is_read(tmp_path: Path) -> None:
    path = tmp_path / "it.csv"
    with ArrivalLog(path) as recorder:
        recorder.answered("square", [SimulatedRequest(0, 7.5), SimulatedRequest(1, 7.75, rows=3)], None, 8.0)
    assert [column.tolist() for column in processes.read_trace(path)] == [[0.0, 0.25], [1, 3]]
