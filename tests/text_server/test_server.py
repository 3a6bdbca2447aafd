"""Servers of tiny models of texts: every frontend, started from Python."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from bert_serving.client import BertClient
from tests.late import openai
from tests.rings import subcases
from tests.served import TEST_FRONTS
from tests.text_models import opening, tiny
from tests.text_models.graph.test_heads import modules

import weir.embedding
from weir.client.calls import Unreachable
from weir.client.embedding import EmbeddingClient
from weir.embedding import EmbeddingServer
from weir.errors import DeadlineExceeded, ModelError, SettingsError, Unauthorized
from weir.text_models import Pooling, TextSettings
from weir.text_models.checkpoint.reading import Checkpoint, read_checkpoint
from weir.text_models.recipe import chosen_recipe, used_layers
from weir.text_server.text_model import described

TEXTS = ["first do it", "then do it right", "it"]
FRONTS = 2 if TEST_FRONTS else 1
SETTINGS = opening.SETTINGS | {"fronts": FRONTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models: one of sentence-transformers', cut to 8 tokens, and a plain one."""
    made = tmp_path_factory.mktemp("models")
    tiny.sentence_model(made / "small", max_length=8, prompts={"query": "do: "})
    tiny.model(made / "plain", layers=2)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[EmbeddingServer]:
    models = folder / "small", f"other={folder / 'plain'}"
    with weir.embedding.serve(*models, zmq_port=0, cache=str(folder / "cache"), **SETTINGS) as made:
        assert made.is_ready.is_set()
        yield made


@pytest.fixture
def client(server: EmbeddingServer) -> Iterator[EmbeddingClient]:
    with EmbeddingClient(server.url, check_length=False) as made:
        yield made


def bert_client(server: EmbeddingServer) -> BertClient:
    assert server.zmq_ports is not None
    return BertClient("127.0.0.1", *server.zmq_ports, timeout=20_000)


