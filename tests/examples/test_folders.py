"""The examples that have a folder of their own do what their pages say, from that folder, by real commands."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.documentation.pages import ROOT
from tests.served import CLEAN, Served, serving
from tests.text_models import tiny

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    """Give a copy of an example's folder to work in."""
    return lambda name: Path(shutil.copytree(ROOT / "examples" / name, tmp_path / name))


def run(folder: Path, *command: str) -> str:
    environment = {**CLEAN, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), CLEAN.get("PYTHONPATH", "")])}
    words = [sys.executable, *command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_shapes_names_what_is_on_pictures(copy: Callable[[str], Path]) -> None:
    folder = copy("shapes")
    assert "100% of 1,000 new pictures" in run(folder, "train.py") or "99%" in run(folder, "train.py")
    with serving(f"{folder}/classifier.py:Shapes", "--param", f"file={folder}/shapes.onnx") as (_, client):
        for name in ("circle", "square", "triangle"):
            picture = (folder / f"{name}.png").read_bytes()
            answer = client.post("/infer/shapes", content=picture, headers={"Content-Type": "image/png"}).json()
            assert answer["shape"] == name and answer["score"] > 0.8
        refused = client.post("/infer/shapes", content=b"nonsense", headers={"Content-Type": "image/png"})
        assert refused.status_code == 400 and "the body is no picture" in refused.text


def test_story_streams_word_by_word(copy: Callable[[str], Path]) -> None:
    with serving(f"{copy('story')}/story.py:Story") as (_, client):
        words = []
        with client.stream("POST", "/infer/story", json={"text": "The miller", "words": 12, "seed": 3}) as answer:
            words = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert len(words) == 12 and words[0].strip('"') in {"was", "went", "laughed", "heard", "and"}
        again = client.post("/infer/story", json={"text": "The miller", "words": 12, "seed": 3})
        assert [line[6:] for line in again.text.splitlines() if line.startswith("data: ")] == words


def test_rag_finds_with_two_models(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("rag")
    tiny.sentence_model(tmp_path / "finder", "bert")
    tiny.model(tmp_path / "ranker", "bert", labels=1)
    models = [tmp_path / "finder", tmp_path / "ranker"]
    with Served(*models, "--no-calibrate", "--cache", tmp_path / "cache", command="embed serve") as server:
        server.until_listening().until_logged("\\bready\\b")
        (folder / "few.txt").write_text("first do it\na weir holds the water back\nit\n")
        printed = run(folder, "search.py", "who reads this", "--url", server.url, "--file", "few.txt").splitlines()
    scores = [float(line.split()[0]) for line in printed]
    assert len(printed) == 3 and scores == sorted(scores, reverse=True)
    assert {line.split(maxsplit=1)[1] for line in printed} == {"first do it", "a weir holds the water back", "it"}


@pytest.mark.sklearn
def test_iris_serves_the_file_that_it_trained(copy: Callable[[str], Path]) -> None:
    folder = copy("iris")
    assert "iris.skops" in run(folder, "train.py")
    with serving(folder / "iris.skops") as (_, client):
        assert client.post("/infer/iris", json=[5.1, 3.5, 1.4, 0.2]).json() == 0
        assert client.post("/infer/iris", json=[6.3, 3.3, 6.0, 2.5]).json() == 2


@pytest.mark.torch
def test_pipeline_judges_texts(copy: Callable[[str], Path], tmp_path: Path) -> None:
    tiny.model(tmp_path / "judge", "bert", labels=2, id2label={"0": "NEGATIVE", "1": "POSITIVE"})
    with serving(f"{copy('pipeline')}/app.py:Sentiment", "--param", f"model={tmp_path}/judge") as (_, client):
        answer = client.post("/infer/sentiment", json="first do it").json()
        assert answer["label"] in ("NEGATIVE", "POSITIVE") and 0.5 <= answer["score"] <= 1
        assert client.post("/infer/sentiment", json=" ").status_code == 400
