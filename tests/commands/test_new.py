"""`weir new` writes a project whose own test passes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.documentation.pages import ROOT
from tests.served import CLEAN, weir_here

from weir.commands.new import ProjectKind, files_of


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "template",
    [
        ProjectKind.PLAIN,
        ProjectKind.STREAM,
        ProjectKind.ONNX,
        pytest.param(ProjectKind.SKLEARN, marks=pytest.mark.sklearn),
        pytest.param(ProjectKind.TORCH, marks=pytest.mark.torch),
    ],
)
def test_the_test_of_a_new_project_passes(template: ProjectKind, tmp_path: Path) -> None:
    done = weir_here("new", "my-model", "--template", template, cwd=tmp_path)
    assert done.returncode == 0, done
    shown = [line.strip() for line in done.stdout.splitlines()]
    assert (shown[2], shown[3], shown[-1]) == ("next:", "cd my-model", "weir serve --config weir.toml")
    folder = tmp_path / "my-model"
    assert sorted(file.name for file in folder.iterdir()) == sorted(files_of(template, "my-model"))

    environment = {**CLEAN, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), CLEAN.get("PYTHONPATH", "")])}
    for line in shown[5:-1]:  # all but `pip install`, which this environment has done
        words = line.split()
        command = [sys.executable, *(words[1:] if words[0] == "python" else ["-m", words[0], "-q", "-p", "no:cacheprovider"])]  # fmt: skip
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("template", ProjectKind)
def test_each_file_is_complete(template: ProjectKind) -> None:
    for name, text in files_of(template, "some").items():
        assert "{name}" not in text and "{make}" not in text and "{{" not in text, name
        assert text.endswith("\n")
        if name.endswith(".py"):
            compile(text, name, "exec")
    dockerfile = files_of(template, "some")["Dockerfile"]
    assert ("RUN python " in dockerfile) == (template in (ProjectKind.SKLEARN, ProjectKind.ONNX))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model.py").write_text("mine")
    done = weir_here("new", "here", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2, f"weir: NAME 'here': {tmp_path}/here is there already; must be a new or an empty folder\n",
    )  # fmt: skip
    assert (tmp_path / "here" / "model.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["../out", "a/b", ".hidden", "a b", ""])
def test_a_name_is_that_of_a_model(name: str, tmp_path: Path) -> None:
    done = weir_here("new", name, cwd=tmp_path)
    assert done.returncode == 2 and "must be of up to 255 letters, digits and" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_template_names_those_that_there_are(tmp_path: Path) -> None:
    done = weir_here("new", "some", "--template", "keras", cwd=tmp_path)
    assert done.returncode == 2
    assert all(each in done.stderr for each in ("keras", "plain", "sklearn", "torch", "onnx", "hf", "stream"))
