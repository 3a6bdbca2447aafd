"""Clients and frameworks of others, as they come from PyPI, against a server process: `make test-clients`, in an environment of their own.

Each gets what the server answers to plain HTTP. Only the address, a key and the name of the model are stated. The blocks of the page about them are run, too.
"""

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.documentation.pages import ROOT, Block, run_python
from tests.served import Served
from tests.text_models import tiny

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # theirs, of many kinds
]

TEXTS = ["first do it", "then do it right", "then do it better"]
QUERY = "who reads this"
KEY = "a-key-that-is-long-enough"
MODELS = PLAIN, LABELLER, RANKER = "bge-small-en-v1.5", "roberta-base-go_emotions", "ms-marco-MiniLM-L6-v2"
PAGE = ROOT / "docs" / "how-to" / "use-embedding-clients.md"
SECTIONS = dict(re.findall(r"^## (.+?)\n.*?^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Yield the addresses, HTTP and gRPC, of a server process of three models, which asks for a key."""
    folder = tmp_path_factory.mktemp("models")
    tiny.sentence_model(folder / PLAIN, prompts={"query": "who: ", "document": "it: "})
    tiny.model(folder / RANKER, labels=1)
    tiny.model(folder / LABELLER, labels=3, id2label={"0": "sad", "1": "glad", "2": "mad"})
    key = folder / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    models = [folder / name for name in MODELS]
    env = {"WEIR_EXECUTOR": "thread", "WEIR_CALIBRATE": "false", "WEIR_CACHE": str(folder / "cache")}
    with Served(*models, "--grpc-port", 0, "--api-key-file", key, command="embed serve", env=env) as served:
        served.until_grpc()
        served.until_logged(r"\bready\b.*models=")
        yield [re.findall(r"http://[\w.]+:\d+", served.log)[0], served.grpc]


@pytest.fixture
def url(addresses: list[str]) -> str:
    return addresses[0]


@pytest.fixture
def target(addresses: list[str]) -> str:
    """Return the target of channels of gRPC."""
    return addresses[1]


@pytest.fixture
def plain(url: str) -> Any:
    """Return a function that asks by plain HTTP."""

    def ask(path: str, document: Any) -> Any:
        answer = httpx.post(url + path, json=document, headers={"authorization": f"Bearer {KEY}"})
        return answer.raise_for_status().json()

    return ask


@pytest.fixture
def vectors(plain: Any) -> Any:
    """Return a function that returns the vectors of texts with the prompt of this name."""

    def get(texts: list[str], prompt_name: str | None = None) -> Any:
        return np.array(plain("/embed", {"inputs": texts, "prompt_name": prompt_name}))

    return get


@pytest.fixture(autouse=True)
def no_key_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.endswith(("_API_KEY", "_TOKEN", "_API_URL"))]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def nothing_open() -> Iterator[None]:
    """Collect the clients that a test leaves open while what Python says of them is still passed over."""
    yield
    gc.collect()


def close(found: Any, expected: Any) -> None:
    """Check that vectors or scores are the same."""
    np.testing.assert_allclose(np.array(found, np.float64), np.array(expected), atol=1e-5)


def test_openai(url: str, vectors: Any) -> None:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        close([each.embedding for each in client.embeddings.create(model=PLAIN, input=TEXTS).data], vectors(TEXTS))
        assert [each.id for each in client.models.list()] == list(MODELS)
        with pytest.raises(openai.NotFoundError, match="unknown model"):
            client.embeddings.create(model="text-embedding-3-small", input=TEXTS)


def test_cohere(url: str, vectors: Any, plain: Any) -> None:
    import cohere

    client = cohere.ClientV2(api_key=KEY, base_url=url)
    answer = client.embed(
        model=PLAIN, texts=TEXTS, input_type="search_query", embedding_types=["float", "int8", "ubinary"]
    )
    close(answer.embeddings.float_, vectors(TEXTS, "query"))
    assert np.array(answer.embeddings.ubinary).tolist() == np.packbits(vectors(TEXTS, "query") > 0, axis=1).tolist()
    assert np.abs(answer.embeddings.int8).max() == 127
    ranked = client.rerank(model=RANKER, query=QUERY, documents=TEXTS, top_n=2)
    expected = plain("/v2/rerank", {"query": QUERY, "documents": TEXTS, "top_n": 2})["results"]
    assert [each.index for each in ranked.results] == [each["index"] for each in expected]
    close([each.relevance_score for each in ranked.results], [each["relevance_score"] for each in expected])
    with pytest.raises(cohere.BadRequestError, match="has no task rerank"):
        client.rerank(model=PLAIN, query=QUERY, documents=TEXTS)
    first = cohere.Client(api_key=KEY, base_url=url)
    close(first.embed(model=PLAIN, texts=TEXTS, input_type="search_document").embeddings, vectors(TEXTS, "document"))
    assert first.rerank(model=RANKER, query=QUERY, documents=TEXTS).results[0].index == expected[0]["index"]


def test_infinity(url: str, vectors: Any, plain: Any) -> None:
    from infinity_client import AuthenticatedClient
    from infinity_client.api.default import classify, embeddings, models, rerank
    from infinity_client.models import ClassifyInput, OpenAIEmbeddingInputText, RerankInput

    with AuthenticatedClient(base_url=url, token=KEY, raise_on_unexpected_status=True) as client:
        # Of a model that its user does not name, the client sends default/not-specified.
        for named in ({}, {"model": PLAIN}):
            made = embeddings.sync(client=client, body=OpenAIEmbeddingInputText(input_=TEXTS, **named))
            close([each.embedding for each in made.data], vectors(TEXTS))
        for named in ({}, {"model": RANKER}):
            body = RerankInput(query=QUERY, documents=TEXTS, return_documents=True, top_n=2, **named)
            ranked = rerank.sync(client=client, body=body).results
            expected = plain("/v2/rerank", {"query": QUERY, "documents": TEXTS, "top_n": 2})["results"]
            assert [each.index for each in ranked] == [each["index"] for each in expected]
            assert [each.document for each in ranked] == [TEXTS[each["index"]] for each in expected]
            close([each.relevance_score for each in ranked], [each["relevance_score"] for each in expected])
        raw = rerank.sync(client=client, body=RerankInput(query=QUERY, documents=TEXTS, raw_scores=True)).results
        expected = plain("/rerank", {"query": QUERY, "texts": TEXTS, "raw_scores": True})
        close([each.relevance_score for each in raw], [each["score"] for each in expected])
        labels = classify.sync(client=client, body=ClassifyInput(input_=TEXTS, model=LABELLER)).data
        expected = plain("/predict", {"inputs": [[text] for text in TEXTS], "model": LABELLER})
        assert [[each.label for each in text] for text in labels] == [
            [each["label"] for each in text] for text in expected
        ]
        close(
            [[each.score for each in text] for text in labels], [[each["score"] for each in text] for text in expected]
        )
        assert models.sync(client=client).data is not None


def test_huggingface_hub(url: str, vectors: Any, plain: Any) -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=url, token=KEY)
    close(client.feature_extraction(TEXTS), vectors(TEXTS))
    close(client.feature_extraction(TEXTS[0], normalize=True, prompt_name="query", truncate=True, truncation_direction="left"),
          vectors(TEXTS[:1], "query"))  # fmt: skip
    labels = InferenceClient(model=f"{url}/predict", token=KEY)
    expected = plain("/predict", {"inputs": TEXTS[0]})
    assert [dict(each) for each in labels.text_classification(TEXTS[0])] == expected
    numbers = plain("/predict", {"inputs": TEXTS[0], "raw_scores": True})[:2]
    assert [dict(each) for each in labels.text_classification(TEXTS[0], top_k=2, function_to_apply="none")] == numbers
    shares = [1 / (1 + np.exp(-each["score"])) for each in numbers]
    close([each.score for each in labels.text_classification(TEXTS[0], top_k=2, function_to_apply="sigmoid")], shares)
    cosines = InferenceClient(model=f"{url}/similarity", token=KEY).sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    close(cosines, vectors(TEXTS) @ vectors(TEXTS)[0])


