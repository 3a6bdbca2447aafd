"""Servers of tiny models of texts: every frontend, started from Python."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from bert_serving.client import BertClient
from tests.late import openai
from tests.served import TEST_FRONTS
from tests.text_models import tiny

import weir.embedding
from weir.client.calls import Unreachable
from weir.client.embedding import EmbeddingClient
from weir.embedding import EmbeddingServer
from weir.errors import DeadlineExceeded, InvalidRequest, ModelError, SettingsError, Unauthorized

TEXTS = ["first do it", "then do it right", "it"]
FRONTS = 2 if TEST_FRONTS else 1
SETTINGS: dict[str, Any] = {
    "port": 0, "executor": "thread", "threads": 1, "device_map": ["cpu"], "calibrate": False, "fronts": FRONTS,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[EmbeddingServer]:
    """Two models: one of sentence-transformers', cut to 8 tokens, and a plain one."""
    small = tiny.sentence_model(folder / "small", max_length=8, prompts={"query": "do: "})
    plain = tiny.model(folder / "plain", layers=2)
    with weir.embedding.serve(small, f"other={plain}", zmq_port=0, cache=str(folder / "cache"), **SETTINGS) as made:
        assert made.is_ready.is_set()
        yield made


@pytest.fixture
def client(server: EmbeddingServer) -> Iterator[EmbeddingClient]:
    with EmbeddingClient(server.url, check_length=False) as made:
        yield made


def test_every_endpoint_gives_the_same_vectors(server: EmbeddingServer, client: EmbeddingClient) -> None:
    vectors = client.encode(TEXTS)
    assert vectors.shape == (3, tiny.HIDDEN)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    with httpx.Client(base_url=server.url) as http, openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as stock:
        encoded = http.post("/encode", json={"id": 1, "texts": TEXTS}).json()["result"]
        native = http.post("/infer/small/batch", json=TEXTS).json()
        items = {"inputs": [{"name": "input", "shape": [3], "datatype": "BYTES", "data": TEXTS}]}
        kserve = http.post("/v2/models/small/infer", json=items).json()
        embedded = stock.embeddings.create(model="small", input=TEXTS).data
    numbers = np.array(kserve["outputs"][0]["data"]).reshape(kserve["outputs"][0]["shape"])
    answers = [encoded, [each["output"] for each in native], [each.embedding for each in embedded], numbers]
    for answer in answers:
        np.testing.assert_allclose(np.array(answer, np.float32), vectors, atol=1e-6)