@pytest.fixture
def http(server: EmbeddingServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as made:
        yield made


@pytest.fixture
def settings(folder: Path) -> dict[str, Any]:
    return SETTINGS | {"cache": str(folder / "cache")}


def test_every_endpoint_gives_the_same_vectors(
    server: EmbeddingServer, client: EmbeddingClient, http: httpx.Client
) -> None:
    vectors, tokens = client.encode(TEXTS, show_tokens=True)
    assert vectors.shape == (3, tiny.HIDDEN)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    items = {"inputs": [{"name": "input", "shape": [3], "datatype": "BYTES", "data": TEXTS}]}
    (kserve, *_) = http.post("/v2/models/small/infer", json=items).json()["outputs"]
    tei = http.post("/embed", json={"inputs": TEXTS})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as stock, bert_client(server) as bert:
        embedded, over_zeromq = stock.embeddings.create(model="small", input=TEXTS).data, bert.encode(TEXTS)
    for answer in (
        tei.json(), over_zeromq, [each.embedding for each in embedded], np.array(kserve["data"]).reshape(kserve["shape"]),
        http.post("/encode", json={"id": 1, "texts": TEXTS}).json()["result"],
        [each["output"] for each in http.post("/infer/small/batch", json=TEXTS).json()],
        http.post("/v2/embed", json={"texts": TEXTS, "embedding_types": ["float"]}).json()["embeddings"]["float"],
        [each["embedding"] for each in http.post("/embeddings", json={"input": TEXTS}).json()["data"]],
    ):  # fmt: skip
        np.testing.assert_allclose(np.array(answer, np.float32), vectors, atol=1e-6)
    cosines = http.post("/similarity", json={"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}).json()
    np.testing.assert_allclose(cosines, vectors @ vectors[0], atol=1e-6)
    short, cut = http.post("/embed", json={"inputs": TEXTS, "dimensions": 8}).json(), vectors[:, :8]
    np.testing.assert_allclose(short, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6)
    assert int(tei.headers["x-compute-tokens"]) == sum(map(len, tokens))
    assert int(tei.headers["x-total-time"]) >= int(tei.headers["x-inference-time"]) >= 0
    metrics = http.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
    for name in ("encode", "openai", "zeromq"):
        labels = f'{{frontend="{name}",model="small"}}'
        assert float(lines[f"weir_received_bytes_total{labels}"]) > sum(map(len, TEXTS))
        assert float(lines[f"weir_sent_bytes_total{labels}"]) > 4 * tiny.HIDDEN * len(TEXTS)
    assert 'weir_text_calls_total{code="200",frontend="encode",model="small"}' in metrics
    assert 'weir_tokens_total{model="small"}' in metrics and 'weir_padding_tokens_total{model="small"}' in metrics
    assert {"/encode", "/v1/embeddings", "/infer/small"} <= set(http.get("/openapi.json").json()["paths"])


def test_token_ids_that_cannot_be_decoded_are_named_by_their_field(http: httpx.Client) -> None:
    answer = http.post("/decode", json={"ids": [[5], [5, -1]]})
    assert (answer.status_code, answer.json()["error"][:27]) == (422, "ids[1][1]: must be a token ")


@pytest.mark.parametrize("end", ["left", "right"])
def test_either_end_of_a_text_is_kept(http: httpx.Client, client: EmbeddingClient, end: str) -> None:
    words = ["first", "do", "it", "then", "do", "it", "right", "and", "better"]
    kept, text = " ".join(words[-6:] if end == "left" else words[:6]), " ".join(words)
    found = http.post("/embed", json={"inputs": text, "truncate": True, "truncation_direction": end})
    native = http.post("/infer/small", json={"text": text, "truncation_direction": end}).json()
    np.testing.assert_allclose(found.json(), client.encode([kept]), atol=1e-6)
    np.testing.assert_allclose(native, found.json()[0], atol=1e-6)
    assert found.headers["x-weir-truncated"] == "1"


def test_the_models_own_length_pooling_and_names_hold(http: httpx.Client, client: EmbeddingClient) -> None:
    listed = http.get("/v1/models").json()["data"]
    state = http.get("/status/server").json()
    assert [(each["id"], each["max_length"]) for each in listed] == [("small", 8), ("other", tiny.POSITIONS)]
    assert (state["pooling_strategy"], state["pooling_layer"], state["num_worker"]) == (2, [-1], 1)
    assert not np.allclose(np.linalg.norm(client.encode(TEXTS, model="other"), axis=1), 1, atol=1e-3)


def test_a_prompt_stands_before_each_text(http: httpx.Client, client: EmbeddingClient) -> None:
    expected = client.encode(["do: " + text for text in TEXTS])
    for prompt in ("query", "do: "):
        np.testing.assert_allclose(client.encode(TEXTS, prompt=prompt), expected, atol=1e-6)
    answer = http.post("/v1/embeddings", json={"input": TEXTS, "prompt": "query"}).json()
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], expected, atol=1e-5)
    refused = http.post("/v1/embeddings", json={"input": TEXTS, "prompt": "qury"}).json()["error"]
    assert refused["param"] == "prompt" and "available: query" in refused["message"]


def test_a_server_may_put_a_prompt_before_every_text(folder: Path, settings: Any, client: EmbeddingClient) -> None:
    with weir.embedding.serve(folder / "small", prompt="query", **settings) as other, httpx.Client() as http:
        with EmbeddingClient(other.url, check_length=False) as asking:
            vectors = asking.encode(TEXTS)
            without = asking.encode(TEXTS, prompt="")
        native = http.post(f"{other.url}/infer/small/batch", json=TEXTS).json()
    expected = client.encode(TEXTS, prompt="query")
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    np.testing.assert_allclose([each["output"] for each in native], expected, atol=1e-5)
    np.testing.assert_allclose(without, client.encode(TEXTS), atol=1e-6)


def test_long_texts_may_be_read_whole(folder: Path, settings: Any) -> None:
    words = ["first", "do", "it", "then", "do", "it", "right", "better", "it"]
    settings |= {"pooling": "max", "normalize": False, "split": True}
    with weir.embedding.serve(folder / "small", **settings) as other, httpx.Client() as http:
        with EmbeddingClient(other.url) as asking:  # a warning would be an error
            (whole,) = asking.encode([" ".join(words)])
            pieces = asking.encode([" ".join(words[:6]), " ".join(words[6:])])
        used = http.post(f"{other.url}/v1/embeddings", json={"input": " ".join(words)}).json()
        native = http.post(f"{other.url}/infer/small", json=" ".join(words))
        listed = http.post(f"{other.url}/infer/small", json=words)
    np.testing.assert_allclose(whole, pieces.max(axis=0), atol=1e-6)
    assert used["usage"]["prompt_tokens"] == len(words) + 4 and "truncated" not in used
    for answer in (native, listed):
        np.testing.assert_allclose(answer.json(), whole, atol=1e-6)
        assert "x-weir-truncated" not in answer.headers


def test_tokens_of_stock_clients_are_taken_as_they_are(http: httpx.Client) -> None:
    said: dict[str, Any] = {"texts": [["first", "##better", "|||", "it"]], "show_tokens": True}
    (tokens,) = http.post("/encode", json={**said, "is_tokenized": True}).json()["tokens"]
    assert tokens == ["[CLS]", "first", "[UNK]", "[SEP]", "it", "[SEP]"]
    assert "[UNK]" not in http.post("/encode", json=said).json()["tokens"][0][:3]


def test_whoever_may_control_it_can_end_it(folder: Path, settings: Any) -> None:
    (folder / "token").write_text("secret")
    server = EmbeddingServer(folder / "small", zmq_port=0, control_token_file=str(folder / "token"), **settings)
    assert not server.is_ready.is_set()
    server.start()
    server.wait_until_ready(60)
    assert server.is_ready.is_set()
    with pytest.raises(SettingsError, match="started already"):
        server.start()
    assert server.zmq_ports is not None
    port, port_out = server.zmq_ports
    addresses = (server.url, None), (f"tcp://127.0.0.1:{port}", port_out)
    for url, out in addresses:
        with pytest.raises(Unauthorized):
            EmbeddingServer.shutdown(url, port_out=out)
    with pytest.raises(SettingsError, match="over ZeroMQ no token can be sent: name the server's HTTP address"):
        EmbeddingServer.shutdown(url, token="secret", port_out=port_out)
    EmbeddingServer.shutdown(server.url, token="secret")
    server.join(60)
    for url, out in addresses:
        with pytest.raises((Unreachable, DeadlineExceeded)):
            EmbeddingServer.shutdown(url, port_out=out, timeout=0.5)
    server.close()


def test_a_key_is_required_at_every_endpoint(folder: Path, settings: Any) -> None:
    settings |= {"api_key": "k3y", "batch_dir": str(folder / "kept"), "zmq_port": 0}
    with (
        weir.embedding.serve(folder / "small", **settings) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k3y", max_retries=0) as stock,
        httpx.Client(base_url=server.url) as http,
    ):
        assert len(stock.embeddings.create(model="small", input=TEXTS).data) == 3
        stock.api_key = "other"
        with pytest.raises(openai.AuthenticationError, match="API key") as refused:
            stock.embeddings.create(model="small", input=TEXTS)
        assert refused.value.code == "invalid_api_key"
        with EmbeddingClient(server.url, token="k3y", check_length=False) as client:
            assert client.encode(TEXTS).shape == (3, tiny.HIDDEN)
        with pytest.raises(Unauthorized):
            EmbeddingClient(server.url)
        refusal = http.post("/encode", json={"texts": TEXTS})
        assert (refusal.status_code, refusal.json()["type"]) == (401, "Unauthorized")
        assert http.get("/status/server").json()["status"] == 401
        assert http.post("/terminate").status_code == 401
        # Each in the form of its own protocol, also where batch jobs have paths that begin alike.
        assert http.post("/v1/rerank", json={}).json().keys() == {"id", "message", "detail"}
        assert http.get("/v1/batches").json().keys() == {"error"}
        metrics = http.get("/metrics", headers={"Authorization": "Bearer k3y"}).text
        assert 'weir_text_calls_total{code="401",frontend="openai",model=""} 1.0' in metrics
        with bert_client(server) as bert:  # over ZeroMQ there are no keys; this machine alone reaches it
            assert bert.encode(TEXTS).shape == (3, tiny.HIDDEN)
        EmbeddingServer.shutdown(server.url, token="k3y")
        server.join(60)


def test_the_endpoints_of_batch_jobs_are_those_of_the_server(folder: Path, settings: Any) -> None:
    model = tiny.sentence_model(folder / "jobbing")
    with (
        weir.embedding.serve(model, batch_dir=str(folder / "more jobs"), **settings) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        described = http.get("/openapi.json").json()["paths"]
        texts = {path for path, calls in described.items() if "texts" in calls.get("post", {}).get("tags", ())}
        assert texts > {"/predict_tokens", "/v2/rerank", "/embeddings", "/encode", "/tokenize"}
        for path in (*(texts - {"/terminate", "/vertex"}), "/v2/embeddings", "/v1/classify", "/terminate"):
            job = {"input_file_id": "file-none", "endpoint": path, "completion_window": "24h"}
            refused = http.post("/v1/batches", json=job).json()["error"]
            assert (refused["param"] == "endpoint") is (path not in texts - {"/terminate"}), path


@subcases("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_zeromq_that_others_reach_cannot_be_had_with_a_key(folder: Path, settings: Any, host: str) -> None:
    settings |= {"api_key": "k3y", "zmq_port": 0, "host": host}
    with pytest.raises(SettingsError, match=r"api_key, zmq_port=0, host=.*: ZeroMQ cannot send a key"):
        weir.embedding.serve(folder / "small", **settings)


def test_a_server_can_be_closed_at_any_time(folder: Path, settings: Any) -> None:
    before = set(threading.enumerate())
    server = EmbeddingServer(folder / "small", **settings)
    server.close()
    server.start()
    server.close()
    server.close()
    assert set(threading.enumerate()) <= before


def test_a_model_that_cannot_be_loaded_ends_the_start(folder: Path) -> None:
    (folder / "file").write_text("")
    server = EmbeddingServer(folder / "small", cache=str(folder / "file" / "cache"), **SETTINGS)
    with pytest.raises((ModelError, SettingsError)), server:
        raise AssertionError("it must not become ready")


@subcases(("said", "rule"), [
    ({"max_length": 1000}, "max_length=1000: the model reads at most 64 tokens"),
    ({"pooling": "median"}, "pooling='median'"),
    ({"layers": [-9]}, "layers: -9: must be"),
    ({"dimensions": 1000}, "dimensions=1000"),
    ({"colour": 1}, "colour: unknown setting"),
    ({"port": "x"}, "port='x': must be a whole number"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_started(folder: Path, said: dict[str, Any], rule: str) -> None:
    with pytest.raises(SettingsError, match=rule):
        EmbeddingServer(folder / "small", **said)


async def test_a_loop_of_the_program_is_left_alone(folder: Path, settings: Any) -> None:
    with EmbeddingServer(folder / "small", **settings) as server:
        async with httpx.AsyncClient(base_url=server.url) as http:
            assert (await http.post("/encode", json={"id": 5, "texts": ["it"]})).json()["id"] == 5


BARE = "its files state no pooling, which --pooling and --layers choose"


def decoder(directory: Path, name: str = "Qwen3ForCausalLM", **more: Any) -> Path:
    """Write a decoder whose vocabulary has yes and no."""
    return tiny.answering(tiny.model(directory, "qwen3", architectures=[name], max_position_embeddings=1024, **more))


def said(checkpoint: Checkpoint, **settings: Any) -> tuple[Pooling, tuple[int, ...], str]:
    text = TextSettings(**settings)
    recipe = chosen_recipe(checkpoint, text)
    return recipe.pooling, recipe.layers, described(checkpoint, recipe, text)


def test_a_directory_without_modules_is_pooled_as_by_sentence_transformers(tmp_path: Path) -> None:
    bert = read_checkpoint(tiny.model(tmp_path / "bert"))
    line = f"pools the last layer by mean, as sentence-transformers does: {BARE}"
    assert said(bert) == (Pooling.MEAN, (-1,), line)
    assert said(bert, bare_layer=-2)[1:] == (
        (-2,),
        f"pools layers -2 by mean, as --bare-layer or --layers states: {BARE}",
    )
    assert said(bert, pooling="max", layers=[-1, -2])[2] == "pools layers -1, -2 by max, as --pooling states"
    one = read_checkpoint(tiny.model(tmp_path / "one", layers=1))
    for options in ({}, {"layers": [-1]}, {"bare_layer": -2}):
        assert said(one, **options) == (Pooling.MEAN, (-1,), line)
    with pytest.raises(SettingsError, match="layers: -2: must be -1: the model has 1 layer"):
        used_layers(one.architecture, chosen_recipe(one, TextSettings(layers=[-2])))
    own = read_checkpoint(tiny.sentence_model(tmp_path / "own", pooling="cls"))
    assert said(own, bare_layer=-2) == (Pooling.CLS, (-1,), "pools the last layer by cls, as its modules.json states")
    labels = read_checkpoint(tiny.model(tmp_path / "labels", labels=1))
    assert said(labels)[2] == "serves the logits of its head, as its files state"


def test_of_a_language_model_the_last_token_is_pooled(tmp_path: Path) -> None:
    for name, causal in (("Qwen3ForCausalLM", True), ("Qwen3Model", True), ("Qwen3ForCausalLM", False)):
        found, _, line = said(read_checkpoint(decoder(tmp_path / f"{name}-{causal}", name, is_causal=causal)))
        is_language_model = causal and name == "Qwen3ForCausalLM"
        assert found is (Pooling.SEP if is_language_model else Pooling.MEAN)
        assert ("if it is a reranker, --pooling yes-no scores pairs" in line) == is_language_model


@pytest.mark.parametrize("place", ["Qwen3-Reranker-0.6B", "models--Qwen--Qwen3-Reranker-0.6B/snapshots/0a1b"])
def test_a_language_model_that_is_called_a_reranker_says_yes_or_no(place: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(decoder(tmp_path / place))
    assert said(checkpoint)[0] is Pooling.YES_NO
    assert "a reranker that is a language model answers; --pooling sep makes vectors" in said(checkpoint)[2]
    assert said(checkpoint, pooling="sep")[0] is Pooling.SEP
    with_modules = tiny.sentence_files(decoder(tmp_path / "other" / place), pooling="lasttoken")
    assert said(read_checkpoint(with_modules))[0] is Pooling.SEP


@pytest.mark.parametrize("right", [True, False])
def test_a_module_may_state_which_tokens_say_yes_and_no(right: bool, tmp_path: Path) -> None:
    directory = decoder(tmp_path / "model")
    words = read_checkpoint(directory).tokenizer().vocabulary
    ids = {"true_token_id": words["yes" if right else "it"], "false_token_id": words["no"]}
    kinds = (
        "sentence_transformers.base.modules.transformer.Transformer",
        "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    )
    modules(directory, ("", kinds[0]), ("1_LogitScore", kinds[1]), at_1_LogitScore=ids)
    checkpoint = read_checkpoint(directory)
    assert said(checkpoint)[::2] == (Pooling.YES_NO, "serves the yes-no of its head, as its modules.json states")
    if right:
        assert checkpoint.answers.weight.shape == (1, 32)
    else:
        with pytest.raises(SettingsError, match="must be those of yes and no"):
            _ = checkpoint.answers
