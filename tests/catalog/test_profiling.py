import asyncio
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import weir
from weir.catalog.profiling import describe_service, profile_service, worker_environment
from weir.errors import ModelError, SettingsError
from weir.model import Model
from weir.policy.cost.profile import Profile
from weir.profiling.settings import ProfilingSettings

EXAMPLES = Path(__file__).parents[2] / "examples"
ALPHA, TAU0 = 0.003, 0.010


class Sleeper(Model):
    """Takes 3·b + 10 ms, or longer where the machine is busy."""

    examples: ClassVar[list[int]] = [1, 2, 3]

    def predict(self, batch: list[int]) -> list[int]:
        time.sleep(ALPHA * len(batch) + TAU0)
        return batch


class Preparing(Sleeper):
    """Prepares for as long as it computes, on the batch as a whole; for so long that a busy machine adds little."""

    def preprocess_batch(self, items: list[Any]) -> list[Any]:
        time.sleep(0.1)
        return items

    def predict(self, batch: list[int]) -> list[int]:
        time.sleep(0.1)
        return batch


class Fails(Sleeper):
    def predict(self, batch: list[int]) -> list[int]:
        raise ValueError("cannot do that")


class Hooked(weir.Service):
    """Its model gets numbers only because the hook makes them."""

    model = Sleeper

    async def before_batch(self, batch: list[Any]) -> list[Any]:
        return list(map(int, batch))


def ratio_to_truth(profile: Profile) -> Any:
    truth = 1000.0 * (ALPHA * profile.sizes + TAU0)
    return profile.service_time_ms / truth


# Nothing is taken off, so that no time is less than what the model took, nearly: means are smoothed. How much more it is, is
# up to the machine; tests/profiling holds in virtual time that the durations are those of the batches.
AT_LEAST = 0.98


def test_a_worker_process_that_takes_a_known_time_is_measured_to_take_it() -> None:
    profile = weir.profile(Sleeper, max_batch_size=8, sizes=[1, 4, 8], seconds=1.0, confidence=0.05)
    assert np.all(ratio_to_truth(profile) > AT_LEAST)
    assert profile.best_batch_size == 8
    about = profile.about
    assert about["executor"] == "process" and about["content_type"] == "application/json" and about["items"] == 3
    assert about["model"].endswith("Sleeper")
    assert Profile.from_toml(profile.to_toml()).about["versions"] == about["versions"]


def test_with_two_batches_in_flight_preparing_hides_behind_computing() -> None:
    def measured(depth: int) -> Profile:
        return weir.profile(
            Preparing, max_batch_size=2, sizes=[1, 2], seconds=1.0, confidence=0.1, pipeline_depth=depth
        )

    one, two = measured(1), measured(2)
    assert one.latency_offset_ms == 0.0
    assert two.service_time_ms[0] < 0.75 * one.service_time_ms[0]
    assert two.service_time_ms[0] + two.latency_offset_ms == pytest.approx(one.service_time_ms[0], rel=0.25)


@pytest.mark.parametrize("executor", ["thread", "inline"])
def test_other_executors_are_measured_as_they_are(executor: str) -> None:
    profile = weir.profile(
        Sleeper, executor=executor, max_batch_size=4, sizes=[1, 4], seconds=0.5,
        confidence=0.1, power=30.0,
    )  # fmt: skip
    assert np.all(ratio_to_truth(profile) > AT_LEAST)
    assert profile.energy_source == "stated"
    assert profile.energy_mj == pytest.approx(30.0 * profile.service_time_ms)


@pytest.mark.parametrize("executor", ["process", "thread", "inline"])
def test_no_more_time_is_measured_than_passed(executor: str) -> None:
    """Batches of one size are measured one after the other, so their mean is at most the time through their number, however
    busy the machine is."""
    began = time.perf_counter()
    profile = weir.profile(Sleeper, executor=executor, max_batch_size=1, seconds=0.5, confidence=0.05)
    passed_ms = 1000.0 * (time.perf_counter() - began)
    assert profile.about["batches"] >= 5
    assert AT_LEAST * 1000.0 * (ALPHA + TAU0) < profile.service_time_ms[0] <= passed_ms / profile.about["batches"]