def test_the_protocols_of_other_servers_give_them_too(server: EmbeddingServer, client: EmbeddingClient) -> None:
    vectors = client.encode(TEXTS)
    with httpx.Client(base_url=server.url) as http:
        tei = http.post("/embed", json={"inputs": TEXTS})
        cohere = http.post("/v2/embed", json={"texts": TEXTS, "embedding_types": ["float", "ubinary"]}).json()[
            "embeddings"
        ]
        infinity = http.post("/embeddings", json={"input": TEXTS}).json()["data"]
        cosines = http.post("/similarity", json={"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}).json()
        short = http.post("/embed", json={"inputs": TEXTS, "dimensions": 8}).json()
        shown = http.post("/tokenize", json={"inputs": "then do it right", "prompt_name": "query"}).json()
        again = http.post("/decode", json={"ids": [each["id"] for each in shown[0]]}).json()
        info = http.get("/info").json()
        wrong = http.post("/rerank", json={"query": "a", "texts": ["b"]})
    for answer in (tei.json(), cohere["float"], [each["embedding"] for each in infinity]):
        np.testing.assert_allclose(np.array(answer, np.float32), vectors, atol=1e-6)
    assert cohere["ubinary"] == np.packbits(vectors > 0, axis=1).tolist()
    np.testing.assert_allclose(cosines, vectors @ vectors[0], atol=1e-6)
    cut = vectors[:, :8]
    np.testing.assert_allclose(short, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6)
    assert int(tei.headers["x-compute-tokens"]) == sum(len(each) for each in client.encode(TEXTS, show_tokens=True)[1])
    assert int(tei.headers["x-total-time"]) >= int(tei.headers["x-inference-time"]) >= 0
    assert again == ["do : then do it right"]
    assert info["model_id"] == "small" and info["max_input_length"] == 8
    assert (wrong.status_code, wrong.json()["error_type"]) == (424, "Backend")


def test_token_ids_that_cannot_be_decoded_are_named_by_their_field(server: EmbeddingServer) -> None:
    answer = httpx.post(f"{server.url}/decode", json={"ids": [[5], [5, -1]]})
    assert (answer.status_code, answer.json()["error"][:27]) == (422, "ids[1][1]: must be a token ")


@pytest.mark.parametrize("left", [True, False])
def test_either_end_of_a_text_is_kept(server: EmbeddingServer, client: EmbeddingClient, left: bool) -> None:
    words = ["first", "do", "it", "then", "do", "it", "right", "and", "better"]
    kept = " ".join(words[-6:] if left else words[:6])
    with httpx.Client(base_url=server.url) as http:
        direction = "left" if left else "right"
        said = {"inputs": " ".join(words), "truncate": True, "truncation_direction": direction}
        found = http.post("/embed", json=said)
        native = http.post("/infer/small", json={"text": said["inputs"], "truncation_direction": direction}).json()
    np.testing.assert_allclose(found.json(), client.encode([kept]), atol=1e-6)
    np.testing.assert_allclose(native, found.json()[0], atol=1e-6)
    assert found.headers["x-weir-truncated"] == "1"


def test_the_zeromq_endpoint_gives_them_too(server: EmbeddingServer, client: EmbeddingClient) -> None:
    assert server.zmq_ports is not None
    port, port_out = server.zmq_ports
    with BertClient("127.0.0.1", port, port_out, timeout=20_000) as other:
        np.testing.assert_allclose(other.encode(TEXTS), client.encode(TEXTS), atol=1e-6)


def test_the_models_own_length_pooling_and_names_hold(server: EmbeddingServer, client: EmbeddingClient) -> None:
    with httpx.Client(base_url=server.url) as http:
        listed = http.get("/v1/models").json()["data"]
        state = http.get("/status/server").json()
    assert [(each["id"], each["max_length"]) for each in listed] == [("small", 8), ("other", tiny.POSITIONS)]
    assert (state["pooling_strategy"], state["pooling_layer"], state["num_worker"]) == (2, [-1], 1)
    plain = client.encode(TEXTS, model="other")
    assert not np.allclose(np.linalg.norm(plain, axis=1), 1, atol=1e-3)


def test_the_only_layer_of_a_model_is_pooled(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.model(folder / "one", layers=1)
    settings, vectors, told = SETTINGS | {"cache": str(folder / "cache")}, [], []
    for said in ({}, {"layers": [-1]}, {"bare_layer": -2}):
        caplog.clear()
        with caplog.at_level("INFO", "weir"), weir.embedding.serve(model, **settings, **said) as other:
            vectors.append(httpx.post(f"{other.url}/encode", json={"texts": TEXTS}).json()["result"])
            assert httpx.get(f"{other.url}/status/server").json()["pooling_layer"] == [-1]
        told.append(
            "one: pools the last layer by mean, as sentence-transformers does: its files state no" in caplog.text
        )
    assert vectors[0] == vectors[1] == vectors[2] and all(told)
    with pytest.raises(SettingsError, match="layers: -2: must be -1: the model has 1 layer"):
        weir.embedding.serve(model, layers=[-2], **settings)


def test_a_text_that_is_too_long_is_cut_or_refused(server: EmbeddingServer, client: EmbeddingClient) -> None:
    long = "it " * 20
    with httpx.Client(base_url=server.url) as http:
        answer = http.post("/encode", json={"texts": ["it", long]}).json()
    assert answer["truncated"] == [1]
    with pytest.raises(InvalidRequest, match=r"text.?\[?1"):
        client.encode(["it", long], truncate=False)


def test_a_prompt_stands_before_each_text(server: EmbeddingServer, client: EmbeddingClient) -> None:
    expected = client.encode(["do: " + text for text in TEXTS])
    for prompt in ("query", "do: "):
        np.testing.assert_allclose(client.encode(TEXTS, prompt=prompt), expected, atol=1e-6)
    with httpx.Client(base_url=server.url) as http:
        answer = http.post("/v1/embeddings", json={"input": TEXTS, "prompt": "query"}).json()
        refused = http.post("/v1/embeddings", json={"input": TEXTS, "prompt": "qury"}).json()["error"]
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], expected, atol=1e-5)
    assert refused["param"] == "prompt"
    assert "available: query" in refused["message"]


def test_a_server_may_put_a_prompt_before_every_text(folder: Path, client: EmbeddingClient) -> None:
    settings = SETTINGS | {"cache": str(folder / "cache")}
    with weir.embedding.serve(folder / "small", prompt="query", **settings) as other, httpx.Client() as http:
        with EmbeddingClient(other.url, check_length=False) as asking:
            vectors = asking.encode(TEXTS)
            without = asking.encode(TEXTS, prompt="")
        native = http.post(f"{other.url}/infer/small/batch", json=TEXTS).json()
    expected = client.encode(TEXTS, prompt="query")
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    np.testing.assert_allclose([each["output"] for each in native], expected, atol=1e-5)
    np.testing.assert_allclose(without, client.encode(TEXTS), atol=1e-6)


def test_long_texts_may_be_read_whole(folder: Path) -> None:
    words = ["first", "do", "it", "then", "do", "it", "right", "better", "it"]
    settings = SETTINGS | {"cache": str(folder / "cache"), "pooling": "max", "normalize": False}
    with weir.embedding.serve(folder / "small", split=True, **settings) as other, httpx.Client() as http:
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


def test_tokens_of_stock_clients_are_taken_as_they_are(server: EmbeddingServer) -> None:
    with httpx.Client(base_url=server.url) as http:

        def tokens(**said: Any) -> Any:
            return http.post(
                "/encode", json={"texts": [["first", "##better", "|||", "it"]], "show_tokens": True, **said}
            ).json()["tokens"][0]

        assert tokens(is_tokenized=True) == ["[CLS]", "first", "[UNK]", "[SEP]", "it", "[SEP]"]
        assert "[UNK]" not in tokens()[:3]


def test_metrics_and_the_description_know_the_endpoints(server: EmbeddingServer) -> None:
    with httpx.Client(base_url=server.url) as http:
        http.post("/encode", json={"texts": ["it"]})
        metrics = http.get("/metrics").text
        paths = http.get("/openapi.json").json()["paths"]
    assert 'weir_text_calls_total{code="200",frontend="encode",model="small"}' in metrics
    assert 'weir_tokens_total{model="small"}' in metrics
    assert 'weir_padding_tokens_total{model="small"}' in metrics
    assert {"/encode", "/v1/embeddings", "/infer/small"} <= set(paths)


def test_the_bytes_of_every_endpoint_are_counted(server: EmbeddingServer, client: EmbeddingClient) -> None:
    assert server.zmq_ports is not None
    port, port_out = server.zmq_ports
    client.encode(TEXTS)
    with httpx.Client(base_url=server.url) as http:
        http.post("/v1/embeddings", json={"input": TEXTS})
        with BertClient("127.0.0.1", port, port_out, timeout=20_000) as other:
            other.encode(TEXTS)
        lines = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line[0] != "#")
    for name in ("encode", "openai", "zeromq"):
        labels = f'{{frontend="{name}",model="small"}}'
        assert float(lines[f"weir_received_bytes_total{labels}"]) > sum(map(len, TEXTS))
        assert float(lines[f"weir_sent_bytes_total{labels}"]) > 4 * tiny.HIDDEN * len(TEXTS)


