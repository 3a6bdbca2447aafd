"""LangChain's client of OpenAI: told to send texts it gets their vectors; by itself it sends token ids of OpenAI's, and is told so."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.text_models import tiny

import weir.embedding
from weir.embedding import EmbeddingServer

pytestmark = [
    pytest.mark.torch,  # it is installed where torch is
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # LangChain's and torch's own
]

TEXTS = ["do it", "First do it, then do it right"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddingServer]:
    folder = tmp_path_factory.mktemp("models")
    small = tiny.sentence_model(folder / "small", "roberta")
    with weir.embedding.serve(
        small, port=0, executor="thread", threads=1, device_map=["cpu"], calibrate=False, cache=str(folder / "cache")
    ) as made:
        yield made


def expected(server: EmbeddingServer, texts: list[Any]) -> Any:
    import httpx

    return httpx.post(f"{server.url}/encode", json={"texts": texts}).json()["result"]


@pytest.fixture
def http() -> Iterator[Any]:
    """Yields what sends LangChain's requests, and the answers to them."""
    import httpx

    with httpx.Client(headers={"x-client-id": "a chain"}) as made:
        answers: list[httpx.Response] = []
        made.event_hooks = {"response": [answers.append]}
        yield made, answers


def stand_in(monkeypatch: pytest.MonkeyPatch, first: int = 0) -> Any:
    """Let a small vocabulary, each byte by its number, stand for that of OpenAI, which comes from the internet."""
    import tiktoken

    ranks = {bytes([byte]): first + byte for byte in range(256)}
    made = tiktoken.Encoding("cl100k_base", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {"cl100k_base": made})
    return made


def chain(server: EmbeddingServer, http: Any, **said: Any) -> Any:
    """Return LangChain's client."""
    from langchain_openai import OpenAIEmbeddings

    return OpenAIEmbeddings(base_url=f"{server.url}/v1", api_key="none", model="small", http_client=http[0], **said)


def test_with_texts_in_the_settings_it_gets_their_vectors(server: EmbeddingServer, http: Any) -> None:
    client = chain(server, http, check_embedding_ctx_length=False)
    np.testing.assert_allclose(client.embed_documents(TEXTS), expected(server, TEXTS), atol=1e-6)
    np.testing.assert_allclose(client.embed_query(TEXTS[0]), expected(server, TEXTS[:1])[0], atol=1e-6)


def test_by_itself_it_sends_ids_of_another_tokenizer_and_hears_of_it(
    server: EmbeddingServer, http: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = stand_in(monkeypatch)
    client = chain(server, http)
    vectors = client.embed_documents(TEXTS)
    client.embed_query(TEXTS[0])
    ids = [theirs.encode(text) for text in TEXTS]
    np.testing.assert_allclose(vectors, expected(server, ids), atol=1e-6)  # of other texts than were meant
    assert [answer.headers["x-weir-foreign-ids"] for answer in http[1]] == ["2", "1"]
    said = [record.getMessage() for record in caplog.records if "'a chain'" in record.getMessage()]
    assert len(said) == 1 and "check_embedding_ctx_length=False" in said[0]


def test_ids_that_the_model_has_not_are_refused(
    server: EmbeddingServer, http: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    stand_in(monkeypatch, 50_000)
    with pytest.raises(openai.BadRequestError, match=r"token id 0 is 50100: the model's vocabulary has 0 to 419"):
        chain(server, http).embed_query("do it")
