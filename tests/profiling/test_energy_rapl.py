import os
from pathlib import Path

import pytest

from weir.errors import SettingsError
from weir.profiling.energy import find_rapl

RANGE_UJ = 262_143_328_850


class Powercap:
    """A tree like /sys/class/powercap, whose counters the test moves."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._counts: dict[str, int] = {}

    def add(self, zone: str, name: str, count_uj: int = 0, limits_w: tuple[float, ...] = ()) -> Path:
        folder = self.root / zone
        folder.mkdir()
        (folder / "name").write_text(name + "\n")
        (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
        for number, limit in enumerate(limits_w):
            (folder / f"constraint_{number}_power_limit_uw").write_text(f"{round(limit * 1e6)}\n")
        self._counts[zone] = count_uj
        self.use(zone, 0.0)
        return folder

    def use(self, zone: str, joules: float) -> None:
        """Count energy, going round as the hardware does."""
        self._counts[zone] = (self._counts[zone] + round(joules * 1e6)) % (RANGE_UJ + 1)
        (self.root / zone / "energy_uj").write_text(f"{self._counts[zone]}\n")


@pytest.fixture
def powercap(tmp_path: Path) -> Powercap:
    return Powercap(tmp_path)


def test_packages_are_added_up_and_nothing_else(powercap: Powercap) -> None:
    powercap.add("intel-rapl:0", "package-0", 5_000_000, (65.0, 90.0))
    powercap.add("intel-rapl:1", "package-1", 7_000_000, (65.0, 90.0))
    powercap.add("intel-rapl:0:0", "core")
    powercap.add("intel-rapl:0:1", "dram")
    powercap.add("intel-rapl:2", "psys")
    (powercap.root / "intel-rapl").mkdir()
    meter = find_rapl(powercap.root)
    assert meter.source == "rapl" and meter.name == "2 CPU packages"
    assert meter.limit_w == 180.0
    assert meter.read_mj() == 0.0
    for zone in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0", "intel-rapl:2"):
        powercap.use(zone, 1.5)
    assert meter.read_mj() == 3000.0


def test_a_counter_that_goes_round_goes_on(powercap: Powercap) -> None:
    powercap.add("intel-rapl:0", "package-0", RANGE_UJ - 1_000_000)
    meter = find_rapl(powercap.root)
    powercap.use("intel-rapl:0", 2.5)
    assert meter.read_mj() == pytest.approx(2500.0, abs=0.01)
    powercap.use("intel-rapl:0", 1.0)
    assert meter.read_mj() == pytest.approx(3500.0, abs=0.01)
    assert meter.name == "1 CPU package"


def test_a_limit_is_known_only_if_every_package_says_one(powercap: Powercap) -> None:
    powercap.add("intel-rapl:0", "package-0", limits_w=(65.0,))
    powercap.add("intel-rapl:1", "package-1", limits_w=(0.0,))
    assert find_rapl(powercap.root).limit_w is None


def test_why_there_is_none_is_said(powercap: Powercap) -> None:
    with pytest.raises(SettingsError, match=r"RAPL: there are no CPU packages in .* \(virtual machines have none\)"):
        find_rapl(powercap.root)
    folder = powercap.add("intel-rapl:0", "package-0")
    (folder / "energy_uj").write_text("nothing")
    with pytest.raises(SettingsError, match="RAPL: cannot be read"):
        find_rapl(powercap.root)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_counter_for_root_only_is_said_to_be_that(powercap: Powercap) -> None:
    folder = powercap.add("intel-rapl:0", "package-0")
    (folder / "energy_uj").chmod(0)
    with pytest.raises(SettingsError, match="energy_uj is readable by root only"):
        find_rapl(powercap.root)
