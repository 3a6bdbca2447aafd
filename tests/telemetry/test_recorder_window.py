"""The window of what came of the last batches."""

from typing import Any

import numpy as np
import pytest

from weir.messages import Dispatch, Kind, Reason, Request, Timing, Wakeup
from weir.policy.cost.objective import Prices
from weir.policy.cost.profile import Profile
from weir.telemetry.recorder import HALF, RollingWindow
from weir.testing import FakeClock, FakeRequest


class Rig:
    """A window of a service whose largest batch is 8, and its clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.arrivals = 0
        self.measured = RollingWindow(self.clock, lambda: self.arrivals, 8)

    def serve(self, *ages: float, slices: list[Any] | None = None, **request: Any) -> None:
        requests = [FakeRequest([0] * 4, arrival=self.clock() - age, **request) for age in ages]
        self.come_back(requests, slices)

    def come_back(self, requests: list[Any], slices: list[Any] | None = None) -> None:
        parts = zip(requests, slices or [None] * len(requests), strict=True)
        rows = sum(_rows(request, part) for request, part in parts)
        self.arrivals += rows
        batch = Dispatch(
            1, 0, requests, slices, rows, float(rows), Reason.IDLE, rows, 0.0, None, Wakeup.ARRIVAL, self.clock()
        )
        self.measured.computed("m", batch, Timing(0.0, 0.0, 0.0), self.clock())


def _rows(request: Request, part: tuple[int, int] | None) -> int:
    if part is None:
        return request.form.rows
    per_item = request.form.rows // len(request.payload) if request.form.kind is Kind.ITEMS else 1
    return (part[1] - part[0]) * per_item


def test_means_are_over_rows() -> None:
    rig = Rig()
    rig.serve(0.010, 0.030)
    rig.serve(0.050, rows=2, kind=Kind.TENSORS)
    rig.clock.advance(2.0)
    reading = rig.measured.read()
    assert (reading.batches, reading.requests, reading.rows) == (2, 3, 4)
    assert reading.response_time_ms == pytest.approx((10 + 30 + 2 * 50) / 4)
    assert reading.seconds == pytest.approx(2.0)
    assert reading.rate == pytest.approx(2.0)


def test_a_divided_request_counts_once_and_its_rows_where_they_were() -> None:
    rig = Rig()
    whole = FakeRequest([0] * 4, arrival=rig.clock() - 0.010, rows=8, kind=Kind.ITEMS)
    rig.come_back([whole], [(0, 3)])
    rig.clock.advance(0.010)
    rig.come_back([whole], [(3, 4)])
    reading = rig.measured.read()
    assert (reading.requests, reading.rows, reading.batches) == (1, 8, 2)
    assert reading.response_time_ms == pytest.approx((6 * 10 + 2 * 20) / 8)


def test_power_and_cost_are_those_of_the_sizes_served() -> None:
    rig = Rig()
    profile = Profile.linear(alpha_ms=1.0, tau0_ms=1.0, beta_mj=10.0, zeta0_mj=20.0, max_batch_size=4)
    rig.serve(0.010)
    rig.serve(*[0.010] * 6)  # more than the profile knows of: counted as its largest
    rig.clock.advance(0.5)
    reading = rig.measured.read()
    assert reading.power_w(profile) == pytest.approx((30.0 + 60.0) / 500.0)
    assert reading.cost(profile, Prices(2.0, 3.0)) == pytest.approx(2.0 * 10.0 + 3.0 * 0.18)


def test_percentiles_are_right_to_a_tenth() -> None:
    rig = Rig()
    ages = np.random.default_rng(1).exponential(0.02, 10_000)
    for batch in ages.reshape(-1, 8):
        rig.serve(*batch)
    p99 = rig.measured.read().p99_ms
    assert p99 == pytest.approx(1000.0 * float(np.quantile(ages, 0.99)), rel=0.1)


def test_old_batches_are_forgotten_half_by_half() -> None:
    rig = Rig()
    for age in (0.010, 0.020, 0.030):
        rig.serve(age)
        rig.clock.advance(HALF)
    reading = rig.measured.read()  # turns the window: the first two halves are forgotten
    assert reading.batches == 1
    assert reading.response_time_ms == pytest.approx(30.0)
    assert reading.seconds == pytest.approx(HALF)
