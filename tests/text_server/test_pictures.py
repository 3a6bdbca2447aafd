"""Pictures in requests to a real server of two tiny models with towers and one without: every protocol, what is refused, what is counted."""

import base64
import http.server
import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.rings import subcases
from tests.served import Served
from tests.text_models import tiny, tiny_towers
from tests.text_models.opening import opened
from tests.text_server.served_texts import message_of
from tests.text_server.test_server import SETTINGS

import weir.embedding
from weir.client import EmbeddingClient
from weir.errors import InvalidRequest
from weir.images import Picture
from weir.text_server.pictures import read_upload

TEXT, OTHER = "first do it", "then do it right"
SIDE = 40  # pixels


def png(seed: int, width: int = 50, height: int = SIDE) -> bytes:
    """Return a picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


FILE, SECOND, LARGE = png(1), png(2), png(3, 200, 200)  # the last has more than LARGE_BYTES
PIXELS = np.asarray(Image.open(io.BytesIO(FILE)))
BASE64 = base64.b64encode(FILE).decode()
URL, LARGE_URL = (f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in (FILE, LARGE))
PART = {"type": "image_url", "image_url": {"url": URL}}
TEXT_PART = {"type": "text", "text": TEXT}


class Site(http.server.BaseHTTPRequestHandler):
    """Serves a picture at /a.png alone."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/a.png" else 404)
        self.send_header("Content-Length", str(len(FILE)))
        self.end_headers()
        self.wfile.write(FILE)

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    tiny.model(made / "plain")
    for kind in tiny_towers.KINDS:
        tiny_towers.model(made / kind, kind)
    return made


@pytest.fixture(scope="module")
def client(folder: Path, site: str) -> Iterator[httpx.Client]:
    models = [folder / name for name in ("plain", "clip", "siglip")]
    settings = {**SETTINGS, "cache": str(folder / "cache"), "max_image_pixels": 50_000, "allow_url": [site]}
    with weir.embedding.serve(*models, **settings) as server, httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def computed(model: Path, *items: Any) -> Any:
    """Return the vectors of texts and pictures, computed without a server."""
    encoder = opened(model, model.parent / "cache", device_map=["cpu"])
    return np.stack(encoder.predict(encoder.preprocess_batch([*items])))


@pytest.fixture(scope="module")
def vectors(folder: Path) -> dict[str, Any]:
    """The vectors of two pictures and two texts by each model."""
    return {kind: computed(folder / kind, Picture(FILE), Picture(SECOND), TEXT, OTHER) for kind in tiny_towers.KINDS}


def _openai(document: Any) -> Any:
    return [each["embedding"] for each in document["data"]]


def _cohere(document: Any) -> Any:
    return document["embeddings"]["float"]


def _kserve(document: Any) -> Any:
    return np.reshape(document["outputs"][0]["data"], document["outputs"][0]["shape"])


def _tensor(shape: list[int], data: Any, datatype: str = "UINT8") -> dict[str, Any]:
    return {"inputs": [{"name": "image", "shape": shape, "datatype": datatype, "data": data}]}


def _native(document: Any) -> Any:
    return [each["output"] for each in document]


