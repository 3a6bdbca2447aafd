"""Settings of MLServer's runtime of Hugging Face are served without its package; `make test-torch` runs the tests that answer."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.catalog.tasks import write_tasks

import weir

RUNTIME = "mlserver_huggingface.HuggingFaceRuntime"


def write(root: Path, called: str, *, runtime: str = RUNTIME, parameters: Any = None, **more: Any) -> None:
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
def test_what_cannot_be_served_is_said_before_it_starts(extra: Any, why: str, tmp_path: Path) -> None:
    write(tmp_path, "wrong", extra=extra)
    with pytest.raises(weir.SettingsError) as raised:
        weir.running(model_repository=str(tmp_path)).start()
    assert why in raised.value.message


def test_the_environment_completes_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "wrong", extra={"task": "ner"})
    monkeypatch.setenv("MLSERVER_MODEL_HUGGINGFACE_FRAMEWORK", "jax")
    with pytest.raises(weir.SettingsError, match="framework='jax'"):
        weir.running(model_repository=str(tmp_path)).start()


def with_torch(test: Any) -> Any:
    """Run a test where torch is, whose warnings are its own."""
    return pytest.mark.torch(pytest.mark.filterwarnings("ignore")(test))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    at, root = tmp_path_factory.mktemp("tasks"), tmp_path_factory.mktemp("mlserver")
    write_tasks(at)
    mood = {"task": "text-classification", "pretrained_model": str(at / "text-classification")}
    # As in MLServer's example, with a small model in place of distilgpt2.
    write(root, "transformer", extra={"task": "text-generation", "pretrained_model": str(at / "text-generation")})
    write(root, "mood", extra={**mood, "device": -1}, max_batch_size=8, max_batch_time=0.02)
    masked = {"uri": "./weights", "extra": {"task": "fill-mask", "framework": "pt", "intra_op_threads": 1}}
    runtime = "mlserver_huggingface.runtime.HuggingFaceRuntime"
    write(root, "masked", runtime=runtime, parameters=masked, max_batch_size=8, max_batch_time=0.02)
    (at / "fill-mask").rename(root / "masked" / "weights")
    with (
        weir.running(model_repository=str(root), workers=1, executor="thread") as server,
        httpx.Client(base_url=server.address, timeout=60) as client,
    ):
        yield client


def texts(name: str, *given: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(given)], "datatype": "BYTES", "data": list(given), "parameters": parameters}


def infer(client: httpx.Client, model: str, *inputs: dict[str, Any]) -> list[Any]:
    response = client.post(f"/v2/models/{model}/infer", json={"inputs": inputs})
    assert response.status_code == 200, response.text
    (output,) = response.json()["outputs"]
    found = [json.loads(each) for each in output["data"]]
    assert {**output, "data": found} == {
        "name": "output", "shape": [len(found), 1], "datatype": "BYTES", "parameters": {"content_type": "hg_jsonlist"}, "data": found,
    }  # fmt: skip
    return found


@with_torch
def test_the_example_of_mlserver(client: httpx.Client) -> None:
    length: dict[str, Any] = {"name": "max_new_tokens", "shape": [1], "datatype": "INT64", "data": [2]}
    length["parameters"] = {"content_type": "raw"}
    (found,) = infer(client, "transformer", texts("args", "once upon"), length)
    assert found["generated_text"].startswith("once upon")
    several = infer(client, "transformer", texts("text_inputs", "once upon", "a film now"), length)
    assert [each[0]["generated_text"].split()[0] for each in several] == ["once", "a"]


@with_torch
def test_a_batch_answers_as_each_request_alone(client: httpx.Client) -> None:
    given = [texts("args", text) for text in ("a good film", "it", "time")]
    given.insert(2, texts("array_inputs", "bad . bad .", "now"))
    alone = [infer(client, "mood", each) for each in given]
    assert [len(each) for each in alone] == [1, 1, 2, 1] and all(set(each) == {"label", "score"} for each in alone[2])
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda each: infer(client, "mood", each), given * 4))
    for one, other in zip(alone * 4, together, strict=True):
        assert [each["label"] for each in one] == [each["label"] for each in other]
        assert [each["score"] for each in one] == pytest.approx([each["score"] for each in other], rel=1e-5)


@with_torch
def test_weights_beside_the_settings_and_one_bad_request_among_good_ones(client: httpx.Client) -> None:
    def ask(text: str) -> int:
        return client.post("/v2/models/masked/infer", json={"inputs": [texts("inputs", text)]}).status_code

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, ["a [MASK] film", "no mask", "[MASK]"] * 3)) == [200, 500, 200] * 3
    assert len(infer(client, "masked", texts("inputs", "a [MASK]"))) == 5


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
def test_what_a_caller_may_not_say(client: httpx.Client, given: Any, why: str) -> None:
    response = client.post("/v2/models/transformer/infer", json={"inputs": [given]})
    assert response.status_code == 400 and why in response.text
