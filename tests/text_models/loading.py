"""Loads a model by its id, for the tests of the hub: `python -m tests.text_models.loading PROGRAM TARGET ...`."""

import json
import logging
import resource
import sys
import urllib.request
from collections.abc import Callable
from functools import partial
from importlib import reload

import weir.embedding
from weir.errors import SettingsError
from weir.text_models import ComputingSettings
from weir.text_models.checkpoint import hub
from weir.text_models.checkpoint.hub import check_id, local_directory
from weir.text_models.checkpoint.onnx_files import wanted_names
from weir.text_models.checkpoint.reading import read_checkpoint
from weir.text_models.model import TextEncoder

MOST_OF_A_FILE = 11 << 20  # bytes that `load_beyond_the_limit` can write


def load(target: str, pickle: str = "") -> str:
    """Read the model's files, and return the directory that has them."""
    directory = local_directory(target, allow_pickle=bool(pickle))
    read_checkpoint(directory, allow_pickle=bool(pickle)).tokenizer()
    return str(directory)


def load_beyond_the_limit(target: str) -> str:
    """Read the model's files where no file may be as large as one of them."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_OF_A_FILE, MOST_OF_A_FILE))
    return load(target)


def load_onnx(target: str, dtype: str | None = None) -> str:
    """Load the model's ONNX file, and return the directory that has it."""
    directory = local_directory(target, onnx=partial(wanted_names, "onnx", dtype))
    TextEncoder(directory, computing=ComputingSettings(runtime="onnx-file", dtype=dtype)).load_shared()
    return str(directory)


def serve(target: str) -> int:
    """Serve the model, and return how many numbers its vectors have."""
    with weir.embedding.serve(target, port=0, calibrate=False, workers=1) as server:
        body = json.dumps({"model": "small", "input": ["do it"]}).encode()
        request = urllib.request.Request(server.url + "/v1/embeddings", body, {"Content-Type": "application/json"})
        return len(json.load(urllib.request.urlopen(request))["data"][0]["embedding"])


def log(target: str) -> None:
    """Have the library of the hub log something."""
    logging.basicConfig(format="server: %(message)s")
    hub._library(hub.ModelId(target)).hf_hub_download  # noqa: B018 - it is imported when it is used
    logging.getLogger("huggingface_hub.file_download").warning("slow today")


PROGRAMS: dict[str, Callable[..., object]] = {
    "load": load,
    "load_beyond_the_limit": load_beyond_the_limit,
    "load_onnx": load_onnx,
    "check_id": check_id,
    "serve": serve,
    "log": log,
}

if __name__ == "__main__":
    from huggingface_hub import constants, hf_api

    reload(constants)  # the process that this one is forked from has loaded it, with other variables
    hf_api.api.endpoint = constants.ENDPOINT
    program, *words = sys.argv[1:]
    try:
        print(PROGRAMS[program](*words))
    except SettingsError as error:
        sys.exit(str(error))
