"""bank.py: a bank is a value, checked, and survives being a file."""

import io
import json
from typing import Any

import numpy as np
import pytest

from weir.errors import SettingsError
from weir.policy.cost.objective import LatencySLO, Prices
from weir.policy.cost.profile import Profile
from weir.policy.solve.bank import Bank

PROFILE = Profile.linear(alpha_ms=1.0, tau0_ms=2.0, max_batch_size=3)


def bank(**changes: Any) -> Bank:
    """Return a bank of three rates, with changes."""
    fields: dict[str, Any] = {
        "profile": PROFILE,
        "prices": Prices(1.0, 2.0, 100.0),
        "workers": 2,
        "objective": LatencySLO(0.02, 0.01, 0.001),
        "rates": [100.0, 400.0, 500.0],
        "tables": np.array([[0, 1, 2, 3], [0, 0, 2, 3], [0, 0, 0, 3]], dtype=np.uint16),
        "second_tables": np.array([[0, 1, 2, 3], [0, 0, 2, 3], [0, 0, 2, 3]], dtype=np.uint16),
        "shares": [0.0, 0.0, 0.5],
        "max_waiting": [0, 0, 20],
        "response_time_ms": [3.0, 4.0, 6.0],
        "p99_ms": [6.0, 8.0, 12.0],
        "power_w": [1.0, 1.5, 2.0],
    }
    return Bank(**fields | changes)


def test_limits_and_indices() -> None:
    made = bank()
    assert made.limits().tolist() == [1, 2, 3]
    assert [made.index_of(rate) for rate in (0.0, 150.0, 250.0, 440.0, 450.0, 9e9)] == [0, 0, 1, 1, 2, 2]
    assert bank(
        rates=[1.0], tables=[[0, 1]], second_tables=[[0, 1]], shares=[0], max_waiting=[0], response_time_ms=[1],
        p99_ms=[1], power_w=[1],
    ).index_of(5.0) == 0  # fmt: skip
    assert made.capacity == pytest.approx(2 * 600.0)


@pytest.mark.parametrize("objective", [None, LatencySLO(0.02, 0.01, 0.001)])
def test_a_bank_survives_being_a_file(objective: LatencySLO | None) -> None:
    made = bank(objective=objective)
    read = Bank.from_bytes(made.to_bytes())
    for name in ("rates", "tables", "second_tables", "shares", "max_waiting", "response_time_ms", "p99_ms", "power_w"):
        assert np.array_equal(getattr(read, name), getattr(made, name)), name
        assert getattr(read, name).dtype == getattr(made, name).dtype
    assert (read.prices, read.workers, read.objective) == (made.prices, 2, objective)
    assert read.profile.to_toml() == PROFILE.to_toml()


def test_a_bank_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        bank().tables[0, 1] = 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"workers": 0}, "workers=0: must be 1 or more"),
        ({"rates": []}, "rates: must have one entry"),
        ({"shares": [0.0]}, "shares: must have one entry for each rate, shape (3,); has (1,)"),
        ({"rates": [100.0, 100.0, 200.0]}, "must be finite, greater than 0 and ascending"),
        ({"rates": [0.0, 100.0, 200.0]}, "must be finite, greater than 0 and ascending"),
        ({"rates": [1.0, 100.0, float("inf")]}, "must be finite, greater than 0 and ascending"),
        ({"shares": [0.0, 1.5, 0.0]}, "shares: 1.5 for rate 400: must be 0 to 1"),
        ({"max_waiting": [0, 0, -1]}, "max_waiting: -1 for rate 500: must be 0 to inf"),
        ({"tables": [0, 1]}, "tables: must have shape [rates, states]; has (2,)"),
        ({"tables": [[0, 1], [0, 1], [0, 0]]}, "tables: the last entry, for 1 and more waiting, is 0"),
        ({"tables": [[0, 1], [0, 1]]}, "tables: must have one entry for each rate, shape (3, 2); has (2, 2)"),
        ({"second_tables": [[0, 1], [0, 1], [0, 9]]}, "second_tables: 9 rows for 1 waiting"),
    ],
)
def test_what_cannot_be_a_bank_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        bank(**changes)
    assert says in raised.value.message


def damaged(**changes: Any) -> bytes:
    """Return a bank's file with changes to what it says about itself."""
    with np.load(io.BytesIO(bank().to_bytes())) as arrays:
        held = dict(arrays)
    held["about"] = np.array(json.dumps(json.loads(str(held["about"])) | changes))
    buffer = io.BytesIO()
    np.savez(buffer, **held)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "must be a bank made by `weir solve`"),
        (b"not a bank", "must be a bank made by `weir solve`: is no npz file"),
        (bank().to_bytes()[:-40], "must be a bank made by `weir solve`"),
        (damaged(weir_bank=2), "weir_bank=2: must be 1"),
        (damaged(workers=0), "workers=0: must be 1 or more"),
        (damaged(prices=[1.0, -1.0, None]), "energy_weight=-1.0: must be a number, 0 or more"),
        (damaged(profile="weir_profile = 1"), "profile: must be a profile"),
        (damaged(objective=[-1.0, 0.01, 0.0]), "deadline=-1.0"),
        (damaged(objective=7), "must be a bank made by `weir solve`"),
    ],
)
def test_a_file_that_is_no_bank_is_named(data: bytes, says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        Bank.from_bytes(data, "x.policy.npz")
    assert raised.value.message.startswith("x.policy.npz: ")
    assert says in raised.value.message
