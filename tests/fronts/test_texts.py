"""`weir embed serve --fronts 2` is one server of texts: what its fronts tokenize and answer, what they hand over, and what is counted."""

import base64
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy
import pytest
from tests.fronts.kit import Caller, Increase, calling, fronts_of, get, metric, outcomes, owners, workers_of
from tests.rings import subcases
from tests.served import Served, until
from tests.text_models import tiny
from tests.text_server.protocols.test_tei_grpc import Stub, made

from weir.client.grpc import GrpcClient

LONG = " ".join(["first", "do", "it", "then", "do", "it", "right"])  # more than the 8 tokens that the model reads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.sentence_model(folder / "small", max_length=8, prompts={"query": "do: "})
    tiny.model(folder / "plain", layers=2)
    return folder


@contextmanager
def serving(folder: Path, *arguments: object) -> Iterator[Served]:
    models = (folder / "small", f"org/other={folder / 'plain'}")
    settings = ("--no-calibrate", "--threads", 1, "--workers", 1, "--device-map", "cpu", "--cache", folder / "cache")
    with Served(*models, *settings, *arguments, command="embed serve") as running:
        running.until_listening()
        if "--grpc-port" in arguments:
            running.until_grpc()
        running.until_printed("dashboard")
        yield running


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(folder, "--fronts", 2, "--grpc-port", 0) as running:
        yield running


@pytest.fixture(scope="module")
def single(folder: Path) -> Iterator[Served]:
    with serving(folder, "--fronts", 1) as running:
        yield running


def body(**document: Any) -> bytes:
    return json.dumps(document).encode()


# What the fronts answer.
HOT: list[tuple[str, bytes, str]] = [
    ("/v1/embeddings", body(input="first do it"), ""),
    ("/v1/embeddings", body(input="first do it"), "X-Request-Id: mine\r\n"),
    ("/v1/embeddings", body(input="first do it"), "X-Request-Priority: -1\r\n"),
    ("/v1/embeddings", body(input=["first", "do", "first"], model="other"), ""),
    ("/v1/embeddings", body(input="first do it", dimensions=5), ""),
    ("/v1/embeddings", body(input=["first"], dimensions=5, encoding_format="base64"), ""),
    ("/v1/embeddings", body(input="do it", prompt_name="query"), ""),
    ("/v1/embeddings", body(input=LONG), ""),
    ("/v1/embeddings", body(input=["it", LONG], truncate=False), ""),
    ("/v1/embeddings", body(input=[[5, 6, 7], [8]]), ""),
    ("/v1/embeddings", body(input=["it"] * 16), ""),
    ("/v1/embeddings", body(input=[f"it {number}" for number in range(40)]), ""),
    ("/v1/embeddings", body(input="it", model="none"), ""),
    ("/v1/embeddings", body(input=""), ""),
    ("/v1/embeddings", b"{", ""),
    ("/v1/embeddings", b" " * 30_000 + body(input="it"), ""),
    ("/embed", body(inputs=["first", LONG]), ""),
    ("/embed", body(inputs="first", model="other"), ""),
    ("/similarity", body(inputs={"source_sentence": "do it", "sentences": ["right", "then"]}), ""),
    ("/tokenize", body(inputs="then do it"), ""),
    ("/decode", body(ids=[5, 6]), ""),
    ("/rerank", body(query="a", texts=["b"]), ""),
    ("/v2/embed", body(texts=["do", "it"], embedding_types=["float", "ubinary"]), ""),
    ("/embeddings", body(input=["do", "it"]), ""),
]
# What the dispatcher answers.
OTHER: list[tuple[str, bytes, str]] = [
    ("/v1/embeddings", body(input="it"), "X-Request-Timeout: never\r\n"),
    ("/v1/embeddings", b" " * 40_000 + body(input="it"), ""),
    ("/v1/embeddings", body(input=[f"it {number}" for number in range(1_000)]), ""),
    ("/encode", body(id=1, texts=["do", "it"]), ""),
    ("/infer/small", b'"do it"', ""),
    ("/v2/models/small/infer", body(inputs=[{"name": "input", "shape": [1], "datatype": "BYTES", "data": ["it"]}]), ""),
]
# The last digit of a number may be another in another batch.
VARYING = {
    "content-length",
    "x-compute-time",
    "x-total-time",
    "x-tokenization-time",
    "x-queue-time",
    "x-inference-time",
}