def test_langchain_openai(url: str, vectors: Any) -> None:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(model=PLAIN, base_url=f"{url}/v1", api_key=KEY, check_embedding_ctx_length=False)
    close(embeddings.embed_documents(TEXTS), vectors(TEXTS))
    close(embeddings.embed_query(TEXTS[0]), vectors(TEXTS[:1])[0])


def test_langchain_huggingface(url: str, vectors: Any) -> None:
    from huggingface_hub import InferenceClient
    from langchain_huggingface import HuggingFaceEndpointEmbeddings

    # Current versions refuse an address as the model, and take a client.
    embeddings = HuggingFaceEndpointEmbeddings(model=PLAIN)
    embeddings.client = InferenceClient(model=url, token=KEY)
    close(embeddings.embed_documents(TEXTS), vectors(TEXTS))
    close(embeddings.embed_query(TEXTS[0]), vectors(TEXTS[:1])[0])


def test_langchain_cohere(url: str, vectors: Any, plain: Any) -> None:
    from langchain_cohere import CohereEmbeddings, CohereRerank

    embeddings = CohereEmbeddings(model=PLAIN, cohere_api_key=KEY, base_url=url)
    close(embeddings.embed_documents(TEXTS), vectors(TEXTS, "document"))
    close(embeddings.embed_query(TEXTS[0]), vectors(TEXTS[:1], "query")[0])
    ranker = CohereRerank(model=RANKER, cohere_api_key=KEY, base_url=url, top_n=2)
    expected = plain("/v2/rerank", {"query": QUERY, "documents": TEXTS, "top_n": 2})["results"]
    assert [each["index"] for each in ranker.rerank(TEXTS, QUERY)] == [each["index"] for each in expected]


