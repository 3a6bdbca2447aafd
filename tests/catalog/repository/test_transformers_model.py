"""What a pipeline's model accepts, without the pipeline."""

import subprocess
import sys
from typing import Any

import pytest

from weir.catalog.repository.transformers_model import TransformersModel
from weir.errors import InvalidRequest


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
