import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weir
from weir.catalog.loading import load_target
from weir.errors import SettingsError
from weir.serving.service import Service

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
    assert "must be module:Class or path/file.py:Class" in refused(target)


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
    assert "must be a subclass of weir.Model or weir.Service, or a function" in refused("target_square:number")
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


def test_what_has_no_file_of_python_is_not_read_anew(folder: Path) -> None:
    (folder / "target_new.py").write_text(SQUARE)
    assert load_target("target_new:Square", fresh=True) is load_target("target_new:Square")


def test_a_function_is_served_as_a_model(folder: Path) -> None:
    (folder / "target_function.py").write_text(SQUARE)
    found = load_target("target_function:function")
    assert issubclass(found, weir.Model)
    assert (found.__name__, found().predict([1, 2])) == ("function", [2, 3])
