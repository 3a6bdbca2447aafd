"""Folders with model-settings.json are served; those with a runtime need MLServer (`make test-adapters`)."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weir
from weir.client import HttpClient

ROWS = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
SUMS = {"name": "sum", "datatype": "FP32", "shape": [-1]}

# As in MLServer's example of a custom runtime: codecs for the request and the response.
CUSTOM = """
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.errors import InferenceError
from mlserver.types import InferenceRequest, InferenceResponse

from neighbour import OFFSET


class Sums(MLModel):
    async def load(self):
        self.bonus = self.settings.parameters.extra["bonus"]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        x = NumpyCodec.decode_input(payload.inputs[0])
        if (x < 0).any():
            raise InferenceError("negative numbers")
        total = x.sum(axis=1) + OFFSET + self.bonus
        texts = [f"{each:g}" for each in total]
        return InferenceResponse(
            model_name=self.name,
            outputs=[NumpyCodec.encode_output("sum", total), StringCodec.encode_output("text", texts)],
        )
"""


def write(root: Path, called: str, **settings: Any) -> Path:
    folder = root / called
    folder.mkdir(parents=True)
    given = {"name": called, "implementation": "runtime.Sums", "inputs": [ROWS], "outputs": [SUMS], **settings}
    (folder / "model-settings.json").write_text(
        json.dumps({key: each for key, each in given.items() if each is not None})
    )
    return folder


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"inputs": None}, "wrong/model-settings.json: inputs: must be declared, with name, datatype and shape"),
        ({"outputs": [{"name": "y"}]}, "outputs: {'name': 'y'}: must have name, datatype and shape"),
        ({"outputs": [{**SUMS, "shape": [-1, "n"]}]}, "must be a list of whole numbers"),
        ({"implementation": None}, "implementation: must name a class, such as mlserver_sklearn.SKLearnModel"),
        ({"name": "other"}, "name='other': must be the name of the folder, 'wrong'"),
        ({"parameters": {"uri": "./model.joblib"}}, "uri='./model.joblib': loading a pickled file can run any code: --allow-pickle"),
        ({"max_batch_size": -1}, "max_batch_size=-1, max_batch_time=0.0: must be numbers from 0 on"),
        ({"max_batch_size": "4"}, "must be numbers from 0 on"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_said_before_it_starts(settings: Any, why: str, tmp_path: Path) -> None:
    write(tmp_path, "wrong", **settings)
    with pytest.raises(weir.SettingsError) as raised:
        weir.running(model_repository=str(tmp_path)).start()
    assert why in raised.value.message


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (write(tmp_path, "wrong") / "model-settings.json").write_text("{")
    with pytest.raises(weir.SettingsError, match=r"wrong/model-settings.json: must be JSON"):
        weir.running(model_repository=str(tmp_path)).start()


@pytest.mark.skipif(find_spec("mlserver") is not None, reason="MLServer is installed")
def test_without_mlserver_the_error_says_what_to_install(tmp_path: Path) -> None:
    write(tmp_path, "sums")
    with pytest.raises(weir.SettingsError, match="MLServer is not installed"):
        weir.running(model_repository=str(tmp_path)).start()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    import joblib
    from sklearn.svm import SVC

    root = tmp_path_factory.mktemp("mlserver")
    text = {"name": "text", "datatype": "BYTES", "shape": [-1]}
    folder = write(
        root, "sums", outputs=[SUMS, text], parameters={"extra": {"bonus": 100}}, max_batch_size=8, max_batch_time=0.01
    )
    (folder / "runtime.py").write_text(CUSTOM)
    (folder / "neighbour.py").write_text("OFFSET = 1000\n")
    folder = write(
        root, "svm", implementation="mlserver_sklearn.SKLearnModel",
        parameters={"uri": "./model.joblib", "version": "v0.1.0"},
        outputs=[{"name": "predict", "datatype": "INT64", "shape": [-1]}],
    )  # fmt: skip
    joblib.dump(SVC().fit([[0, 0], [5, 5]], [3, 7]), folder / "model.joblib")
    with weir.running(model_repository=str(root), allow_pickle=True, workers=1) as server:
        yield server.address


@pytest.mark.adapters
@pytest.mark.filterwarnings("ignore")
def test_a_runtime_of_the_user(address: str) -> None:
    with HttpClient(address) as client:
        answer = client.infer("sums", {"x": np.array([[1, 2], [3, 4]], np.float32)})
        assert answer["sum"].tolist() == [1103, 1107] and answer["text"].tolist() == [b"1103", b"1107"]
        with pytest.raises(weir.InvalidRequest, match="negative numbers"):
            client.infer("sums", {"x": np.array([[-1, 2]], np.float32)})


@pytest.mark.adapters
@pytest.mark.filterwarnings("ignore")
def test_its_runtime_of_scikit_learn(address: str) -> None:
    with HttpClient(address) as client:
        answer = client.infer("svm", {"x": np.array([[0, 1], [4, 5]], np.float32)}, version="v0.1.0")
        assert answer["predict"].tolist() == [3, 7]
