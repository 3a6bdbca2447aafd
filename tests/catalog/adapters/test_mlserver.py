"""Folders with model-settings.json are served; those with a runtime need MLServer (`make test-adapters`)."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.catalog.tasks import write_tasks

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


# As in MLServer's example of JSON: the shape of the answer counts its bytes.
ECHO = """
import json
from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceResponse, Parameters, ResponseOutput


class Echo(MLModel):
    async def predict(self, payload):
        text = {each.name: json.loads("".join(self.decode(each, default_codec=StringCodec))) for each in payload.inputs}
        wanted = [each.name for each in payload.outputs or []]
        given = payload.parameters and payload.parameters.model_dump(exclude_none=True)
        written = json.dumps([text, payload.id, wanted, given]).encode()
        output = ResponseOutput(
            name="echo", shape=[len(written)], datatype="BYTES", data=[written], parameters=Parameters(content_type="str")
        )
        return InferenceResponse(id=payload.id, model_name=self.name, outputs=[output])
"""


def write(root: Path, called: str, **settings: Any) -> Path:
    folder = root / called
    folder.mkdir(parents=True)
    given = {"name": called, "implementation": "runtime.Sums", "inputs": [ROWS], "outputs": [SUMS], **settings}
    stated = {key: each for key, each in given.items() if each is not None}
    (folder / "model-settings.json").write_text(json.dumps(stated))
    return folder


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"outputs": [{"name": "y"}]}, "outputs: {'name': 'y'}: must have name, datatype and shape"),
        ({"outputs": [{**SUMS, "shape": [-1, "n"]}]}, "must be a list of whole numbers"),
        ({"implementation": None}, "implementation: must name a class, such as mlserver_sklearn.SKLearnModel"),
        ({"name": "no name"}, "name='no name': must be unique and a valid model name"),
        ({"parameters": {"uri": "./model.joblib"}}, "uri='./model.joblib': loading a pickle file can run arbitrary code; if you trust it, set --allow-pickle"),
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


def with_mlserver(test: Any) -> Any:
    """Run a test where MLServer is, whose warnings are its own."""
    return pytest.mark.adapters(pytest.mark.filterwarnings("ignore")(test))


ROWS_OF_TREES = np.array([[0, 1], [1, 0], [4, 5], [5, 4]] * 5, np.float32)


def train_trees(root: Path) -> None:
    """Write a model of XGBoost and one of LightGBM, as in MLServer's examples: nothing is declared."""
    import lightgbm
    import xgboost

    labels = ROWS_OF_TREES[:, 0] > 2
    options = {"objective": "binary", "min_data_in_leaf": 1, "num_threads": 1, "verbose": -1}
    data = lightgbm.Dataset(ROWS_OF_TREES, labels, params=options)
    for called, implementation, file, trained in (
        ("xgboost", "XGBoostModel", "mushroom.json", xgboost.XGBClassifier(n_estimators=4, n_jobs=1).fit(ROWS_OF_TREES, labels)),
        ("lightgbm", "LightGBMModel", "iris.bst", lightgbm.train(options, data, 4)),
    ):  # fmt: skip
        named = {"implementation": f"mlserver_{called}.{implementation}", "parameters": {"uri": f"./{file}"}}
        folder = write(root, called, **named, inputs=None, outputs=None)
        trained.save_model(folder / file)


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
    # As in MLServer's own examples: nothing is declared.
    folder = write(
        root, "mnist", name="mnist-svm", implementation="mlserver_sklearn.SKLearnModel", parameters={"uri": "./model.joblib"},
        inputs=None, outputs=None, max_batch_size=8, max_batch_time=0.02,
    )  # fmt: skip
    joblib.dump(SVC().fit([[0, 0], [5, 5]], [3, 7]), folder / "model.joblib")
    folder = write(root, "echo", implementation="jsonmodels.Echo", inputs=None, outputs=None)
    (folder / "jsonmodels.py").write_text(ECHO)
    train_trees(root)
    with weir.running(model_repository=str(root), allow_pickle=True, workers=1) as server:
        yield server.address


@pytest.fixture
def client(address: str) -> Iterator[HttpClient]:
    with HttpClient(address) as client:
        yield client


@with_mlserver
def test_a_runtime_of_the_user(client: HttpClient) -> None:
    answer = client.infer("sums", {"x": np.array([[1, 2], [3, 4]], np.float32)})
    assert answer["sum"].tolist() == [1103, 1107] and answer["text"].tolist() == [b"1103", b"1107"]
    with pytest.raises(weir.InvalidRequest, match="negative numbers"):
        client.infer("sums", {"x": np.array([[-1, 2]], np.float32)})


