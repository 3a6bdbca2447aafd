"""What a TARGET may be besides a class in Python code."""

import sys
from pathlib import Path

import numpy as np
import pytest
from tests.catalog.repository.graphs import double
from tests.served import serving, weir_here

from weir import SettingsError
from weir.catalog.sources import (
    ModelToServe,
    Trust,
    default_name,
    located,
    model_to_load,
    platform_of_target,
    task_and_model,
)
from weir.inprocess import InProcess


@pytest.mark.parametrize(
    ("target", "platform", "name"),
    [
        ("square:Square", "python", "square"), ("dir/a.py:Outer.Inner", "python", "inner"),
        ("models/digits.onnx", "onnx", "digits"), ("iris.v2.skops", "sklearn", "iris.v2"), ("a.JOBLIB", "sklearn", "a"),
        ("a.pkl", "sklearn", "a"), ("a.pickle", "sklearn", "a"), ("hf:ner=dslim/bert-base-NER", "transformers", "ner"),
    ],
)  # fmt: skip
def test_the_form_of_a_target_says_what_reads_it_and_what_it_is_called(target: str, platform: str, name: str) -> None:
    assert (platform_of_target(target), default_name(target)) == (platform, name)


def test_a_task_has_a_model() -> None:
    assert task_and_model("hf:ner=some/model=2") == ("ner", "some/model=2")
    for target in ("hf:", "hf:ner", "hf:ner=", "hf:=model"):
        with pytest.raises(SettingsError, match=r"must be hf:TASK=MODEL, such as hf:text-classification=distilbert/"):
            task_and_model(target)


def test_a_file_is_found_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=rf"TARGET 'a\.onnx': no file {tmp_path}/a\.onnx"):
        model_to_load("a.onnx")
    Path("a.onnx").write_bytes(b"")
    found = model_to_load("a.onnx", Trust(pickles=True))
    assert found is not None
    assert (found.target, found.folder, found.platform, found.trust.pickles) == ("a.onnx", tmp_path, "onnx", True)
    assert located(found) == found  # what has a folder stays as it is
    code = ModelToServe("square:Square", "square", {}, [], {})
    assert located(code) == code and model_to_load("square:Square") is None


def test_a_file_without_the_name_of_a_class_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "square.py").write_text("")
    (tmp_path / "twice.py").write_text("class Other: ...\nclass Twice:\n    def predict(self, batch): ...\n")
    (tmp_path / "models").mkdir()
    for command, target, hint in (
        ("check", "square.py", "name the class or function in it: square.py:NAME"),
        ("check", "twice.py", "; did you mean twice.py:Twice?"),
        ("check", "twice", "; did you mean twice:Twice?"),
        ("check", "models", "has no model to check; each folder in it is one (see weir serve --help)"),
        ("profile", "models", "a folder of models is served whole: weir serve models"),
    ):
        done = weir_here(command, target, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.strip().endswith(hint), done.stderr


def test_an_onnx_file_is_served_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "twice.onnx").write_bytes(double("n", 3))
    with serving(tmp_path / "twice.onnx", "--workers", "1", "--param", "intra_op=1") as (_, client):
        answer = client.post("/infer/twice", json={"x": [[1.0, 2.0, 3.0]]})
        assert (answer.status_code, answer.json()) == (200, {"y": [[2.0, 4.0, 6.0]]})
        assert client.get("/v2/models/twice").json()["platform"] == "onnx"
    with InProcess(str(tmp_path / "twice.onnx"), executor="thread", params={"intra_op": 1}) as client:
        np.testing.assert_array_equal(client.infer("twice", {"x": np.ones((1, 3), np.float32)})["y"], [[2.0, 2.0, 2.0]])


@pytest.mark.parametrize(
    ("file", "flags", "message"),
    [
        ("a.pkl", [], "a: a.pkl: loading a pickle file can run arbitrary code; if you trust it, set --allow-pickle; or save it with skops.io.dump(estimator, 'a.skops')"),
        ("a.skops", [], "a: platform sklearn: scikit-learn is not installed; add Weir's extra 'sklearn': pip install 'weir-serving[sklearn]'"),
        ("a.pkl", ["--allow-pickle"], "a: platform sklearn: scikit-learn is not installed; add Weir's extra 'sklearn': pip install 'weir-serving[sklearn]'"),
    ],
)  # fmt: skip
def test_what_a_file_needs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, flags: list[str], message: str
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as where it is not installed
    (tmp_path / file).write_bytes(b"")
    done = weir_here("check", file, *flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"weir: {message}\n")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("hf:ner=./no-model", "ner: hf:ner=./no-model: no folder {cwd}/no-model"),
        ("hf:ner=some/model", "ner: platform transformers: torch is not installed; add Weir's extra 'transformers': pip install 'weir-serving[transformers]'"),
        ("hf:summarization=a/b", "summarization: hf:summarization: must be one of text-classification, "),
    ],
)  # fmt: skip
def test_what_a_task_needs_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = weir_here("check", target, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("weir: " + message.format(cwd=tmp_path)), done.stderr
