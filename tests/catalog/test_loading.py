import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.catalog.repository.shelf import write

import weir
from weir.catalog.loading import describe_service, load_target, profile_service, worker_environment
from weir.errors import ModelError, SettingsError
from weir.model import Model
from weir.policy.cost import Profile
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
class Guarded(weir.Service):
    model = Square
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


def test_where_a_target_may_be(folder: Path) -> None:
    own = "from .base import Square\nclass Own(Square): pass\n"
    files = {"target_square.py": SQUARE, "deep/target-file.py": SQUARE}
    write(folder, {**files, "pack/__init__.py": "", "pack/base.py": SQUARE, "pack/model.py": own})
    for target, module, name in (
        ("target_square:Square", "target_square", "Square"),
        ("target_square:Outer.Inner", "target_square", "Inner"),
        ("deep/target-file.py:Square", "target-file", "Square"),
        ("pack/model.py:Own", "pack.model", "Own"),
        ("pack.model:Own", "pack.model", "Own"),
        ("target_square:function", "target_square", "function"),
    ):
        model = load_target(target)
        assert issubclass(model, weir.Model) and (model.__module__, model.__name__) == (module, name)
        assert model().predict([1, 2]) == ([2, 3] if name == "function" else [1, 4])
    assert str(folder / "deep") in sys.path  # for workers
    assert issubclass(load_target("target_square:Guarded"), Service)


@pytest.mark.parametrize("target", ["square", ":Square", "square:", "", "a b:C", "dir/square:Square"])
def test_a_wrong_form_is_explained(target: str) -> None:
    assert "must be module:Class or path/file.py:Class, a function" in refused(target)


def test_what_is_missing_says_where_was_looked_and_what_there_is(folder: Path) -> None:
    nothing = "import weir\nclass Nothing(weir.Model): pass\n"
    write(folder, {"target_square.py": SQUARE, "target_empty.py": "", "target_none.py": nothing})
    for target, *said in (
        ("target_sqare:Square", "no module 'target_sqare'", str(folder), "did you mean target_square?"),
        ("json.missing:Square", "in package 'json'"),
        ("target_square.deeper:Square", "in package 'target_square'"),
        ("deep/square.py:Square", f"no file {folder / 'deep' / 'square.py'}"),
        ("target_square:Sqare", "has no 'Sqare'", "its models: Square", str(folder)),
        ("target_square:number", "an instance of int, but must be a subclass of weir.Model"),
        ("target_square:Outer", "must be a subclass of weir.Model or weir.Service"),
        ("target_empty:Square", "it defines no model"),
        ("target_none:Nothing", "must implement predict"),
        ("nowhere/models", f"; there is nothing at {folder / 'nowhere' / 'models'}"),
    ):
        text = refused(target)
        assert all(each in text for each in said), text


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
    write(folder, {"target_syntax.py": "\nclass\n"})
    assert "SyntaxError" in refused("target_syntax:Square") and "line 2" in refused("target_syntax:Square")


def test_two_files_of_one_name_are_two_modules(folder: Path) -> None:
    write(
        folder,
        {"one/target_same.py": SQUARE, "two/target_same.py": SQUARE, "bad/target_same.py": "raise KeyError('x')"},
    )
    first, second = load_target("one/target_same.py:Square"), load_target("two/target_same.py:Square")
    assert first is not second and first.__module__ == "target_same" != second.__module__
    assert load_target("two/target_same.py:Square") is second  # imported once
    for _ in range(2):
        assert "raised KeyError" in refused("bad/target_same.py:Square")


def test_two_packages_of_one_name_are_refused(folder: Path) -> None:
    for name in ("one", "two"):
        write(folder / name / "target_twin", {"__init__.py": "", "model.py": SQUARE})
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


def test_a_module_of_a_package_is_read_anew_without_its_neighbours(folder: Path) -> None:
    own = "from .base import Square\nclass Own(Square): "
    write(folder / "target_anew", {"__init__.py": "", "base.py": SQUARE, "model.py": f"{own}pass"})
    first = load_target("target_anew.model:Own")
    write(folder / "target_anew", {"model.py": f"{own}number = 2"})
    second = load_target("target_anew.model:Own", fresh=True)
    assert getattr(second, "number") == 2 and first.__mro__[1] is second.__mro__[1]  # noqa: B009 - mypy knows no such name
    assert sys.modules["target_anew"].model is sys.modules["target_anew.model"]


def test_a_module_of_weir_is_not_read_anew() -> None:
    """Its classes would no longer be those that others have imported, which then could not travel to workers by name."""
    assert load_target("weir.text_models.model:TextEncoder", fresh=True) is TextEncoder


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


def test_a_worker_is_measured_with_its_batches_in_flight() -> None:
    """What that does to the times is held in virtual time by tests/profiling, and that a worker prepares ahead by tests/workers."""
    for depth in (1, 2):
        profile = weir.profile(Sleeper, max_batch_size=1, seconds=0.2, confidence=0.5, pipeline_depth=depth)
        assert profile.pipeline_depth == depth
        assert depth == 2 or profile.latency_offset_ms == 0.0


@pytest.mark.parametrize("executor", ["process", "thread", "inline"])
def test_no_more_time_is_measured_than_passed(executor: str) -> None:
    """Batches of one size are measured one after the other, so their mean is at most the time through their number, however
    busy the machine is."""
    began = time.perf_counter()
    profile = weir.profile(Sleeper, executor=executor, max_batch_size=1, seconds=0.5, confidence=0.05, power=30.0)
    passed_ms = 1000.0 * (time.perf_counter() - began)
    assert profile.about["batches"] >= 5
    assert AT_LEAST * 1000.0 * (ALPHA + TAU0) < profile.service_time_ms[0] <= passed_ms / profile.about["batches"]
    assert profile.energy_source == "stated"
    assert profile.energy_mj == pytest.approx(30.0 * profile.service_time_ms)


async def test_neither_a_running_loop_nor_the_policy_that_will_serve_matters() -> None:
    class Solved(Sleeper):
        """Its policy will be made of the profile that is measured here."""

        policy = "not-there-yet.policy.npz"

    assert weir.profile(Solved, executor="inline", max_batch_size=1, seconds=0.2).max_batch_size == 1


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

    settings: Any
    for model, settings, rule in (
        (Bare, {}, "Bare: there is nothing to measure it with"),
        (Sleeper, {"max_batchsize": 3}, "did you mean max_batch_size"),
        (Sleeper, {"max_batch_size": 8, "sizes": [9]}, "sizes=9: must be at most max_batch_size=8"),
    ):
        with pytest.raises(SettingsError, match=rule):
            weir.profile(model, **settings)
    with pytest.raises(SettingsError, match="a chain computes nothing itself: measure the models of its steps"):
        profile_service(weir.Chain(["one"], name="line"), ProfilingSettings(), items=[1])


def test_the_workers_environment_decides_which_gpus_are_read() -> None:
    service = weir.Service(Sleeper, env=[{"CUDA_VISIBLE_DEVICES": "1"}], threads=2)
    assert worker_environment(service)["CUDA_VISIBLE_DEVICES"] == "1"
    assert describe_service(service)["threads"] == 2
    assert "PATH" in worker_environment(weir.Service(Sleeper))