def test_the_policy_that_will_serve_does_not_matter() -> None:
    class Solved(Sleeper):
        """Its policy will be made of the profile that is measured here."""

        policy = "not-there-yet.policy.npz"

    assert weir.profile(Solved, executor="inline", max_batch_size=1, seconds=0.2).max_batch_size == 1


def test_a_running_loop_does_not_matter() -> None:
    async def notebook() -> Profile:
        return weir.profile(Sleeper, executor="inline", max_batch_size=1, seconds=0.2)

    assert asyncio.run(notebook()).max_batch_size == 1


def test_a_service_is_measured_with_its_hooks() -> None:
    profile = weir.profile(Hooked, executor="inline", max_batch_size=2, items=["1", "2"], seconds=0.3, confidence=0.2)
    assert ratio_to_truth(profile)[0] > AT_LEAST


def test_a_target_and_a_file_of_items_will_do(tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text("1\n2\n3\n4\n")
    shown: list[str] = []
    profile = weir.profile(
        f"{EXAMPLES / 'square.py'}:Square", executor="inline", items=items, max_batch_size=4, seconds=0.5,
        progress=lambda share, what: shown.append(what),
    )  # fmt: skip
    assert profile.about["items"] == 4
    assert shown[:2] == ["loading", "warming up"]


def test_a_tensor_model_is_measured_row_by_row(tmp_path: Path) -> None:
    np.savez(tmp_path / "items.npz", x=np.ones((5, 3), np.float32))
    for items in (None, tmp_path / "items.npz"):
        profile = weir.profile(
            f"{EXAMPLES / 'tensors.py'}:Affine", executor="inline", items=items, max_batch_size=4, seconds=0.3
        )
        assert profile.max_batch_size == 4
        assert profile.about["items"] == (1 if items is None else 5)


def test_bodies_in_a_folder_are_decoded_by_the_worker(tmp_path: Path) -> None:
    (tmp_path / "white.pgm").write_bytes(b"P5 2 1 255\n\xff\xff")
    profile = weir.profile(f"{EXAMPLES / 'brightness.py'}:Brightness", items=tmp_path, max_batch_size=2, seconds=0.3)
    assert profile.about["content_type"] == "image/x-portable-graymap"


def test_a_model_that_fails_is_an_error_and_nothing_stays_behind() -> None:
    with pytest.raises(ModelError, match="cannot do that"):
        weir.profile(Fails, executor="inline", seconds=0.2)


def test_what_cannot_be_measured_is_said_before_anything_is_started() -> None:
    class Bare(Model):
        def predict(self, batch: list[Any]) -> list[Any]:
            return batch

    with pytest.raises(SettingsError, match="Bare: there is nothing to measure it with"):
        weir.profile(Bare)
    with pytest.raises(SettingsError, match="did you mean max_batch_size"):
        weir.profile(Sleeper, max_batchsize=3)
    with pytest.raises(SettingsError, match="sizes=9: must be at most max_batch_size=8"):
        weir.profile(Sleeper, executor="inline", max_batch_size=8, sizes=[9])


def test_the_workers_environment_decides_which_gpus_are_read() -> None:
    service = weir.Service(Sleeper, env=[{"CUDA_VISIBLE_DEVICES": "1"}], threads=2)
    assert worker_environment(service)["CUDA_VISIBLE_DEVICES"] == "1"
    assert describe_service(service)["threads"] == 2
    assert "PATH" in worker_environment(weir.Service(Sleeper))


def test_a_chain_is_not_measured() -> None:
    with pytest.raises(SettingsError, match=r"is a chain, .* measure the models of its steps"):
        profile_service(weir.Chain(["one"], name="line"), ProfilingSettings(), items=[1])