def test_llama_index_openai_like(url: str, vectors: Any) -> None:
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    embedding = OpenAILikeEmbedding(model_name=PLAIN, api_base=f"{url}/v1", api_key=KEY, embed_batch_size=2)
    close(embedding.get_text_embedding_batch(TEXTS), vectors(TEXTS))
    close(embedding.get_query_embedding(TEXTS[0]), vectors(TEXTS[:1])[0])


def test_llama_index_text_embeddings_inference(url: str, vectors: Any) -> None:
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    embedding = TextEmbeddingsInference(
        model_name=PLAIN, base_url=url, auth_token=f"{KEY}", text_instruction=" ", query_instruction=" "
    )
    close(embedding.get_text_embedding_batch(TEXTS), vectors(TEXTS))
    close(embedding.get_query_embedding(TEXTS[0]), vectors(TEXTS[:1])[0])


def test_haystack(url: str, vectors: Any) -> None:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
    from haystack.utils import Secret

    said = {"api_base_url": f"{url}/v1", "api_key": Secret.from_token(KEY), "model": PLAIN}
    documents = OpenAIDocumentEmbedder(progress_bar=False, **said).run([Document(content=text) for text in TEXTS])[
        "documents"
    ]
    close([each.embedding for each in documents], vectors(TEXTS))
    close(OpenAITextEmbedder(**said).run(TEXTS[0])["embedding"], vectors(TEXTS[:1])[0])


def test_chromadb(url: str, vectors: Any, tmp_path: Path) -> None:
    import chromadb
    from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction
    from chromadb.utils.embedding_functions.huggingface_embedding_function import HuggingFaceEmbeddingServer

    tei = HuggingFaceEmbeddingServer(url=f"{url}/embed", api_key=KEY)
    close(tei(TEXTS), vectors(TEXTS))
    close(OpenAIEmbeddingFunction(api_key=KEY, api_base=f"{url}/v1", model_name=PLAIN)(TEXTS), vectors(TEXTS))
    client = chromadb.PersistentClient(str(tmp_path), settings=chromadb.Settings(anonymized_telemetry=False))
    collection = client.create_collection("texts", embedding_function=tei)
    collection.add(ids=["0", "1", "2"], documents=TEXTS)
    assert collection.query(query_texts=[TEXTS[1]], n_results=1)["ids"] == [["1"]]