@pytest.mark.parametrize("scheme", ["http", "tcp"])
def test_whoever_may_control_it_can_end_it(folder: Path, scheme: str) -> None:
    (folder / "token").write_text("secret")
    said = {"cache": str(folder / "cache"), "zmq_port": 0, "control_token_file": str(folder / "token")}
    server = EmbeddingServer(folder / "small", **SETTINGS, **said)
    assert not server.is_ready.is_set()
    server.start()
    server.wait_until_ready(60)
    assert server.is_ready.is_set()
    with pytest.raises(SettingsError, match="started already"):
        server.start()
    assert server.zmq_ports is not None
    port, port_out = server.zmq_ports
    url, out = {"http": (server.url, None), "tcp": (f"tcp://127.0.0.1:{port}", port_out)}[scheme]
    with pytest.raises(Unauthorized):
        EmbeddingServer.shutdown(url, port_out=out)
    if scheme == "tcp":
        with pytest.raises(SettingsError, match="over ZeroMQ no token can be sent: name the server's HTTP address"):
            EmbeddingServer.shutdown(url, token="secret", port_out=out)
    EmbeddingServer.shutdown(server.url, token="secret")
    server.join(60)
    with pytest.raises((Unreachable, DeadlineExceeded)):
        EmbeddingServer.shutdown(url, port_out=out, timeout=0.5)
    server.close()