@subcases(("path", "sent", "headers"), HOT + OTHER)
def test_a_response_is_that_of_one_front(served: Served, single: Served, path: str, sent: bytes, headers: str) -> None:
    ours, theirs = outcomes(served, path, sent, headers), outcomes(single, path, sent, headers)
    for (status, fields, found), (expected_status, expected_fields, expected) in zip(ours, theirs, strict=True):
        assert status == expected_status
        assert {name: fields[name] for name in fields.keys() - VARYING} == {
            name: expected_fields[name] for name in expected_fields.keys() - VARYING
        }
        (document, numbers), (expected_document, expected_numbers) = parts_of(found), parts_of(expected)
        assert document == expected_document
        assert numbers == pytest.approx(expected_numbers, abs=1e-5)


def parts_of(answer: bytes) -> tuple[Any, list[float]]:
    """Return a JSON document without its numbers, of which rounding may change the last digits, and these."""
    numbers: list[float] = []
    document = json.loads(answer, parse_float=lambda text: numbers.append(float(text)))
    if isinstance(document, dict):
        if "result" not in document:  # of /encode it is the caller's
            document.pop("id", None)
            document.pop("created", None)
        for each in document.get("data", []):
            if isinstance(each["embedding"], str):  # base64
                numbers += numpy.frombuffer(base64.b64decode(each.pop("embedding")), numpy.float32).tolist()
    return document, numbers


def test_a_front_keeps_the_connection_of_what_it_answers(served: Served) -> None:
    front, _ = fronts_of(served)
    with calling(served, front) as caller:
        for path, sent, headers in HOT * 2:
            assert caller.call(path, sent, headers=headers)[0] in (200, 400, 404, 413, 422, 424)
        assert owners(served, caller) == [front.pid]


def test_what_a_front_does_not_answer_goes_on_at_the_dispatcher(served: Served) -> None:
    front, _ = fronts_of(served)
    for path, sent, headers in OTHER:
        with calling(served, front) as caller:
            caller.call(path, sent, headers=headers)
            until(lambda caller=caller: not owners(served, caller))  # type: ignore[misc]  # once the other process has it
            assert caller.call("/v1/embeddings", body(input="it"))[0] == 200


def test_every_grpc_call_goes_on_at_the_dispatcher(served: Served) -> None:
    with Caller(served.url) as caller:
        expected = json.loads(caller.call("/embed", body(inputs="first do it"))[1])[0]
    for _ in range(4):  # a channel is one connection, to any of the fronts
        with grpc.insecure_channel(served.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = Stub(channel)
            (streamed,) = stub.EmbedEmbedStream(iter([made("EmbedRequest", inputs="first do it", normalize=True)]))
            whole = stub.EmbedEmbed(made("EmbedRequest", inputs="first do it", normalize=True))
        for found in (streamed, whole):
            numpy.testing.assert_allclose(found.embeddings, expected, atol=1e-5)
    with GrpcClient(served.grpc) as client:
        arrays = client.infer("small", {"input": numpy.array([b"first do it"], object)})
        numpy.testing.assert_allclose(arrays["output"][0], expected, atol=1e-5)


def test_calls_texts_and_clients_are_counted_once(served: Served) -> None:
    more = Increase(served)
    for number, front in enumerate(fronts_of(served)):
        with calling(served, front) as caller:
            for _ in range(3):
                caller.call("/v1/embeddings", body(input=["do", LONG]), headers=f"X-Client-Id: {number}\r\n")
            caller.call("/v1/embeddings", body(input=""))
    until(lambda: more("weir_texts_total", model="small", frontend="openai") == 12)  # without another request
    assert more("weir_text_calls_total", model="small", frontend="openai", code="200") == 6
    assert more("weir_text_calls_total", frontend="openai", code="400") == 2
    assert more("weir_texts_truncated_total", model="small", frontend="openai") == 6
    assert more("weir_requests_total", model="small", code="200") == 12
    assert more("weir_tokens_total", model="small") == 6 * (3 + 8)
    assert more("weir_received_bytes_total", model="small") > 0 < more("weir_sent_bytes_total", model="small")
    assert json.loads(get(served, "/status/server"))["statistic"]["num_total_client"] >= 2


@contextmanager
def standing_still(served: Served) -> Iterator[None]:
    """While the block runs, the workers of the server stand still."""
    workers = workers_of(served)
    assert workers
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGCONT)