def test_qdrant(url: str, vectors: Any) -> None:
    import openai
    from qdrant_client import QdrantClient
    from qdrant_client.models import Distance, PointStruct, VectorParams

    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        found = client.embeddings.create(model=PLAIN, input=TEXTS).data
    store = QdrantClient(":memory:")
    store.create_collection("texts", vectors_config=VectorParams(size=tiny.HIDDEN, distance=Distance.COSINE))
    store.upsert("texts", [PointStruct(id=each.index, vector=each.embedding) for each in found])
    hits = store.query_points("texts", query=vectors(TEXTS[1:2])[0].tolist(), limit=2).points
    assert hits[0].id == 1 and hits[0].score == pytest.approx(1.0, abs=1e-5)


def test_tei_client_over_http(url: str, vectors: Any, plain: Any) -> None:
    import tei_client

    client = tei_client.HttpClient(url, headers={"authorization": f"Bearer {KEY}"})
    info = httpx.get(f"{url}/info", headers={"authorization": f"Bearer {KEY}"}).json()
    assert client.info().max_input_length == info["max_input_length"]
    close(client.embed(TEXTS, prompt_name="query"), vectors(TEXTS, "query"))
    (tokens,) = plain("/tokenize", {"inputs": TEXTS[0]})
    assert [token.id for token in client.tokenize(TEXTS[0])[0].tokens] == [token["id"] for token in tokens]
    assert client.decode([token["id"] for token in tokens]) == TEXTS[:1]


def test_tei_grpc_with_stubs_compiled_from_its_own_proto(target: str, vectors: Any, plain: Any) -> None:
    import grpc
    from tei_client.stubs import tei_pb2, tei_pb2_grpc

    with grpc.insecure_channel(target) as channel:
        metadata = [("authorization", f"Bearer {KEY}")]
        info = tei_pb2_grpc.InfoStub(channel).Info(tei_pb2.InfoRequest(), metadata=metadata)
        assert (info.model_id, info.model_type) == (PLAIN, tei_pb2.MODEL_TYPE_EMBEDDING)
        embed = tei_pb2_grpc.EmbedStub(channel)
        requests = (
            tei_pb2.EmbedRequest(inputs=text, normalize=True, truncate=True, prompt_name="query") for text in TEXTS
        )
        close([each.embeddings for each in embed.EmbedStream(requests, metadata=metadata)], vectors(TEXTS, "query"))
        one = embed.Embed(tei_pb2.EmbedRequest(inputs=TEXTS[0], normalize=True), metadata=metadata)
        close(one.embeddings, vectors(TEXTS[:1])[0])
        assert one.metadata.compute_chars == len(TEXTS[0])
        ranks = tei_pb2_grpc.RerankStub(channel).Rerank(
            tei_pb2.RerankRequest(query=QUERY, texts=TEXTS, return_text=True), metadata=metadata
        )
        expected = plain("/rerank", {"query": QUERY, "texts": TEXTS})
        assert [(each.index, each.text) for each in ranks.ranks] == [
            (each["index"], TEXTS[each["index"]]) for each in expected
        ]
        found = tei_pb2_grpc.PredictStub(channel).Predict(tei_pb2.PredictRequest(inputs=TEXTS[0]), metadata=metadata)
        (likeliest, *_) = plain("/predict", {"inputs": TEXTS[0]})
        assert found.predictions[0].label == likeliest["label"]
        tokenize = tei_pb2_grpc.TokenizeStub(channel)
        tokens = tokenize.Tokenize(
            tei_pb2.EncodeRequest(inputs=TEXTS[0], add_special_tokens=True), metadata=metadata
        ).tokens
        ids = [token.id for token in tokens]
        decoded = tokenize.Decode(tei_pb2.DecodeRequest(ids=ids, skip_special_tokens=True), metadata=metadata)
        assert decoded.text == TEXTS[0]
        with pytest.raises(grpc.RpcError) as raised:
            embed.Embed(tei_pb2.EmbedRequest(inputs=TEXTS[0]))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("client", [name for name in SECTIONS if name != "MTEB"])
def test_the_page_shows_how(client: str, url: str, target: str, vectors: Any) -> None:
    found: dict[str, Any] = {"url": url, "key": KEY, "texts": TEXTS}
    run_python(Block("python", SECTIONS[client].replace("localhost:8001", target), 1, False), PAGE, found)
    close(found["vectors"], vectors(TEXTS, "document" if client == "Cohere" else None))
