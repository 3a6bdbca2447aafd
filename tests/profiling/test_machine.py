from pathlib import Path

from weir import __version__
from weir.errors import SettingsError
from weir.profiling.energy import Meter, RaplMeter
from weir.profiling.machine import cpu_name, describe_machine, find_meters


def test_a_profile_says_where_it_was_made() -> None:
    said = describe_machine()
    assert said["versions"]["weir"] == __version__
    assert said["versions"]["numpy"]
    assert "jax" not in said["versions"] or said["versions"]["jax"]
    assert "CPUs" in said["machine"]


def test_the_cpu_has_a_name_also_where_nobody_says_it(tmp_path: Path) -> None:
    known = tmp_path / "cpuinfo"
    known.write_text("processor\t: 0\nmodel name\t: Abacus 5000\n")
    assert cpu_name(known) == "Abacus 5000"
    assert cpu_name(tmp_path / "missing")


def test_meters_that_are_there_are_found_and_of_the_others_it_is_said_why_not() -> None:
    def absent() -> Meter:
        raise SettingsError("NVML: no driver")

    def present() -> Meter:
        return RaplMeter([])

    meters = find_meters({}, [absent, present])
    assert [meter.source for meter in meters.found] == ["rapl"]
    assert meters.missing == "NVML: no driver"


def test_those_of_this_machine_can_be_looked_for() -> None:
    meters = find_meters({"CUDA_VISIBLE_DEVICES": ""})
    assert all(meter.source == "rapl" for meter in meters.found)
    assert "NVML: " in meters.missing