def test_a_key_is_required_at_every_endpoint(folder: Path) -> None:
    settings = SETTINGS | {"cache": str(folder / "cache"), "api_key": "k3y", "batch_dir": str(folder / "kept")}
    with weir.embedding.serve(folder / "small", zmq_port=0, **settings) as server:
        for key, error in (("k3y", None), ("other", openai.AuthenticationError)):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as stock:
                if error is None:
                    assert len(stock.embeddings.create(model="small", input=TEXTS).data) == 3
                    continue
                with pytest.raises(error, match="API key") as refused:
                    stock.embeddings.create(model="small", input=TEXTS)
                assert refused.value.code == "invalid_api_key"
        with EmbeddingClient(server.url, token="k3y", check_length=False) as client:
            assert client.encode(TEXTS).shape == (3, tiny.HIDDEN)
        with pytest.raises(Unauthorized):
            EmbeddingClient(server.url)
        with httpx.Client(base_url=server.url) as http:
            refusal = http.post("/encode", json={"texts": TEXTS})
            assert (refusal.status_code, refusal.json()["type"]) == (401, "Unauthorized")
            assert http.get("/status/server").json()["status"] == 401
            assert http.post("/terminate").status_code == 401
            # Each in the form of its own protocol, also where batch jobs have paths that begin alike.
            assert http.post("/v1/rerank", json={}).json().keys() == {"id", "message", "detail"}
            assert http.get("/v1/batches").json().keys() == {"error"}
            metrics = http.get("/metrics", headers={"Authorization": "Bearer k3y"}).text
        assert 'weir_text_calls_total{code="401",frontend="openai",model=""} 1.0' in metrics
        # Over ZeroMQ there are no keys; this machine alone reaches it.
        assert server.zmq_ports is not None
        port, port_out = server.zmq_ports
        with BertClient("127.0.0.1", port, port_out, timeout=20_000) as other:
            assert other.encode(TEXTS).shape == (3, tiny.HIDDEN)
        EmbeddingServer.shutdown(server.url, token="k3y")
        server.join(60)


def test_the_endpoints_of_batch_jobs_are_those_of_the_server(folder: Path) -> None:
    settings = SETTINGS | {"cache": str(folder / "cache"), "batch_dir": str(folder / "more jobs")}
    with (
        weir.embedding.serve(tiny.sentence_model(folder / "jobbing"), **settings) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        described = http.get("/openapi.json").json()["paths"]
        texts = {path for path, calls in described.items() if "texts" in calls.get("post", {}).get("tags", ())}
        assert texts > {"/predict_tokens", "/v2/rerank", "/embeddings", "/encode", "/tokenize"}
        for path in (*(texts - {"/terminate", "/vertex"}), "/v2/embeddings", "/v1/classify", "/terminate"):
            job = {"input_file_id": "file-none", "endpoint": path, "completion_window": "24h"}
            refused = http.post("/v1/batches", json=job).json()["error"]
            assert (refused["param"] == "endpoint") is (path not in texts - {"/terminate"}), path


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_zeromq_that_others_reach_cannot_be_had_with_a_key(folder: Path, host: str) -> None:
    settings = SETTINGS | {"cache": str(folder / "cache"), "api_key": "k3y", "zmq_port": 0, "host": host}
    with pytest.raises(SettingsError, match=r"api_key, zmq_port=0, host=.*: ZeroMQ cannot send a key"):
        weir.embedding.serve(folder / "small", **settings)


def test_a_server_can_be_closed_at_any_time(folder: Path) -> None:
    before = set(threading.enumerate())
    server = EmbeddingServer(folder / "small", cache=str(folder / "cache"), **SETTINGS)
    server.close()
    server.start()
    server.close()
    server.close()
    assert set(threading.enumerate()) <= before


def test_a_model_that_cannot_be_loaded_ends_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    with (
        pytest.raises((ModelError, SettingsError)),
        EmbeddingServer(folder / "small", cache=str(folder / "file" / "cache"), **SETTINGS),
    ):
        raise AssertionError("it must not become ready")


@pytest.mark.parametrize(("settings", "rule"), [
    ({"max_length": 1000}, "max_length=1000: the model reads at most 64 tokens"),
    ({"pooling": "median"}, "pooling='median'"),
    ({"layers": [-9]}, "layers: -9: must be"),
    ({"dimensions": 1000}, "dimensions=1000"),
    ({"colour": 1}, "colour: unknown setting"),
    ({"port": "x"}, "port='x': must be a whole number"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_started(
    folder: Path, settings: dict[str, Any], rule: str
) -> None:
    with pytest.raises(SettingsError, match=rule):
        EmbeddingServer(folder / "small", **settings)


def test_a_loop_of_the_program_is_left_alone(folder: Path) -> None:
    async def main() -> Any:
        with EmbeddingServer(folder / "small", cache=str(folder / "cache"), **SETTINGS) as server:
            async with httpx.AsyncClient(base_url=server.url) as http:
                return (await http.post("/encode", json={"id": 5, "texts": ["it"]})).json()["id"]

    assert asyncio.run(main()) == 5
