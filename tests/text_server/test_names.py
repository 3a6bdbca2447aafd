"""A model answers to its id on the hub, to its short name and to the names it was given, wherever a request names a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.rings import subcases
from tests.text_models import tiny
from tests.text_models.opening import SETTINGS

import weir.embedding
from weir.text_server import text_model
from weir.text_server.server import EmbeddingServer

IDS = ("acme/tiny", "other/tiny", "acme/second")
NAMES = ("acme/tiny", "tiny")  # of the first model
GIVEN = ("team/mine", "mine", "acme/second", "second")  # of the third

# Names of models that are directories. "twice" may mean two of them, and is no short name.
DIRECTORIES = ("local/fourth", "a/b/fifth", "one/twice", "two/twice", "local/mine")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server of three models of the hub, of which two have the same short name, and one has names of its own, and of directories."""
    home = tmp_path_factory.mktemp("hub")
    folders = {name: tiny.sentence_model(home / name, seed=seed) for seed, name in enumerate(IDS)}

    def local_directory(target: str, **_: Any) -> Path:
        return folders.get(target.partition("@")[0], Path(target))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_model, "local_directory", local_directory)
        targets: tuple[str, ...] = ("acme/tiny@main", "other/tiny", "team/mine,mine=acme/second")
        targets += tuple(f"{name}={folders['acme/second']}" for name in DIRECTORIES)
        with weir.embedding.serve(*targets, cache=str(home / "cache"), allow_control=True, **SETTINGS) as server:
            assert isinstance(server, EmbeddingServer)
            yield server.url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url) as client:
        yield client


def vectors_of(http: httpx.Client, model: str) -> Any:
    answer = http.post("/v1/embeddings", json={"input": "one text", "model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_bodies_may_have_any_of_its_names(http: httpx.Client) -> None:
    for names, listed in (
        (NAMES, "acme/tiny"), (("other/tiny",), "other/tiny"), (GIVEN, "team/mine"), (("local/fourth", "fourth"), "local/fourth"),
        (("a/b/fifth", "fifth"), "a/b/fifth"), (("local/mine",), "local/mine"),
    ):  # fmt: skip
        first = vectors_of(http, names[0])
        assert first["model"] == listed
        for name in names:
            assert vectors_of(http, name) == first
            same = http.post("/embed", json={"inputs": "one text", "model": name}).json()
            np.testing.assert_allclose(same[0], first["data"][0]["embedding"], atol=1e-6)


def test_models_of_one_short_name_are_not_mixed_up(http: httpx.Client) -> None:
    first, second = (vectors_of(http, name)["data"] for name in ("tiny", "other/tiny"))
    assert first != second and first == vectors_of(http, "acme/tiny")["data"]


@subcases(
    "name", [*NAMES, "acme%2Ftiny", "other/tiny", "other%2Ftiny", *GIVEN, "team%2Fmine", "fourth", "local/fourth"]
)
def test_paths_may_have_any_of_its_names_percent_encoded_or_plain(http: httpx.Client, name: str) -> None:
    tensor = {"inputs": [{"name": "input", "shape": [1], "datatype": "BYTES", "data": ["one text"]}]}
    bodies = {"/v2/models/{}/infer": tensor, "/infer/{}": "one text", "/infer/{}/batch": ["one text"]}
    for path, body in (bodies | {"/v2/repository/models/{}/load": {}}).items():
        answer = http.post(path.format(name), json=body)
        assert answer.status_code == 200, (path, answer.text)
    parts = [f"/v2/models/{name}{part}" for part in ("", "/ready", "/config", "/stats")]
    for path in (f"/v1/models/{name}", f"/models/{name}", f"/models/{name}/policy", *parts):
        assert http.get(path).status_code == 200, path


def test_lists_have_the_ids_and_their_owners(http: httpx.Client) -> None:
    cards = http.get("/v1/models").json()["data"]
    assert [(card["id"], card["owned_by"]) for card in cards] == [
        ("acme/tiny", "acme"), ("other/tiny", "other"), ("team/mine", "acme"),
        *((name, name.rpartition("/")[0]) for name in DIRECTORIES),
    ]  # fmt: skip
    info = http.get("/info").json()
    assert (info["model_id"], info["served_model_name"]) == ("acme/tiny", "acme/tiny")
    assert http.get("/v2/models").json()["models"] == ["tiny", "other/tiny", "team/mine", *DIRECTORIES]


def test_metrics_count_a_model_once_whatever_it_is_called(http: httpx.Client) -> None:
    for name in (*NAMES, "other/tiny"):
        vectors_of(http, name)
    metrics = http.get("/metrics").text
    assert "acme/tiny" not in metrics and 'model="other/tiny"' in metrics


def test_a_name_that_is_not_there_is_not_found(http: httpx.Client) -> None:
    for name in ("acme/none", "acme", "acme/tiny/more", "acme/tiny/ready", "twice"):
        assert http.post(f"/v2/models/{name}/infer", json={"inputs": []}).status_code == 404, name
        assert http.post("/v1/embeddings", json={"input": "x", "model": name}).status_code == 404, name
    unknown = http.post("/v2/models/acme/tiny/inferr", json={})
    assert unknown.status_code == 404 and "unknown path" in unknown.text
