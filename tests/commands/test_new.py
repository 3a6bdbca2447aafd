"""`weir new` writes a project whose own test passes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.documentation.pages import ROOT
from tests.served import CLEAN, weir_here

import weir.commands.new
from weir.commands.new import IMAGE, ProjectKind, files_of


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
        2, f"weir: NAME 'here': {tmp_path}/here exists; must be a new or empty directory\n",
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


def installed_from(noted: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noted:
        def read_text(self, file: str) -> str | None:
            assert file == "direct_url.json"
            return json.dumps(noted) if noted else None

    monkeypatch.setattr(weir.commands.new, "distribution", lambda name: Noted())


@pytest.mark.parametrize(
    ("noted", "requirement", "checkout"),
    [
        (None, "weir-serving[client]", "weir"),
        ({"url": "file:///tmp/weir%201", "dir_info": {}}, "weir-serving[client] @ file:///tmp/weir%201", "'/tmp/weir 1'"),
        (
            {"url": "file:///tmp/weir-1-py3-none-any.whl", "archive_info": {}},
            "weir-serving[client] @ file:///tmp/weir-1-py3-none-any.whl", "weir",
        ),
        (
            {"url": "https://example.org/weir", "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "main"}},
            "weir-serving[client] @ git+https://example.org/weir@abc", "weir",
        ),
    ],
    ids=["index", "folder", "wheel", "repository"],
)  # fmt: skip
def test_a_project_installs_weir_from_where_it_was_installed(
    noted: object, requirement: str, checkout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(noted, monkeypatch)
    files = files_of(ProjectKind.PLAIN, "some")
    assert files["requirements.txt"] == f"{requirement}\npytest\n"
    assert files["Dockerfile"].startswith(f"# docker build -t weir {checkout}  #")
    assert f"\ndocker build -t weir {checkout}  #" in files["README.md"]


def test_what_a_project_requires_is_there() -> None:
    """This environment's Weir comes from a checkout, a wheel or an index."""
    requirement = files_of(ProjectKind.SKLEARN, "some")["requirements.txt"].splitlines()[0]
    name, _, url = requirement.partition(" @ ")
    assert name == "weir-serving[client,sklearn]"
    assert not url.startswith("file:") or Path(unquote(urlsplit(url).path)).exists()


@pytest.mark.parametrize("template", ProjectKind)
def test_the_dockerfile_starts_from_the_image_that_weirs_own_builds(template: ProjectKind) -> None:
    """It relies on that image's entry point, user and variables."""
    own = (ROOT / "Dockerfile").read_text()
    assert f"docker build -t {IMAGE} ." in own.splitlines()[0]
    last = own.split("\nFROM ")[-1]
    assert last.startswith("base\n") and 'ENTRYPOINT ["weir", "serve"]' in last
    assert "WEIR_HOST=0.0.0.0" in own and "USER weir" in own
    lines = [line for line in files_of(template, "some")["Dockerfile"].splitlines() if not line.startswith("#")]
    assert (lines[0], lines[-2:]) == (f"FROM {IMAGE}", ["USER weir", 'CMD ["--config", "weir.toml"]'])
    assert not any("file:" in line for line in lines)  # a container has no such folder
