"""Which device a worker computes on."""

import logging

import pytest

from weir.errors import SettingsError
from weir.text_models.runtime import device_for
from weir.text_models.runtime.contract import free_memory

TWO = [10, 90]  # bytes that are free


def test_workers_go_round_the_given_devices() -> None:
    devices = ["cuda:0", "1", "cpu"]
    assert [device_for(devices, worker, lambda: TWO) for worker in range(4)] == ["cuda:0", "cuda:1", "cpu", "cuda:0"]


@pytest.mark.parametrize("devices", [[], ["auto"], ["cuda"]])
def test_the_gpu_with_most_free_memory_is_first(devices: list[str]) -> None:
    assert [device_for(devices, worker, lambda: TWO) for worker in range(3)] == ["cuda:1", "cuda:0", "cuda:1"]


@pytest.mark.parametrize("devices", [[], ["auto"]])
def test_without_a_gpu_it_is_the_cpu(devices: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert device_for(devices, 0, lambda: []) == "cpu"
    assert not caplog.records


@pytest.mark.parametrize(("device", "free"), [("cuda", []), ("cuda:2", TWO)])
def test_a_gpu_that_is_not_there_is_a_warning_and_the_cpu(
    device: str, free: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert device_for([device], 0, lambda: free) == "cpu"
    assert f"device '{device}': the runtime has {len(free)} GPU(s) here" in caplog.text


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "", 3])
def test_what_is_no_device_is_refused_by_name(name: str) -> None:
    with pytest.raises(SettingsError, match="must be auto, cpu, cuda"):
        device_for([name], 0, lambda: [])


def test_nvidia_is_queried_only_where_it_is() -> None:
    assert all(isinstance(size, int) for size in free_memory())