@with_mlserver
def test_its_runtime_of_scikit_learn(client: HttpClient) -> None:
    answer = client.infer("svm", {"x": np.array([[0, 1], [4, 5]], np.float32)}, version="v0.1.0")
    assert answer["predict"].tolist() == [3, 7]


@with_mlserver
@pytest.mark.parametrize("called", ["xgboost", "lightgbm"])
def test_its_runtimes_of_trees(client: HttpClient, called: str) -> None:
    answer = client.infer(called, {"predict": ROWS_OF_TREES[:4]})["predict"]
    assert (answer.ravel() > 0.5).tolist() == [False, False, True, True]
    with pytest.raises(weir.WeirError):
        client.infer(called, {"predict": np.zeros((1, 3), np.float32)})


@with_mlserver
def test_settings_without_tensors_take_what_the_runtime_takes(client: HttpClient) -> None:
    rows = [np.array([[0, 1], [4, 5]], np.float32), np.array([[5, 4]], np.float32)] * 6
    answers = client.infer_ordered("mnist-svm", [{"predict": each} for each in rows], at_once=12)
    assert [each["predict"].tolist() for each in answers] == [[[3], [7]], [[7]]] * 6
    with pytest.raises(weir.WeirError, match="2 features"):
        client.infer("mnist-svm", {"predict": np.zeros((1, 3), np.float32)})
    metadata = client.model_metadata("mnist-svm")
    assert (metadata["inputs"], metadata["outputs"]) == ([], [])


@with_mlserver
def test_the_whole_request_and_response_pass_a_runtime(address: str) -> None:
    body = {
        "id": "r1", "parameters": {"colour": "red", "timeout": 9_000_000}, "outputs": [{"name": "echo"}],
        "inputs": [{"name": "q", "datatype": "BYTES", "shape": [1], "data": ['{"a": 1}'], "parameters": {"content_type": "str"}}],
    }  # fmt: skip
    with httpx.Client(base_url=address) as client:
        answer = client.post("/v2/models/echo/infer", json=body).json()
        (output,) = answer["outputs"]
        assert (answer["id"], output["parameters"], output["shape"]) == ("r1", {"content_type": "str"}, [1])
        text, given, wanted, parameters = json.loads(output["data"][0])
        assert (text, given, wanted, parameters["colour"]) == ({"q": {"a": 1}}, "r1", ["echo"], "red")
        refused = client.post("/infer/echo", json={"q": 1})
        assert refused.status_code == 501 and "/v2/models/echo/infer only" in refused.text


# Settings of MLServer's runtime of Hugging Face are served without its package; `make test-torch` runs the tests that answer.


RUNTIME = "mlserver_huggingface.HuggingFaceRuntime"


def write_pipeline(root: Path, called: str, *, runtime: str = RUNTIME, parameters: Any = None, **more: Any) -> None:
    folder = root / called
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"name": called, "implementation": runtime, "parameters": parameters or {"extra": more.pop("extra", {})}}
    (folder / "model-settings.json").write_text(json.dumps({**settings, **more}))


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({}, "wrong: parameters.extra: task=None: must be one of text-classification, "),
        ({"task": "image-classification"}, "for others, install the package mlserver-huggingface"),
        ({"task": "ner", "framework": "tf"}, "framework='tf': must be pt"),
        ({"task": "ner", "optimum_model": True}, "optimum is not installed (pip install 'optimum[onnxruntime]')"),
        (["ner"], "parameters.extra=['ner']: must be an object"),
    ],
)
def test_pipelines_that_cannot_be_served_are_refused(extra: Any, why: str, tmp_path: Path) -> None:
    write_pipeline(tmp_path, "wrong", extra=extra)
    with pytest.raises(weir.SettingsError) as raised:
        weir.running(model_repository=str(tmp_path)).start()
    assert why in raised.value.message


def test_the_environment_completes_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pipeline(tmp_path, "wrong", extra={"task": "ner"})
    monkeypatch.setenv("MLSERVER_MODEL_HUGGINGFACE_FRAMEWORK", "jax")
    with pytest.raises(weir.SettingsError, match="framework='jax'"):
        weir.running(model_repository=str(tmp_path)).start()


