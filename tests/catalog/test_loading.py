import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import weir
from weir.catalog.loading import describe_service, load_target, profile_service, worker_environment
from weir.errors import ModelError, SettingsError
from weir.model import Model
from weir.policy.cost.profile import Profile
from weir.profiling import ProfilingSettings
from weir.serving.service import Service
from weir.text_models.model import TextEncoder

SQUARE = """
import weir
class Square(weir.Model):
    def predict(self, batch):
        return [x * x for x in batch]
class Outer:
    class Inner(Square):
        pass
def function(batch):
    return [x + 1 for x in batch]
number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def refused(target: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_target(target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_module_of_the_working_directory(folder: Path) -> None:
    (folder / "target_square.py").write_text(SQUARE)
    model = load_target("target_square:Square")
    assert issubclass(model, weir.Model) and model.__name__ == "Square"
    assert load_target("target_square:Outer.Inner").__name__ == "Inner"


def test_a_file_by_its_path_and_importable_for_workers(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "target-file.py").write_text(SQUARE)
    model = load_target("deep/target-file.py:Square")
    assert model.__module__ == "target-file" and str(folder / "deep") in sys.path


def test_a_file_of_a_package_may_import_its_neighbours(folder: Path) -> None:
    (folder / "target_package").mkdir()
    (folder / "target_package" / "__init__.py").touch()
    (folder / "target_package" / "base.py").write_text(SQUARE)
    (folder / "target_package" / "model.py").write_text("from .base import Square\nclass Own(Square): pass\n")
    assert load_target("target_package/model.py:Own").__module__ == "target_package.model"
    assert load_target("target_package.model:Own").__module__ == "target_package.model"


def test_a_service(folder: Path) -> None:
    (folder / "target_service.py").write_text(f"{SQUARE}\nclass Guarded(weir.Service):\n    model = Square\n")
    assert issubclass(load_target("target_service:Guarded"), Service)


@pytest.mark.parametrize("target", ["square", ":Square", "square:", "", "a b:C", "dir/square:Square"])
def test_a_wrong_form_is_explained(target: str) -> None:
    assert "must be module:Class or path/file.py:Class, a function" in refused(target)


def test_a_missing_module_says_where_was_looked(folder: Path) -> None:
    (folder / "target_square.py").write_text(SQUARE)
    text = refused("target_sqare:Square")
    assert "no module 'target_sqare'" in text and str(folder) in text and "did you mean target_square?" in text
    assert "in package 'json'" in refused("json.missing:Square")
    assert "in package 'target_square'" in refused("target_square.deeper:Square")


def test_a_missing_file_says_where_was_looked(folder: Path) -> None:
    assert f"no file {folder / 'deep' / 'square.py'}" in refused("deep/square.py:Square")


def test_a_missing_class_lists_the_candidates(folder: Path) -> None:
    (folder / "target_square.py").write_text(SQUARE)
    text = refused("target_square:Sqare")
    assert "has no 'Sqare'" in text and "its models: Square" in text and str(folder) in text
    assert "an instance of int, but must be a subclass of weir.Model" in refused("target_square:number")
    assert "must be a subclass of weir.Model or weir.Service" in refused("target_square:Outer")
    (folder / "target_empty.py").touch()
    assert "it defines no model" in refused("target_empty:Square")


def test_an_unusable_model_is_refused(folder: Path) -> None:
    (folder / "target_none.py").write_text("import weir\nclass Nothing(weir.Model): pass\n")
    assert "must implement predict" in refused("target_none:Nothing")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1 / 0", "ZeroDivisionError: division by zero"),
        ("import target_not_there", "ModuleNotFoundError: No module named 'target_not_there'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise ValueError('one\\ntwo')", "ValueError: one two"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why_and_where(folder: Path, source: str, said: str) -> None:
    (folder / "target_broken.py").write_text(f"\n{source}\n")
    for target in ("target_broken:Square", "target_broken.py:Square"):
        text = refused(target)
        assert said in text and f"({folder / 'target_broken.py'}, line 2)" in text


def test_a_syntax_error_names_its_line(folder: Path) -> None:
    (folder / "target_syntax.py").write_text("\nclass\n")
    assert "SyntaxError" in refused("target_syntax:Square") and "line 2" in refused("target_syntax:Square")


def test_two_files_of_one_name_are_two_modules(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "target_same.py").write_text(SQUARE)
    first, second = load_target("one/target_same.py:Square"), load_target("two/target_same.py:Square")
    assert first is not second and first.__module__ == "target_same" != second.__module__
    assert load_target("two/target_same.py:Square") is second  # imported once


def test_a_file_of_a_name_that_is_taken_may_fail_too(folder: Path) -> None:
    for name, source in (("one", SQUARE), ("two", "raise KeyError('x')")):
        (folder / name).mkdir()
        (folder / name / "target_twice.py").write_text(source)
    load_target("one/target_twice.py:Square")
    assert "raised KeyError" in refused("two/target_twice.py:Square")
    assert "raised KeyError" in refused("two/target_twice.py:Square")


def test_two_packages_of_one_name_are_refused(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name / "target_twin").mkdir(parents=True)
        (folder / name / "target_twin" / "__init__.py").touch()
        (folder / name / "target_twin" / "model.py").write_text(SQUARE)
    load_target("one/target_twin/model.py:Square")
    assert "names of packages must differ" in refused("two/target_twin/model.py:Square")


@pytest.mark.parametrize("target", ["target_again:Square", "target_again.py:Square"])
def test_read_anew_a_target_is_what_its_file_says_now(folder: Path, target: str) -> None:
    file, text = folder / "target_again.py", SQUARE + "\nanswer = 1\n"
    file.write_text(text)
    first = load_target(target)
    file.write_text(text.replace("answer = 1", "answer = 2"))  # as long, and perhaps in the same second
    assert load_target(target) is first
    second = load_target(target, fresh=True)
    assert second is not first and sys.modules["target_again"].answer == 2
    file.write_text("raise ValueError('half-written')")
    with pytest.raises(SettingsError, match="half-written"):
        load_target(target, fresh=True)
    assert load_target(target) is second
    file.unlink()
    with pytest.raises(SettingsError, match=r"cannot be read: No such file|no file"):
        load_target(target, fresh=True)


def test_a_module_of_a_package_is_read_anew_with_its_neighbours_as_they_are(folder: Path) -> None:
    package = folder / "target_anew"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text(SQUARE)
    (package / "model.py").write_text("from .base import Square\nclass Own(Square): pass\n")
    first = load_target("target_anew.model:Own")
    (package / "model.py").write_text("from .base import Square\nclass Own(Square): number = 2\n")
    second = load_target("target_anew.model:Own", fresh=True)
    assert getattr(second, "number") == 2 and first.__mro__[1] is second.__mro__[1]  # noqa: B009 - mypy knows no such name
    assert sys.modules["target_anew"].model is sys.modules["target_anew.model"]


def test_a_module_of_weir_is_not_read_anew() -> None:
    """Its classes would no longer be those that others have imported, which then could not travel to workers by name."""
    assert load_target("weir.text_models.model:TextEncoder", fresh=True) is TextEncoder


def test_what_has_no_file_of_python_is_not_read_anew(folder: Path) -> None:
    (folder / "target_new.py").write_text(SQUARE)
    assert load_target("target_new:Square", fresh=True) is load_target("target_new:Square")


def test_a_function_is_served_as_a_model(folder: Path) -> None:
    (folder / "target_function.py").write_text(SQUARE)
    found = load_target("target_function:function")
    assert issubclass(found, weir.Model)
    assert (found.__name__, found().predict([1, 2])) == ("function", [2, 3])


EXAMPLES = Path(__file__).parents[2] / "examples"
ALPHA, TAU0 = 0.003, 0.010


class Sleeper(Model):
    """Takes 3·b + 10 ms, or longer where the machine is busy."""

    examples: ClassVar[list[int]] = [1, 2, 3]

    def predict(self, batch: list[int]) -> list[int]:
        time.sleep(ALPHA * len(batch) + TAU0)
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


def test_a_worker_is_measured_with_as_many_batches_in_flight_as_it_will_have() -> None:
    """What that does to the times is held in virtual time by tests/profiling, and that a worker prepares ahead by tests/workers."""
    for depth in (1, 2):
        profile = weir.profile(Sleeper, max_batch_size=1, seconds=0.2, confidence=0.5, pipeline_depth=depth)
        assert profile.pipeline_depth == depth
        assert depth == 2 or profile.latency_offset_ms == 0.0


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


def test_what_cannot_be_measured_is_reported_before_anything_is_started() -> None:
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
    with pytest.raises(SettingsError, match="a chain computes nothing itself: measure the models of its steps"):
        profile_service(weir.Chain(["one"], name="line"), ProfilingSettings(), items=[1])
