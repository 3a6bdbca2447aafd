import importlib
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.rings import subcases
from tests.workers.models import Square

from weir.errors import SettingsError
from weir.model import Model
from weir.workers.source import (
    Named,
    folder_of,
    import_text,
    pack_source,
    parse_target,
    pickler,
    private_folder,
    unpack_source,
)


def unpacked_elsewhere(packed: bytes, path: list[str]) -> str:
    """Unpack in a fresh process, which says what the model makes of [3]."""
    script = (
        f"import sys; sys.path[:] = {path!r}\n"
        "from weir.workers.source import unpack_source\n"
        f"model, params = unpack_source({packed!r})\n"
        "print(model(**params).predict([3]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.strip()


def write_module(folder: Path, name: str, factor: int) -> Path:
    file = folder / f"{name}.py"
    file.write_text(
        f"import weir\nclass Times(weir.Model):\n    def predict(self, batch): return [{factor} * x for x in batch]\n"
    )
    return file


@subcases(
    ("target", "named"),
    [
        ("package.module:Class", Named("package.module", "Class", None)),
        ("module:Outer.Inner", Named("module", "Outer.Inner", None)),
        ("/some/where/file.py:Class", Named("file", "Class", "/some/where/file.py")),
    ],
)
def test_a_target_is_a_module_or_a_file_and_a_class(target: str, named: Named) -> None:
    assert parse_target(target) == named


@subcases("target", ["module", "module:", ":Class", ""])
def test_any_other_target_is_refused(target: str) -> None:
    with pytest.raises(SettingsError, match=r"a model is named as module:Class or path/file\.py:Class"):
        parse_target(target)


def test_a_class_that_can_be_imported_travels_by_name() -> None:
    assert b"tests.workers.models" in pack_source(Square, {})
    assert len(pack_source(Square, {})) < 300
    assert unpacked_elsewhere(pack_source(Square, {}), sys.path) == "[9]"


def test_a_class_from_a_file_is_found_though_another_module_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = write_module(tmp_path, "times", 2)
    (tmp_path / "other").mkdir()
    write_module(tmp_path / "other", "times", 5)
    packed = pack_source(f"{ours}:Times", {})

    assert unpacked_elsewhere(packed, [str(tmp_path / "other"), *sys.path]) == "[6]"
    assert unpacked_elsewhere(packed, sys.path) == "[6]"


def test_a_local_class_travels_by_value_with_what_it_uses() -> None:
    factor = 7

    class Local(Model):
        def __init__(self, add: int) -> None:
            self.add = add

        def predict(self, batch: list[Any]) -> list[Any]:
            return [factor * x + self.add for x in batch]

    assert unpacked_elsewhere(pack_source(Local, {"add": 1}), sys.path) == "[22]"


def test_what_is_no_model_is_refused_where_it_is_found() -> None:
    main = sys.modules["__main__"]
    try:
        with pytest.raises(SettingsError, match="has no such class"):
            unpack_source(pack_source("tests.workers.models:Cube", {}))
        with pytest.raises(SettingsError, match=r"must be a subclass of weir\.Model"):
            unpack_source(pack_source("pathlib:Path", {}))
    finally:
        sys.modules["__main__"] = main


def test_a_text_that_was_read_travels_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_module(tmp_path, "times_read", 5)
    monkeypatch.delitem(sys.modules, "times_read", raising=False)
    module = import_text("times_read", str(file), file.read_bytes(), folder_of(str(tmp_path)))
    packed = pack_source(module.Times, {})
    file.write_text("raise ValueError('half-written')")
    assert unpacked_elsewhere(packed, sys.path) == "[15]"
    with pytest.raises(ValueError, match="half-written"):
        import_text("times_read", str(file), file.read_bytes())
    assert sys.modules["times_read"] is module
    with pytest.raises(ValueError, match="half-written"):
        import_text("times_other", str(file), file.read_bytes())
    assert "times_other" not in sys.modules


def test_a_text_may_import_its_neighbours(tmp_path: Path) -> None:
    write_module(tmp_path, "times_neighbour", 7)
    file = tmp_path / "times_model.py"
    file.write_text("from times_neighbour import Times as Base\nclass Times(Base): pass\n")
    source = Named("times_alone", "Times", str(file), file.read_bytes(), None, str(tmp_path))
    assert unpacked_elsewhere(pickle.dumps((source, {})), sys.path) == "[21]"


def test_a_function_travels_by_name_where_it_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "functions_of_test.py").write_text("def cube(batch): return [x ** 3 for x in batch]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cube = importlib.import_module("functions_of_test").cube
    packed = pack_source(Model.from_function(cube, max_batch_size=4), {})
    assert b"functions_of_test" in packed and len(packed) < 500
    assert unpacked_elsewhere(packed, [str(tmp_path), *sys.path]) == "[27]"


def test_what_a_function_was_given_and_a_decorated_function_travel_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decorated_of_test.py").write_text(
        "import weir\ndef cube(batch): return [x ** 3 for x in batch]\n"
        "@weir.model(Input=int)\ndef square(batch): return [x ** 2 for x in batch]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("decorated_of_test")
    model, _ = unpack_source(pack_source(Model.from_function(module.cube, Input=float), {}))
    assert model.Input is float and model().predict([3]) == [27]
    packed = pack_source(module.square, {})
    assert b"decorated_of_test" in packed and len(packed) < 500
    assert unpacked_elsewhere(packed, [str(tmp_path), *sys.path]) == "[9]"


def test_a_function_of_this_program_alone_travels_by_value() -> None:
    packed = pack_source(Model.from_function(lambda batch: [x + 1 for x in batch]), {})
    assert unpacked_elsewhere(packed, sys.path) == "[4]"


def remade(value: Any) -> Any:
    packed = io.BytesIO()
    pickler(packed, lambda kind: kind.__module__ == __name__).dump(value)
    return pickle.loads(packed.getvalue())


class Plain(msgspec.Struct):
    number: int
    text: str = "none"
    numbers: list[int] = []


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel", tag="strict", kw_only=True):
    first_number: int = 1
    second_number: int

    def total(self) -> int:
        return self.first_number + self.second_number

    @property
    def doubled(self) -> int:
        return 2 * self.total()

    @classmethod
    def of(cls, number: int) -> "Strict":
        return cls(second_number=number)


class Derived(Plain):
    more: Plain | None = None


@subcases("struct", [Plain, Strict, Derived])
def test_a_struct_is_another_one_with_the_same_fields_and_rules(struct: type[msgspec.Struct]) -> None:
    again = remade(struct)

    assert again is not struct
    assert (again.__name__, again.__qualname__, again.__module__) == (struct.__name__, struct.__qualname__, __name__)
    assert [field.name for field in msgspec.structs.fields(again)] == [
        field.name for field in msgspec.structs.fields(struct)
    ]
    assert msgspec.json.schema(again) == msgspec.json.schema(struct)


def test_defaults_are_kept_and_not_shared() -> None:
    again = remade(Plain)

    first, second = again(3), again(4, "text")
    first.numbers.append(1)

    assert (first.text, second.text, second.numbers) == ("none", "text", [])


def test_methods_and_options_are_kept() -> None:
    again = remade(Strict)

    value = msgspec.json.decode(b'{"type": "strict", "firstNumber": 2, "secondNumber": 3}', type=again)

    assert (value.total(), value.doubled, again.of(5).total()) == (5, 10, 6)
    with pytest.raises(AttributeError, match="immutable"):
        value.first_number = 3
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"type": "strict", "secondNumber": 3, "third": 3}', type=again)


def test_bases_are_remade_once() -> None:
    derived, plain = remade((Derived, Plain))

    assert issubclass(derived, plain)
    assert derived(1, more=plain(2)).more.number == 2


def test_what_can_be_imported_is_not_remade() -> None:
    assert remade(msgspec.structs.FieldInfo) is msgspec.structs.FieldInfo


def test_a_killed_process_leaves_its_private_folder_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "from weir.workers.source import private_folder; print((made := private_folder()).path); input()"
    with subprocess.Popen(
        [sys.executable, "-uc", program],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        (left / "file").touch()
        first = private_folder()  # the other process lives
        assert left.is_dir()
        owner.kill()
    second = private_folder()
    assert {str(each) for each in tmp_path.iterdir()} == {first.path, second.path}
    first.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []
