"""TEI's gRPC services on servers of tiny models, called with a stub of the messages as a client's compiled ones are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tests.rings import subcases
from tests.text_models import tiny
from tests.text_server.test_server import SETTINGS

import weir.embedding
from weir.text_server.protocols.tei_grpc import SERVICES
from weir.wire.kserve_grpc import message, methods

TEXTS = ["first do it", "then do it right", "it"]


class Stub:
    """Calls the methods of TEI by name."""

    def __init__(self, channel: grpc.Channel) -> None:
        for service in SERVICES:
            for method in methods(service):
                ways = ["stream" if each else "unary" for each in (method.requests_stream, method.responses_stream)]
                codecs = method.request.SerializeToString, method.response.FromString
                call = getattr(channel, "_".join(ways))(method.path, *codecs)
                setattr(self, f"{service.rpartition('.')[2]}{method.name}", call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def made(name: str, **fields: Any) -> Any:
    """Return a message of TEI."""
    return message(f"tei.v1.{name}")(**fields)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("models")
    tiny.sentence_model(folder / "plain", max_length=8, normalize=False, prompts={"query": "do: "})
    tiny.model(folder / "ranker", labels=1)
    tiny.model(folder / "labeller", labels=3)
    models = [folder / name for name in ("plain", "labeller", "ranker")]
    with weir.embedding.serve(*models, cache=str(folder / "cache"), grpc_port=0, **SETTINGS) as server:
        http, address = server.addresses[:2]
        yield http, address.removeprefix("grpc://")


@pytest.fixture
def stub(urls: tuple[str, str]) -> Iterator[Stub]:
    with grpc.insecure_channel(urls[1]) as channel:
        yield Stub(channel)


def over_http(urls: tuple[str, str], path: str, document: Any) -> Any:
    """Return what the same question is answered over HTTP."""
    return httpx.post(urls[0] + path, json=document).raise_for_status().json()


def test_vectors_are_those_of_http(stub: Stub, urls: tuple[str, str]) -> None:
    expected = over_http(urls, "/embed", {"inputs": TEXTS})
    found = [stub.EmbedEmbed(made("EmbedRequest", inputs=text, normalize=True)) for text in TEXTS]
    np.testing.assert_allclose([each.embeddings for each in found], expected, atol=1e-6)
    metadata = found[0].metadata
    assert (metadata.compute_chars, metadata.compute_tokens) == (11, 5)
    assert metadata.total_time_ns >= metadata.inference_time_ns > 0
    whole = np.array(stub.EmbedEmbed(made("EmbedRequest", inputs=TEXTS[0])).embeddings)
    assert np.linalg.norm(whole) != pytest.approx(1, abs=1e-3)
    prompted = stub.EmbedEmbed(made("EmbedRequest", inputs="it", prompt_name="query", normalize=True)).embeddings
    np.testing.assert_allclose(prompted, over_http(urls, "/embed", {"inputs": "do: it"})[0], atol=1e-6)


def test_a_stream_is_answered_in_order(stub: Stub, urls: tuple[str, str]) -> None:
    texts = [f"{'do it ' * (place % 4)}first" for place in range(600)]  # more than may be under way
    expected = over_http(urls, "/embed", {"inputs": texts})
    requests = (made("EmbedRequest", inputs=text, normalize=True, truncate=True) for text in texts)
    np.testing.assert_allclose([each.embeddings for each in stub.EmbedEmbedStream(requests)], expected, atol=1e-6)


def test_the_first_error_ends_a_stream(stub: Stub) -> None:
    answers = stub.EmbedEmbedStream(iter([made("EmbedRequest", inputs=text) for text in ("it", "", "it")]))
    assert len(next(answers).embeddings) == tiny.HIDDEN
    with pytest.raises(grpc.RpcError) as caught:
        next(answers)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "inputs: must not be empty"


def test_texts_are_ranked(stub: Stub, urls: tuple[str, str]) -> None:
    expected = over_http(urls, "/rerank", {"query": "do it", "texts": TEXTS, "raw_scores": True, "return_text": True})
    said = {"query": "do it", "raw_scores": True, "return_text": True, "truncate": True}
    together = stub.RerankRerank(made("RerankRequest", texts=TEXTS, **said))
    streamed = stub.RerankRerankStream(iter([made("RerankStreamRequest", text=text, **said) for text in TEXTS]))
    for found in (together, streamed):
        assert [(each.index, each.text) for each in found.ranks] == [(each["index"], each["text"]) for each in expected]
        np.testing.assert_allclose(
            [each.score for each in found.ranks], [each["score"] for each in expected], atol=1e-6
        )
    plain = stub.RerankRerank(made("RerankRequest", query="do it", texts=TEXTS)).ranks
    assert not plain[0].HasField("text") and 0 < plain[0].score < 1
    with pytest.raises(grpc.RpcError, match="the stream has no request"):
        stub.RerankRerankStream(iter([]))


def test_texts_and_pairs_are_labelled(stub: Stub, urls: tuple[str, str]) -> None:
    expected = over_http(urls, "/predict", {"inputs": [["it"], ["do", "it"]]})
    one = stub.PredictPredict(made("PredictRequest", inputs="it"))
    pair = stub.PredictPredictPair(made("PredictPairRequest", inputs=["do", "it"]))
    streamed = list(stub.PredictPredictPairStream(iter([made("PredictPairRequest", inputs=["do", "it"])] * 3)))
    for found, wanted in zip((one, pair, *streamed), (*expected, *[expected[1]] * 3), strict=True):
        assert [each.label for each in found.predictions] == [each["label"] for each in wanted]
        np.testing.assert_allclose(
            [each.score for each in found.predictions], [each["score"] for each in wanted], atol=1e-6
        )
    with pytest.raises(grpc.RpcError, match="inputs: has 1 texts, must have 2"):
        stub.PredictPredictPair(made("PredictPairRequest", inputs=["do"]))


def test_tokens_are_shown_and_put_together_again(stub: Stub) -> None:
    found = stub.TokenizeTokenize(made("EncodeRequest", inputs="do it", add_special_tokens=True)).tokens
    assert [each.text for each in found] == ["[CLS]", "do", "it", "[SEP]"]
    assert [each.HasField("start") for each in found] == [False, True, True, False] and found[2].start == 3
    ids = [each.id for each in found]
    assert stub.TokenizeDecode(made("DecodeRequest", ids=ids, skip_special_tokens=True)).text == "do it"
    many = stub.TokenizeDecodeStream(iter([made("DecodeRequest", ids=ids)] * 2))
    assert [each.text for each in many] == ["[CLS] do it [SEP]"] * 2


def test_calls_are_counted_as_those_of_http(stub: Stub, urls: tuple[str, str]) -> None:
    def counted() -> dict[str, float]:
        lines = httpx.get(urls[0] + "/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    calls = [f'weir_text_calls_total{{code="{code}",frontend="tei",model="{model}"}}'
             for code, model in ((200, "plain"), (400, "plain"), (400, ""))]  # fmt: skip
    received = 'weir_received_bytes_total{frontend="tei",model="plain"}'
    before, requests = counted(), (made("EncodeRequest", inputs="do it"), made("DecodeRequest", ids=[5]))
    stub.TokenizeTokenize(requests[0])
    stub.TokenizeDecode(requests[1])
    with pytest.raises(grpc.RpcError):
        stub.EmbedEmbed(made("EmbedRequest", inputs="it", prompt_name="other"))
    with grpc.insecure_channel(urls[1]) as channel, pytest.raises(grpc.RpcError, match="must be a tei"):
        channel.unary_unary("/tei.v1.Embed/Embed", None, None)(b"no message")
    after = counted()
    assert [after[name] - before.get(name, 0) for name in calls] == [2, 1, 1]
    assert after[received] - before.get(received, 0) == sum(each.ByteSize() for each in requests)


def test_the_first_model_is_described(stub: Stub) -> None:
    info = stub.InfoInfo(made("InfoRequest"))
    assert (info.model_id, info.model_type, info.max_input_length) == ("plain", 0, 8)
    assert not info.HasField("sha") and info.model_dtype == "float32"


@subcases(("call", "request_of", "code", "text"), [
    ("EmbedEmbed", ("EmbedRequest", {"inputs": "do it " * 9}), "INVALID_ARGUMENT", "inputs[0]: the text has more than the 8 tokens"),
    ("EmbedEmbed", ("EmbedRequest", {"inputs": "a", "prompt_name": "qury"}), "INVALID_ARGUMENT", "unknown prompt; available: query"),
    ("EmbedEmbedSparse", ("EmbedSparseRequest", {"inputs": "a"}), "INVALID_ARGUMENT", "has no task embed_sparse; it has embed, embed_all"),
    ("RerankRerank", ("RerankRequest", {"query": "a"}), "INVALID_ARGUMENT", "texts: has 0 texts"),
    ("TokenizeDecode", ("DecodeRequest", {}), "INVALID_ARGUMENT", "ids: must not be empty"),
    ("TokenizeDecode", ("DecodeRequest", {"ids": [4_000_000]}), "INVALID_ARGUMENT", "token id 0 is 4000000"),
    ("TokenizeTokenize", ("EncodeRequest", {}), "INVALID_ARGUMENT", "inputs: must not be empty"),
])  # fmt: skip
def test_what_is_wrong_is_named(stub: Stub, call: str, request_of: Any, code: str, text: str) -> None:
    name, fields = request_of
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, call)(made(name, **fields))
    assert caught.value.code() is grpc.StatusCode[code] and text in (caught.value.details() or "")


def test_a_server_with_a_key_asks_for_it(tmp_path: Path) -> None:
    model = tiny.sentence_model(tmp_path / "model")
    (tmp_path / "key").write_text("a-key-that-is-long-enough")
    (tmp_path / "key").chmod(0o600)
    with weir.embedding.serve(
        model, cache=str(tmp_path / "cache"), grpc_port=0, api_key_file=str(tmp_path / "key"), **SETTINGS
    ) as server, grpc.insecure_channel(server.addresses[1].removeprefix("grpc://")) as channel:  # fmt: skip
        stub, request = Stub(channel), made("EmbedRequest", inputs="it")
        with pytest.raises(grpc.RpcError) as caught:
            stub.EmbedEmbed(request)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer a-key-that-is-long-enough"),)
        assert len(stub.EmbedEmbed(request, metadata=metadata).embeddings) == tiny.HIDDEN