_FORM = {"files": [("a", ("a.png", FILE)), ("input", (None, TEXT))]}
_KSERVE = "/v2/models/clip/infer"
# A path, what is sent there, how vectors are found in the response, and whether they are those of the picture and the text, or of the picture alone.
PROTOCOLS: list[tuple[str, dict[str, Any], Callable[[Any], Any], bool]] = [
    ("/v1/embeddings", {"json": {"input": [PART, TEXT_PART]}}, _openai, True),
    ("/v1/embeddings", {"json": {"input": [{"type": "image_url", "image_url": URL}, TEXT]}}, _openai, True),
    ("/v1/embeddings", {"json": {"input": [{"image": BASE64}, {"text": TEXT}]}}, _openai, True),
    ("/v1/embeddings", {"json": {"input": {"image": URL}}}, _openai, False),
    ("/v1/embeddings", {"json": {"messages": [{"role": "user", "content": [PART]}]}}, _openai, False),
    ("/v1/embeddings", {"content": FILE, "headers": {"content-type": "image/png"}}, _openai, False),
    ("/v1/embeddings", {**_FORM, "data": {"model": "clip", "dimensions": "24"}}, _openai, True),
    ("/v1/embeddings", {"files": _FORM["files"][:1], "data": {"modality": "image"}}, _openai, False),
    ("/v1/embeddings", {"json": {"input": [PART, TEXT], "outputs": ["dense"]}}, _openai, True),
    ("/embeddings", {"json": {"input": [URL], "modality": "image"}}, _openai, False),
    ("/embeddings", {"json": {"input": URL, "modality": "image"}}, _openai, False),
    ("/embeddings", {"json": {"messages": [{"role": "user", "content": [PART]}]}}, _openai, False),
    ("/encode", {"json": {"texts": [{"image": URL}, TEXT]}}, lambda document: document["result"], True),
    ("/encode", {"content": FILE, "headers": {"content-type": "image/PNG; q=1"}}, lambda document: document["result"], False),
    ("/post", {"json": {"data": [{"uri": URL}, {"text": TEXT}], "execEndpoint": "/"}}, _openai, True),
    ("/post", {"json": {"data": [{"blob": BASE64}]}}, _openai, False),
    ("/infer/clip", {"json": {"image": BASE64}}, lambda document: [document], False),
    ("/infer/clip/batch", {"json": [{"image": URL, "dimensions": None}, TEXT]}, _native, True),
    ("/embed", {"json": {"inputs": [PART, TEXT]}}, lambda document: document, True),
    ("/v2/embed", {"json": {"images": [URL], "input_type": "image"}}, _cohere, False),
    ("/v2/embed", {"json": {"inputs": [{"content": [PART]}, {"content": [TEXT_PART]}]}}, _cohere, True),
    (_KSERVE, {"json": _tensor([SIDE, 50, 3], PIXELS.ravel().tolist())}, _kserve, False),
    (_KSERVE, {"json": _tensor([1, SIDE, 50, 3], PIXELS.ravel().tolist())}, _kserve, False),
    (_KSERVE, {"json": _tensor([1], [BASE64], "BYTES")}, _kserve, False),
]  # fmt: skip


@subcases(("path", "sent", "found", "with_text"), PROTOCOLS)
def test_every_protocol_takes_pictures(
    client: httpx.Client,
    vectors: dict[str, Any],
    path: str,
    sent: dict[str, Any],
    found: Callable[[Any], Any],
    with_text: bool,
) -> None:
    response = client.post(path, **sent)
    assert response.status_code == 200, response.text
    expected = vectors["clip"][[0, 2] if with_text else [0]]
    np.testing.assert_allclose(np.array(found(response.json()), float), expected, atol=1e-5)