def until_waiting(served: Served, count: int) -> None:
    until(lambda: metric(served, "weir_waiting_requests", model="small") == count)


def test_texts_of_all_fronts_wait_in_one_queue_until_nobody_wants_them(folder: Path) -> None:
    """The server computes one text at a time, while twelve wait."""
    with serving(folder, "--fronts", 2, "--max-queue-size", 12, "--max-batch-size", 1) as served, ExitStack() as stack:
        first, second = fronts_of(served)
        kept, gone, *others = [stack.enter_context(calling(served, second)) for _ in range(8)]
        late, lost, *more = [stack.enter_context(calling(served, first)) for _ in range(8)]
        others += more
        with standing_still(served):
            kept.send("/v1/embeddings", body(input="do it"))
            until(lambda: metric(served, "weir_front_requests") == 1)  # it is with the worker
            status, answer = late.call("/embed", body(inputs=["it", "do"]), headers="X-Request-Timeout: 0.2\r\n")
            assert status == 504 and b"timeout=0.2 s, which came with the request" in answer, (status, answer)
            until_waiting(served, 0)
            for caller in others:
                caller.send("/v1/embeddings", body(input="do it"))
            until_waiting(served, 12)
            status, answer = late.call("/v1/embeddings", body(input="it"))
            assert status == 429 and b"max_queue_size=12" in answer, answer
        assert [caller.answer()[0] for caller in (kept, *others)] == [200] * 13
        with standing_still(served):
            kept.send("/v1/embeddings", body(input="do it"))
            until(lambda: metric(served, "weir_front_requests") == 1)
            lost.send("/v1/embeddings", body(input=["do", "it", "then"]))
            until_waiting(served, 3)
            gone.send("/embed", body(inputs="first"))
            until_waiting(served, 4)
            gone.socket.close()
            until_waiting(served, 3)
            first.kill()
            first.wait()
            until_waiting(served, 0)
        assert kept.answer()[0] == 200
        until(lambda: len(fronts_of(served)) == 2)
        for front in fronts_of(served):
            with calling(served, front) as caller:
                assert caller.call("/embed", body(inputs="first"))[0] == 200


def test_keys_the_log_and_a_drain_are_those_of_the_server(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    settings = ("--fronts", 2, "--max-queue-size", 12, "--max-batch-size", 1, "--api-key-file", keys, "--access-log")
    texts = ["do", "it", "do it", "then", "first", "right", "do it then", "then do it"]
    with serving(folder, *settings) as served, ExitStack() as stack:
        headers = "Authorization: Bearer secret\r\n"
        callers = [stack.enter_context(calling(served, front)) for front in fronts_of(served)]
        for caller in callers:
            assert caller.call("/v1/embeddings", body(input="it"))[0] == 401
            assert caller.call("/v1/embeddings", body(input="it"), headers=headers)[0] == 200
        for status in (401, 200) * 2:
            line = served.until_logged(r"http .*path=/v1/embeddings").string
            assert f"status={status}" in line and "client=127.0.0.1" in line
        with standing_still(served):
            for caller in callers:
                caller.send("/v1/embeddings", body(input=texts), headers=headers)
            # Of each front three are in the queue, and the others wait in it.
            until(lambda: metric(served, "weir_waiting_requests", headers, model="small") > 3)
            served.process.send_signal(signal.SIGTERM)
            served.until_logged("draining")
        assert [caller.answer()[0] for caller in callers] == [200, 200]
        assert served.process.wait(200) == 0


@pytest.mark.parametrize(("path", "status"), [("/v1/embeddings", 400), ("/embed", 422)])
def test_what_is_framed_wrongly_is_refused_in_the_form_of_its_api(
    served: Served, single: Served, path: str, status: int
) -> None:
    """Such a request is handed over to the dispatcher, which writes the error without the application."""

    def refusal(running: Served) -> bytes:
        host, _, port = running.url.partition("://")[2].partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZ\r\n".encode())
            with connection.makefile("rb") as answer:
                head, _, content = answer.read().partition(b"\r\n\r\n")
        assert int(head[9:12]) == status
        return content

    assert refusal(served) == refusal(single)
