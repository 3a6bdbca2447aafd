"""`weir new` writes a project whose own test passes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.documentation.pages import ROOT
from tests.rings import subcases
from tests.served import CLEAN, weir_here

from weir.commands.new import CPU_INDEX, IMAGE, REPOSITORY, ProjectKind, files_of


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


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model.py").write_text("mine")
    done = weir_here("new", "here", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2, f"weir: NAME 'here': {tmp_path}/here exists; must be a new or empty directory\n",
    )  # fmt: skip
    assert (tmp_path / "here" / "model.py").read_text() == "mine"


@subcases("template", ProjectKind)
def test_the_files_of_each_template(template: ProjectKind) -> None:
    files = files_of(template, "some")
    for name, text in files.items():
        assert "{name}" not in text and "{make}" not in text and "{{" not in text, name
        assert text.endswith("\n") and "file:" not in text and str(ROOT) not in text
        if name.endswith(".py"):
            compile(text, name, "exec")
    found = re.findall(r'^# Without Weir: pip install "(.+) @ git\+(.+)"\n(.+)$', files["requirements.txt"], re.M)
    assert found == [(found[0][2], REPOSITORY, found[0][2])]
    on_cpu = template in (ProjectKind.TORCH, ProjectKind.HF)  # they install torch for the CPU, and say so
    for file in ("requirements.txt", "Dockerfile", "README.md"):
        assert (CPU_INDEX in files[file], "CUDA" in files[file]) == (on_cpu, on_cpu)
    # The Dockerfile relies on the entry point, user and variables of the image that Weir's own builds.
    own = (ROOT / "Dockerfile").read_text()
    assert f"docker build -t {IMAGE} ." in own.splitlines()[0]
    last = own.split("\nFROM ")[-1]
    assert last.startswith("base\n") and 'ENTRYPOINT ["weir", "serve"]' in last
    assert "WEIR_HOST=0.0.0.0" in own and "USER weir" in own
    assert ("RUN python " in files["Dockerfile"]) == (template in (ProjectKind.SKLEARN, ProjectKind.ONNX))
    lines = [line for line in files["Dockerfile"].splitlines() if not line.startswith("#")]
    assert (lines[0], lines[-2:]) == (f"FROM {IMAGE}", ["USER weir", 'CMD ["--config", "weir.toml"]'])


@subcases(
    ("words", "said"),
    [
        *[([name], "up to 255 letters, digits and") for name in ("../out", "a/b", ".hidden", "a b", "")],
        (["some", "--template", "keras"], "weir: --template='keras': must be one of 'plain', 'sklearn', "),
    ],
)
def test_a_wrong_name_or_template_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    done = weir_here("new", *words, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr
    assert list(tmp_path.iterdir()) == []