def with_torch(test: Any) -> Any:
    """Run a test where torch is, whose warnings are its own."""
    return pytest.mark.torch(pytest.mark.filterwarnings("ignore")(test))


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    at, root = tmp_path_factory.mktemp("tasks"), tmp_path_factory.mktemp("mlserver")
    write_tasks(at)
    mood = {"task": "text-classification", "pretrained_model": str(at / "text-classification")}
    # As in MLServer's example, with a small model in place of distilgpt2.
    write_pipeline(
        root, "transformer", extra={"task": "text-generation", "pretrained_model": str(at / "text-generation")}
    )
    write_pipeline(root, "mood", extra={**mood, "device": -1}, max_batch_size=8, max_batch_time=0.02)
    masked = {"uri": "./weights", "extra": {"task": "fill-mask", "framework": "pt", "intra_op_threads": 1}}
    runtime = "mlserver_huggingface.runtime.HuggingFaceRuntime"
    write_pipeline(root, "masked", runtime=runtime, parameters=masked, max_batch_size=8, max_batch_time=0.02)
    (at / "fill-mask").rename(root / "masked" / "weights")
    with (
        weir.running(model_repository=str(root), workers=1, executor="thread") as server,
        httpx.Client(base_url=server.address, timeout=60) as pipelines,
    ):
        yield pipelines


def texts(name: str, *given: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(given)], "datatype": "BYTES", "data": list(given), "parameters": parameters}


def infer(pipelines: httpx.Client, model: str, *inputs: dict[str, Any]) -> list[Any]:
    response = pipelines.post(f"/v2/models/{model}/infer", json={"inputs": inputs})
    assert response.status_code == 200, response.text
    (output,) = response.json()["outputs"]
    found = [json.loads(each) for each in output["data"]]
    assert {**output, "data": found} == {
        "name": "output", "shape": [len(found), 1], "datatype": "BYTES", "parameters": {"content_type": "hg_jsonlist"}, "data": found,
    }  # fmt: skip
    return found


@with_torch
def test_the_example_of_mlserver(pipelines: httpx.Client) -> None:
    length: dict[str, Any] = {"name": "max_new_tokens", "shape": [1], "datatype": "INT64", "data": [2]}
    length["parameters"] = {"content_type": "raw"}
    (found,) = infer(pipelines, "transformer", texts("args", "once upon"), length)
    assert found["generated_text"].startswith("once upon")
    several = infer(pipelines, "transformer", texts("text_inputs", "once upon", "a film now"), length)
    assert [each[0]["generated_text"].split()[0] for each in several] == ["once", "a"]


@with_torch
def test_a_batch_answers_as_each_request_alone(pipelines: httpx.Client) -> None:
    given = [texts("args", text) for text in ("a good film", "it", "time")]
    given.insert(2, texts("array_inputs", "bad . bad .", "now"))
    alone = [infer(pipelines, "mood", each) for each in given]
    assert [len(each) for each in alone] == [1, 1, 2, 1] and all(set(each) == {"label", "score"} for each in alone[2])
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda each: infer(pipelines, "mood", each), given * 4))
    for one, other in zip(alone * 4, together, strict=True):
        assert [each["label"] for each in one] == [each["label"] for each in other]
        assert [each["score"] for each in one] == pytest.approx([each["score"] for each in other], rel=1e-5)


@with_torch
def test_weights_beside_the_settings_and_one_bad_request_among_good_ones(pipelines: httpx.Client) -> None:
    def ask(text: str) -> int:
        return pipelines.post("/v2/models/masked/infer", json={"inputs": [texts("inputs", text)]}).status_code

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, ["a [MASK] film", "no mask", "[MASK]"] * 3)) == [200, 500, 200] * 3
    assert len(infer(pipelines, "masked", texts("inputs", "a [MASK]"))) == 5


@with_torch
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (texts("custom_generate", "someone/code", content_type="raw"), "input 'custom_generate': must be args, array_inputs"),
        (texts("num_beams", "65", content_type="raw"), "'65': must be a whole number from 1 to 64"),
        (texts("max_length", "1000000000", content_type="raw"), "must be a whole number from 1 to 131072"),
        (texts("args", "a", content_type="pd"), "content_type='pd': must be str, raw, hg_json or hg_jsonlist"),
        (texts("args", "{", content_type="hg_jsonlist"), "is not of content_type hg_jsonlist"),
    ],
)  # fmt: skip
def test_what_a_caller_may_not_say(pipelines: httpx.Client, given: Any, why: str) -> None:
    response = pipelines.post("/v2/models/transformer/infer", json={"inputs": [given]})
    assert response.status_code == 400 and why in response.text
