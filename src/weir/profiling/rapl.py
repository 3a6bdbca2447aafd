"""The energy counters of CPU packages that Linux shows under /sys/class/powercap (Intel's RAPL; AMD's by the same name)."""

from collections.abc import Sequence
from pathlib import Path

from weir.errors import SettingsError

POWERCAP = Path("/sys/class/powercap")


class RaplMeter:
    """The packages of this machine together. They include whatever else runs on it."""

    source = "rapl"

    def __init__(self, packages: Sequence["Package"]) -> None:
        self._packages = packages
        self.name = f"{len(packages)} CPU package{'s' if len(packages) > 1 else ''}"

    @property
    def limit_w(self) -> float | None:
        """The sum of the packages' highest power limits, if all say one."""
        limits = [package.limit_w for package in self._packages]
        return sum(limit for limit in limits if limit is not None) if None not in limits else None

    def read_mj(self) -> float:
        """Return the millijoules used since this was made. To be asked more often than the counters go round, which takes
        minutes."""
        return sum(package.read_mj() for package in self._packages)


class Package:
    """One counter, in a folder of the powercap tree. It counts microjoules and begins again at `max_energy_range_uj`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._range_uj = _number(folder / "max_energy_range_uj")
        self._last_uj = self._read_uj()
        self._total_uj = 0

    @property
    def limit_w(self) -> float | None:
        """The highest of its power limits, in watts; None if it has none."""
        limits = [_number(path) for path in self._folder.glob("constraint_*_power_limit_uw")]
        return max(limits) / 1e6 if any(limits) else None

    def read_mj(self) -> float:
        """Return the millijoules used since this was made."""
        now_uj = self._read_uj()
        passed = now_uj - self._last_uj
        self._total_uj += passed if passed >= 0 else passed + self._range_uj + 1
        self._last_uj = now_uj
        return self._total_uj / 1000.0

    def _read_uj(self) -> int:
        return _number(self._folder / "energy_uj")


def find_rapl(root: Path = POWERCAP) -> RaplMeter:
    """Return the meter of all CPU packages. Raises SettingsError that says why there is none.

    Only packages count: core, uncore and dram are parts of them or unsteadily supported, and psys is all of them again.
    """
    packages = [folder for folder in sorted(root.glob("intel-rapl:*")) if _is_package(folder)]
    if not packages:
        raise SettingsError(f"RAPL: there are no CPU packages in {root} (virtual machines have none)")
    try:
        return RaplMeter([Package(folder) for folder in packages])
    except PermissionError as error:
        raise SettingsError(f"RAPL: {error.filename} is readable by root only") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"RAPL: cannot be read: {error}") from None


def _is_package(folder: Path) -> bool:
    try:
        return (folder / "name").read_text().startswith("package")
    except OSError:
        return False


def _number(path: Path) -> int:
    return int(path.read_text())
