"""Tasks of Hugging Face are served, by models of random weights in folders. `make test-torch` runs these."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.tasks import write_tasks
from tests.documentation.pages import ROOT
from tests.served import CLEAN, serving, weir_here

from weir.catalog.repository.transformers_model import TransformersModel
from weir.errors import InvalidRequest, ModelError, SettingsError
from weir.inprocess import InProcess

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model for each task."""
    at = tmp_path_factory.mktemp("tasks")
    write_tasks(at)
    return at


def test_a_task_is_served_from_a_folder(folder: Path) -> None:
    target = f"hf:text-classification={folder}/text-classification"
    with serving(target, "--workers", "1", "--name", "mood") as (_, client):
        one, other = (client.post("/infer/mood", json=text).json() for text in ("a good film", {"text": "it"}))
        assert {one["label"], other["label"]} <= {"+", "-"} and 0 < one["score"] < 1
        wrong = client.post("/infer/mood", json=7)
        assert wrong.status_code == 400 and "an item must be a text, or an object with the key" in wrong.text


@pytest.mark.timeout(240)
def test_the_test_of_a_new_project_passes(folder: Path, tmp_path: Path) -> None:
    done = weir_here("new", "mood", "--template", "hf", cwd=tmp_path)
    assert done.returncode == 0, done
    settings = tmp_path / "mood" / "weir.toml"
    model = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"  # which the hub has, and this test has not
    settings.write_text(settings.read_text().replace(model, f"{folder}/text-classification"))
    environment = {**CLEAN, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), CLEAN.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(command, cwd=tmp_path / "mood", env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("task", "text", "key", "options"),
    [
        ("ner", "a good film", "entity", None),
        ("fill-mask", "a [MASK] film", "token_str", {"top_k": 2}),
        ("text-generation", "once upon", "generated_text", {"max_new_tokens": 2}),
    ],
)
def test_each_task_answers_as_its_pipeline_does(
    folder: Path, task: str, text: str, key: str, options: dict[str, Any] | None
) -> None:
    settings: dict[str, Any] = {"executor": "thread", "params": {"options": options}}
    with InProcess(f"hf:{task}={folder}/{task}", **settings) as client:
        answer = client.infer(task, text)
    assert answer and all(key in each for each in answer), answer


def test_only_the_text_without_a_mask_fails(folder: Path) -> None:
    with InProcess(f"hf:fill-mask={folder}/fill-mask", executor="thread") as client:
        with pytest.raises(ModelError, match="mask"):
            client.infer("fill-mask", "a film")
        assert len(client.infer("fill-mask", "a [MASK]")) == 5
        with pytest.raises(InvalidRequest):
            client.infer("fill-mask", ["a"])


def test_the_log_says_what_a_worker_computes_on(folder: Path) -> None:
    device = "cuda:0" if torch_gpus() else "cpu"
    with serving(f"hf:ner={folder}/ner", "--workers", "1") as (served, client):
        assert client.post("/infer/ner", json="a good film").status_code == 200
        served.until_logged(f"worker 0 computes on {device}")
    rule = r"device='cuda:99': torch sees \d+ GPUs here; must be auto, cpu or one of them"
    with pytest.raises(SettingsError, match=rule):
        InProcess(f"hf:ner={folder}/ner", executor="thread", params={"device": "cuda:99"}).start()


def torch_gpus() -> int:
    import torch

    return int(torch.cuda.device_count())


def test_wrong_parameters_are_refused(folder: Path) -> None:
    with (
        pytest.raises(SettingsError, match=r"options=3: must be an object of arguments by name"),
        InProcess(f"hf:ner={folder}/ner", executor="thread", params={"options": 3}),
    ):
        pass
    with pytest.raises(SettingsError, match="got an unexpected keyword argument"):
        InProcess(f"hf:ner={folder}/ner", params={"wrong": 3})


# What a pipeline's model accepts, without the pipeline.


@pytest.mark.parametrize("item", ["it", {"text": "it"}, {"inputs": "it"}, {"inputs": "it", "parameters": {}}])
def test_an_item_may_have_the_form_of_hugging_faces_own_services(item: Any) -> None:
    assert TransformersModel().preprocess(item) == "it"


@pytest.mark.parametrize(
    ("item", "hint"),
    [
        (7, 'the key "text" or "inputs": it is 7'),
        ({"inputs": ["a", "b"]}, "POST several to /infer/NAME/batch"),
        ({"inputs": "it", "parameters": {"top_k": 2}}, "parameters: must be empty"),
    ],
)
def test_another_item_is_refused_with_the_way_out(item: Any, hint: str) -> None:
    with pytest.raises(InvalidRequest, match=hint):
        TransformersModel().preprocess(item)


LOGGED = """
import logging, sys, types
from weir.catalog.repository.transformers_model import TransformersModel

def pipeline(*_, **__):
    from huggingface_hub import hf_hub_download

    logging.getLogger("huggingface_hub.file_download").warning("slow today")

sys.modules["transformers"] = types.SimpleNamespace(pipeline=pipeline)
logging.basicConfig(format="worker: %(message)s")
model = TransformersModel(device="cpu")
model.torch_device = lambda device: device
model.load()
"""


def test_what_the_hubs_library_logs_comes_once() -> None:
    done = subprocess.run([sys.executable, "-c", LOGGED], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["worker: slow today"]