def test_only_a_model_that_reads_pictures_describes_them_as_items(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    items = {name: str(paths[f"/infer/{name}"]["post"]["requestBody"]) for name in ("plain", "clip")}
    assert {name: "ImageItem" in described for name, described in items.items()} == {"plain": False, "clip": True}


def test_files_come_as_tensors_of_bytes(client: httpx.Client, vectors: dict[str, Any]) -> None:
    import tritonclient.http as triton

    file = triton.InferInput("image", [2], "BYTES")
    file.set_data_from_numpy(np.array([FILE, SECOND], np.object_))
    with triton.InferenceServerClient(str(client.base_url.netloc, "ascii")) as made:
        found = made.infer("clip", [file]).as_numpy("output")
        described = made.get_model_metadata("clip")["inputs"]
    np.testing.assert_allclose(found, vectors["clip"][:2], atol=1e-5)
    assert described[1] == {"name": "image", "datatype": "UINT8", "shape": [-1, -1, -1, 3]}


def test_pictures_are_fetched_from_the_hosts_that_are_allowed(
    client: httpx.Client, vectors: dict[str, Any], site: str
) -> None:
    part = {"image": f"http://{site}/a.png"}
    found = client.post("/v1/embeddings", json={"input": [TEXT, part, part]}).json()
    np.testing.assert_allclose(_openai(found), vectors["clip"][[2, 0, 0]], atol=1e-5)
    items = [part, {"image": f"http://{site}/b.png"}, TEXT, part]
    first, wrong, text, last = client.post("/infer/clip/batch", json=items).json()
    np.testing.assert_allclose([each["output"] for each in (first, text, last)], vectors["clip"][[0, 2, 0]], atol=1e-5)
    assert wrong["code"] == 400 and "status 404" in wrong["error"]["message"]
    for url, rule in ((f"http://{site}/b.png", "status 404"), ("http://example.com/a.png", "is not allowed")):
        wrong = client.post("/v1/embeddings", json={"input": [TEXT, {"image": url}]})
        assert wrong.status_code == 400
        assert message_of(wrong).startswith("input[1]: ") and rule in message_of(wrong)


def _cosines(found: Any) -> Any:
    return found @ found.T


def test_pictures_and_texts_are_compared(client: httpx.Client, vectors: dict[str, Any]) -> None:
    first, others = {"image": URL}, [{"text": TEXT}, {"image": base64.b64encode(SECOND).decode()}, OTHER]
    pair = {"source_sentence": first, "sentences": others}
    score = {"data_1": {"content": [PART]}, "data_2": [TEXT, OTHER]}
    for kind, scale, bias in (("clip", np.exp(2), 0.0), ("siglip", np.exp(2), -3.0)):
        cosines = _cosines(vectors[kind])[0, [2, 1, 3]]
        logits = scale * cosines + bias
        shares = np.exp(logits) / np.exp(logits).sum() if kind == "clip" else 1 / (1 + np.exp(-logits))
        similar = client.post("/similarity", json={"inputs": pair, "model": kind}).json()
        np.testing.assert_allclose(similar, cosines, atol=1e-5)
        for path, raw in (("/rerank", False), ("/rerank", True), ("/v2/rerank", False)):
            body = {"query": first, "documents": others, "model": kind, "return_documents": True, "raw_scores": raw}
            ranks = client.post(path, json=body).json()["results"]
            assert [each["index"] for each in ranks] == np.argsort(-cosines).tolist()
            scores = (logits if raw else shares)[[each["index"] for each in ranks]]
            np.testing.assert_allclose([each["relevance_score"] for each in ranks], scores, atol=1e-4)
        scored = client.post("/score", json={**score, "model": kind}).json()["data"]
        np.testing.assert_allclose([each["score"] for each in scored], cosines[[0, 2]], atol=1e-5)


def test_matches_are_ranked_as_clip_as_service_does(client: httpx.Client, vectors: dict[str, Any]) -> None:
    matches = [{"text": TEXT}, {"uri": URL, "id": "own"}, {"text": OTHER}]
    body = {"data": [{"blob": BASE64, "matches": matches}, {"text": OTHER, "matches": [{"text": OTHER}]}]}
    for kind in tiny_towers.KINDS:
        cosines = _cosines(vectors[kind])[0, [2, 0, 3]]
        logits = np.exp(2) * cosines - (3 if kind == "siglip" else 0)
        shares = np.exp(logits) / np.exp(logits).sum() if kind == "clip" else 1 / (1 + np.exp(-logits))
        for path, more in (("/rank", {}), ("/post", {"execEndpoint": "/rank"})):
            first, second = client.post(path, json={**body, **more, "model": kind}).json()["data"]
            assert [each["text"] for each in second["matches"]] == [OTHER]
            for place, found in zip(np.argsort(-cosines), first["matches"], strict=True):
                assert found["text"] == matches[place].get("text") and (place != 1 or found["id"] == "own")
                scores = [found["scores"][name]["value"] for name in ("clip_score", "clip_score_cosine")]
                np.testing.assert_allclose(scores, [shares[place], cosines[place]], atol=1e-5)


def test_labels_are_chosen_without_training(client: httpx.Client, folder: Path, vectors: dict[str, Any]) -> None:
    labels, template = ["first", "right"], "do {} it"
    for kind, scale, bias in (("clip", np.exp(2), 0.0), ("siglip", np.exp(2), -3.0)):
        hypotheses = computed(folder / kind, *(template.replace("{}", label) for label in labels))
        logits = scale * vectors[kind][:2] @ hypotheses.T + bias
        whole = np.exp(logits).sum(axis=1, keepdims=True)
        shares = np.exp(logits) / whole if kind == "clip" else 1 / (1 + np.exp(-logits))
        pictures = [{"image": URL}, {"image": base64.b64encode(SECOND).decode()}]
        body = {"input": pictures, "labels": labels, "hypothesis_template": template, "model": kind}
        for raw, scores in ((False, shares), (True, logits)):
            data = client.post("/classify", json={**body, "raw_scores": raw}).json()["data"]
            for row, expected in zip(data, scores, strict=True):
                assert [each["label"] for each in row] == [labels[place] for place in np.argsort(-expected)]
                np.testing.assert_allclose([each["score"] for each in row], -np.sort(-expected), atol=1e-4)


_BROKEN = {"image": base64.b64encode(b"no picture").decode()}
_CUT = {"image": base64.b64encode(FILE[:200]).decode()}
_CLASSIFY = {"input": [{"image": URL}], "labels": ["a"]}
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/embeddings", {"json": {"input": [TEXT, _BROKEN]}}, 400, "input[1]: is no image in a format that is read"),
    ("/v1/embeddings", {"json": {"input": [TEXT, _CUT]}}, 400, "input[1]: this PNG cannot be decoded"),
    ("/v1/embeddings", {"json": {"input": [{"image": "a"}]}}, 400, "input[0].image: is not base64"),
    ("/v1/embeddings", {"json": {"input": [{"image": 3}]}}, 400, "input[0].image: must be an image in base64"),
    ("/v1/embeddings", {"json": {"input": [{"image": URL, "text": TEXT}]}}, 400, "input[0]: must be a text, is {'image'"),
    ("/v1/embeddings", {"json": {"input": [PART], "model": "plain"}}, 400, "model 'plain' reads no images"),
    ("/v1/embeddings", {"json": {"messages": [{"content": [PART, TEXT_PART]}]}}, 400, "messages={'content'"),
    ("/v1/embeddings", {"json": {"input": [PART], "modality": "audio"}}, 400, "modality='audio': must be text or image"),
    ("/v1/embeddings", {"content": b"x", "headers": {"content-type": "image/png"}}, 400, "input[0]: is no image"),
    ("/v1/embeddings", {"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "Content-Type"),
    ("/v1/embeddings", {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=a"}}, 400, "body: must be"),
    ("/v1/embeddings", {"files": [("a", ("a.png", FILE))], "data": {"colour": "red"}}, 400, "colour"),
    ("/v1/embeddings", {"files": [("input", (None, b"\xff"))]}, 400, "'input': must be a text in UTF-8"),
    ("/v1/embeddings", {"json": {"input": [{"image": f"data:text/plain;base64,{BASE64}"}]}}, 400, "input[0].image: states the type 'text/plain': must be an image"),
    ("/v1/embeddings", {"json": {"input": [{"type": "image_url", "text": TEXT}]}}, 400, "input[0].type='image_url': must be text or input_text, as the part has `text`"),
    ("/v1/embeddings", {"json": {"input": [{"type": "text", "image": BASE64}]}}, 400, "input[0].type='text': must be image_url"),
    ("/v1/embeddings", {"json": {"input": [TEXT_PART], "modality": "image"}}, 400, "input[0]: must be an image in base64, or its URL, is {'type'"),
    ("/v1/embeddings", {"files": [("a", ("a.txt", FILE))]}, 400, "input[0]: states the type 'text/plain': must be an image"),
    ("/infer/clip", {"json": _CUT}, 400, "this PNG cannot be decoded"),
    ("/infer/clip", {"json": {"image": 3}}, 400, "image: must be an image in base64"),
    ("/infer/clip", {"json": {"image": BASE64, "text": TEXT}}, 400, "text"),
    ("/infer/plain", {"json": {"image": BASE64}}, 400, "model 'plain' reads no images"),
    ("/rank", {"json": {"data": [{"text": TEXT}]}}, 400, "data[0].matches: must not be empty"),
    ("/rank", {"json": {"data": [{"text": TEXT, "matches": [{"text": OTHER}, {"blob": "a"}]}]}}, 400, "data[0].matches[1].blob: is not base64"),
    ("/rank", {"json": {"data": [{"text": TEXT, "matches": [{"text": OTHER}, {"blob": BASE64[:400]}]}]}}, 400, "data[0].matches[1]: this PNG"),
    ("/similarity", {"json": {"inputs": {"source_sentence": TEXT, "sentences": [TEXT, _CUT]}, "model": "clip"}}, 422, "inputs.sentences[1]: this PNG"),
    ("/post", {"json": {"data": [{"text": TEXT, "uri": URL}]}}, 400, "data[0]: must have one of text, uri and blob"),
    ("/encode", {"content": FILE, "headers": {"content-type": "text/plain"}}, 415, "Content-Type 'text/plain'"),
    ("/v2/embed", {"json": {"images": [LARGE_URL, "a"]}}, 400, "images[1]: is not base64"),
    ("/v2/embed", {"json": {"images": [URL, BASE64[:400]]}}, 400, "images[1]: this PNG cannot be decoded"),
    ("/v2/embed", {"json": {"inputs": [{"content": [PART, TEXT_PART]}]}}, 400, "inputs[0]={'content'"),
    ("/v2/rerank", {"json": {"query": TEXT, "documents": [_BROKEN]}}, 400, "documents[0]: is no image"),
    ("/v2/rerank", {"json": {"query": _BROKEN, "documents": [TEXT]}}, 400, "query[0]: is no image"),
    ("/v2/rerank", {"json": {"query": TEXT, "documents": [PART], "model": "plain"}}, 400, "model 'plain': has no task rerank"),
    ("/score", {"json": {"queries": TEXT, "documents": [_BROKEN, TEXT], "model": "clip"}}, 400, "documents[0]: is no image"),
    ("/classify", {"json": {**_CLASSIFY, "model": "plain"}}, 400, "model 'plain' reads no images"),
    ("/classify", {"json": {**_CLASSIFY, "hypothesis_template": "a"}}, 400, "hypothesis_template='a': must have {} once"),
    ("/classify", {"json": {"input": ["a"] * 400, "labels": ["b"] * 400}}, 400, "labels: has 400 for each of 400"),
    (_KSERVE, {"json": _tensor([2, 2], [1, 2, 3, 4])}, 400, "tensor 'image': has datatype 'UINT8' and shape [2, 2]"),
    (_KSERVE, {"json": _tensor([1], ["a"], "BYTES")}, 400, "tensor 'image'[0]: is not base64"),
    (_KSERVE, {"json": _tensor([1], ["\u00e9"], "BYTES")}, 400, "tensor 'image'[0]: is no image"),
    ("/v2/models/plain/infer", {"json": _tensor([1], ["a"], "BYTES")}, 400, "tensors 'image': must be 'input' alone"),
]  # fmt: skip


@subcases(("path", "sent", "status", "rule"), REFUSED)
def test_what_is_no_picture_is_refused_by_its_place(
    client: httpx.Client, path: str, sent: dict[str, Any], status: int, rule: str
) -> None:
    response = client.post(path, **sent)
    document = response.json()
    message = document["error"] if isinstance(document.get("error"), str) else message_of(response)
    assert (response.status_code, rule in message) == (status, True), response.text


def test_the_client_sends_files_arrays_and_images_of_pillow(
    client: httpx.Client, vectors: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(FILE)
    with EmbeddingClient(str(client.base_url), model="clip") as own:
        images = [FILE, tmp_path / "a.png", str(tmp_path / "a.png"), PIXELS, Image.open(io.BytesIO(FILE))]
        np.testing.assert_allclose(own.encode(images=images), vectors["clip"][[0] * 5], atol=1e-5)
        np.testing.assert_allclose(own.encode([TEXT], images=[SECOND]), vectors["clip"][[2, 1]], atol=1e-5)
        with pytest.raises(InvalidRequest, match=r"texts\[1\]: is no image in a format that is read"):
            own.encode([TEXT], images=[b"no image"])


def test_large_pictures_are_refused_before_they_are_decoded(client: httpx.Client) -> None:
    large = base64.b64encode(png(1, 300, 200)).decode()
    wrong = client.post("/v1/embeddings", json={"input": [{"image": URL}, {"image": large}]})
    assert (wrong.status_code, message_of(wrong)) == (
        400,
        "input[1]: 300 × 200 pixels; at most 0.05 M (max_image_pixels), of which a row counts as 8 at least",
    )


def test_equal_pictures_are_computed_once_and_counted_each(client: httpx.Client, vectors: dict[str, Any]) -> None:
    def samples(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") and "siglip" in line)

    # A batch has pictures or texts.
    names = ("weir_images_total", "weir_texts_total", "weir_requests_total", "weir_batches_total")
    count = samples(names[0])
    client.post("/infer/siglip", json={"image": URL}).raise_for_status()
    assert samples(names[0]) == count + 1
    before = [samples(name) for name in names]
    body = {"input": [{"image": URL}, TEXT, {"image": BASE64}], "model": "siglip"}
    found = client.post("/v1/embeddings", json=body).json()
    np.testing.assert_allclose(_openai(found), vectors["siglip"][[0, 2, 0]], atol=1e-5)
    assert [samples(name) - old for name, old in zip(names, before, strict=True)] == [2, 3, 2, 2]
    capabilities = {each["id"]: each["capabilities"] for each in client.get("/models").json()["data"]}
    assert capabilities["siglip"] == ["embed", "rerank", "image_embed"] and capabilities["plain"] == ["embed"]


def test_fronts_leave_pictures_to_the_dispatcher_and_fetch_nothing(folder: Path, vectors: dict[str, Any]) -> None:
    settings = ("--no-calibrate", "--threads", 1, "--workers", 1, "--device-map", "cpu", "--cache", folder / "cache")
    with Served(folder / "clip", *settings, "--fronts", 2, command="embed serve") as running:
        running.until_listening()
        running.until_printed("dashboard")
        with httpx.Client(base_url=running.url, timeout=60) as fronts:
            for body in ([{"image": URL}, TEXT], [TEXT, {"image": LARGE_URL}]):
                found = _openai(fronts.post("/v1/embeddings", json={"input": body}).json())
                np.testing.assert_allclose(found[body.index(TEXT)], vectors["clip"][2], atol=1e-5)
            item = fronts.post("/infer/clip", json={"image": URL}).json()
            np.testing.assert_allclose(item, vectors["clip"][0], atol=1e-5)
            wrong = fronts.post("/v1/embeddings", json={"input": {"image": "https://example.com/a.png"}})
    assert "no URL is fetched here" in json.loads(wrong.content)["error"]["message"]


@subcases(("head", "found"), [
    ('Content-Disposition: form-data; name="input"', [TEXT]),
    ("content-disposition: form-data; name=input", [TEXT]),
    ('Content-Disposition: form-data; name="a"; filename="name=b.png"\r\nContent-Type: application/octet-stream', [Picture(TEXT.encode())]),
    ("Content-Disposition: form-data; filename*=UTF-8''a.png; name=a", [Picture(TEXT.encode())]),
    ('Content-Disposition: form-data; name="filename"', []),
])  # fmt: skip
def test_parts_are_files_or_fields_as_their_heads_state(head: str, found: list[Any]) -> None:
    for stated in ('multipart/form-data; boundary="a b"', "Multipart/Form-Data; charset=utf-8; Boundary=a b "):
        body = f"--a b\r\n{head}\r\n\r\n{TEXT}\r\n--a b--\r\n".encode()
        assert read_upload(stated, body, "input", 1)["input"] == found
