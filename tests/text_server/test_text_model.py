"""Several text models of one server: they share workers and one budget of threads, and the server says what each of them takes."""

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.images.pictures import drawn
from tests.rings import spread, subcases
from tests.text_models import tiny, tiny_towers

import weir.embedding
from weir.errors import SettingsError
from weir.text_models import ComputingSettings, TextSettings
from weir.text_models.model import SAMPLE, ImageTower, TextTower
from weir.text_models.texts import EncodedImage, Tokens
from weir.text_server.calibration import Budget, Measurement, Size, no_progress
from weir.text_server.text_model import ServedTextModel, TextModelSpec, with_shares
from weir.text_server.texts import TextTask
from weir.workers.cpus import cpu_count


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two towers."""
    return tiny_towers.model(tmp_path_factory.mktemp("towers"))


def spec(**settings: Any) -> TextModelSpec:
    computing = ComputingSettings(device_map=["cpu"])
    return TextModelSpec("small", Path("small"), TextSettings(), computing, settings)


@subcases(("stated", "cpus", "expected"), [
    ([{}], 8, [(8, 1, 0)]),
    ([{}, {}], 8, [(8, 1, 1), (8, 1, 1)]),
    ([{}, {"spin": 0.0}, {"spin": 0.0}], 8, [(4, 1, 0), (4, 1, 1), (4, 1, 1)]),
    ([{"executor": "thread"}, {"executor": "thread"}], 8, [(1, 4, 0), (1, 4, 0)]),
    ([{}, {"spin": 0.0}, {"spin": 0.1}], 2, [(1, 1, 0), (1, 1, 0), (1, 1, 0)]),
    ([{"workers": 2, "threads": 3}, {}], 8, [(2, 3, 0), (2, 1, 0)]),
    ([{"workers": 3}, {}, {}], 8, [(3, 2, 0), (5, 1, 1), (5, 1, 1)]),
    ([{"device_group": "a"}, {}, {"device_group": "a"}, {}, {"device_group": "b"}], 9, [(3, 1, 1), (3, 1, 1), (3, 1, 1), (3, 1, 1), (3, 1, 0)]),
    ([{"device_group": "a"}, {"device_group": "a", "threads": 1}], 2, [(1, 1, 0), (2, 1, 0)]),
    ([{"device_group": "a"}, {"device_group": "a", "pipeline_depth": 2}], 2, [(2, 1, 0), (2, 1, 0)]),
])  # fmt: skip
def test_models_share_the_cpus(
    stated: list[dict[str, Any]], cpus: int, expected: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.text_server.text_model.cpu_count", lambda: cpus)
    specs = with_shares([spec(**each) for each in stated])
    assert [(each.workers, each.threads, int(each.pool is not None)) for each in specs] == expected
    pools = {(each.settings.get("device_group"), id(each.pool)) for each in specs if each.pool is not None}
    assert len(pools) == len({group for group, _ in pools}) == len({pool for _, pool in pools})


@subcases(("stated", "cpus", "expected"), [
    ({}, 1, 1), ({}, 2, 2), ({}, 64, 64), ({"workers": 2}, 2, 2), ({"workers": 1}, 8, 8), ({"workers": 2}, 16, 16), ({"threads": 1}, 2, 1),
    ({"threads": 2}, 8, 2), ({"cpu_affinity": [[0], [1]]}, 2, 1), ({"executor": "thread"}, 8, 8), ({"device_group": "a"}, 8, 1),
])  # fmt: skip
def test_a_batch_alone_has_the_threads_of_all_workers_unless_stated(
    stated: dict[str, Any], cpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.text_server.text_model.cpu_count", lambda: cpus)
    assert spec(**stated).share().lone_threads == expected


def test_only_models_with_workers_of_their_own_have_some_for_bulk_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.text_server.text_model.affinity", lambda: [0, 1])
    monkeypatch.setattr("weir.text_server.text_model.cpu_count", lambda: 2)
    monkeypatch.setattr("weir.text_server.text_model.cpu_quota", lambda: 2.0)
    assert [spec().bulk_workers, spec(bulk_workers=1).bulk_workers] == [2, 1]
    assert [each.bulk_workers for each in with_shares([spec(), spec()])] == [0, 0]
    shared = with_shares([spec(bulk_workers=1), spec(bulk_workers=1)])
    with pytest.raises(SettingsError, match="bulk_workers=1: text models that share workers can have none"):
        shared[0].worker_settings()
    monkeypatch.setattr("weir.text_server.text_model.cpu_quota", lambda: 1.5)
    assert spec().bulk_workers == 0


async def test_a_worker_that_measures_has_the_settings_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Measurement] = []

    async def budget_for(wanted: Measurement, folder: Path) -> None:
        measured.append(wanted)

    monkeypatch.setattr("weir.text_server.text_model.budget_for", budget_for)
    stated = {"executor": "ray", "ray_address": "head:6379", "num_gpus": 0.5}
    model = ServedTextModel(spec(timeout=5.0, **stated)._replace(directory=tiny_towers.model(tmp_path)))
    for label in model.labels:
        await model.budget(label, no_progress)
    assert [each.settings for each in measured] == [stated, stated]
    assert [each.model for each in measured] == [TextTower, ImageTower]  # each tower by itself, with its own items
    texts, images = (each.texts.items(Size(2, 10), seed=1) for each in measured)
    assert [len(each.ids) for each in texts if isinstance(each, Tokens)] == [40, 40]
    assert images == [EncodedImage(SAMPLE, 10)] * 2
    assert measured[0].identity != measured[1].identity


@subcases(("stated", "budget", "size", "policy"), [
    ({}, None, 51, "greedy"),
    ({"policy": "auto:seconds=1", "max_batch_size": 8}, None, 8, "auto:seconds=1"),
    ({"policy": "size-or-delay:size=4,delay=5ms", "max_batch_cost": 900.0}, 45.0, 4, "size-or-delay:size=4,delay=5ms"),
    ({"policy": "size-or-delay:size=5,delay=5ms"}, 45.0, 4, "greedy"),
    ({"policy": "texts.npz"}, 5.0, 1, "greedy"),
    ({"policy": "auto:profile=texts.toml"}, None, 51, "greedy"),
])  # fmt: skip
def test_batches_of_images_are_bounded_by_number_and_by_bytes_and_pixels(
    stated: dict[str, Any], budget: float | None, size: int, policy: str, directory: Path
) -> None:
    model = ServedTextModel(spec(**stated)._replace(directory=directory))
    budgets = {} if budget is None else {"small/images": Budget(budget, 9, 0.0, 0.0)}
    texts, images = model.served(budgets)
    assert [each.label for each in (texts, images)] == ["small", "small/images"]
    assert texts.settings["executor"] == images.settings["executor"]  # they share workers
    assert images.params["share"].run_tokens == stated.get("max_batch_cost", budget)  # as batches were measured
    found = [images.settings[name] for name in ("max_batch_size", "max_batch_cost", "policy")]
    assert found == [size, size * 10 + 64e6 / 65536, policy] and "padded" not in images.settings


def test_external_workers_compute_both_towers(directory: Path) -> None:
    attached = spec(executor="external", worker_socket="unix:socket")._replace(directory=directory)
    assert [each.label for each in ServedTextModel(attached).served({})] == ["small"]


def test_a_model_without_preparation_of_images_says_that_it_reads_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tiny_towers.model(tmp_path) / "preprocessor_config.json").unlink()
    model = ServedTextModel(spec()._replace(directory=tmp_path))
    assert f"{tmp_path}: without preprocessor_config.json" in caplog.text
    assert model.tasks == (TextTask.EMBED,)


def test_models_in_one_worker_share_the_memory_of_a_gpu() -> None:
    specs = [
        spec()._replace(computing=ComputingSettings(runtime=runtime, gpu_memory_fraction=0.5))
        for runtime in ("onnx", "onnx", "torch", "torch")
    ]
    assert [each.computing.gpu_memory_fraction for each in with_shares(specs)] == [0.25, 0.25, 0.5, 0.5]


def test_two_models_of_a_server_share_its_workers(tmp_path: Path) -> None:
    first = tiny.sentence_model(tmp_path / "first")
    second = tiny.sentence_model(tmp_path / "second", "distilbert")
    settings: dict[str, Any] = {"port": 0, "device_map": ["cpu"], "calibrate": False, "cache": str(tmp_path / "cache")}
    with (
        weir.embedding.serve(first, second, **settings) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):

        def vectors() -> list[Any]:
            models = ("first", "second")
            answers = [http.post("/v1/embeddings", json={"input": "it", "model": model}).json() for model in models]
            return [answer["data"][0]["embedding"] for answer in answers]

        def workers(model: str) -> list[int]:
            return [worker["pid"] for worker in http.get(f"/models/{model}").json()["workers"]]

        before, pids = vectors(), workers("first")
        cards = http.get("/v1/models").json()["data"]
        assert http.get("/v1/models/first").json()["workers"] == cards[0]["workers"]
        assert workers("second") == pids
        assert len(pids) == cards[0]["workers"] == cards[1]["workers"] == cpu_count()
        assert http.post("/v2/repository/models/second/load").status_code == 200
        np.testing.assert_allclose(vectors(), before, rtol=1e-5)
        assert workers("first") == workers("second") != pids
        http.post("/v2/repository/models/second/unload").raise_for_status()
        assert http.post("/v1/embeddings", json={"input": "it", "model": "first"}).status_code == 200
    assert all(card["threads_per_worker"] == 1 for card in cards)
    assert all(len(card["memory_bytes"]) == card["workers"] and min(card["memory_bytes"]) > 1 << 20 for card in cards)


def test_both_towers_are_in_the_workers_with_a_profile_and_a_policy_each(directory: Path) -> None:
    settings: dict[str, Any] = {"port": 0, "device_map": ["cpu"], "calibrate": False, "cache": str(directory / "cache")}
    settings |= {"policy": "auto:seconds=1", "max_batch_size": 4, "run_tokens": 20, "workers": 2}
    settings["record"] = str(directory / "arrivals.jsonl")
    picture = directory / "a.bmp"
    drawn(400, 300, 1).save(picture)
    image = {"image": base64.b64encode(picture.read_bytes()).decode()}
    with (
        weir.embedding.serve(f"clip={directory}", **settings) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(8) as threads,
    ):

        def call(number: int) -> Any:
            items = ([image, "it"], ["it", image], ["it"], [image])[number % 4]
            response = http.post("/v1/embeddings", json={"input": items, "model": "clip"}).raise_for_status()
            vectors = [each["embedding"] for each in response.json()["data"]]
            return {"text" if item == "it" else "image": vector for item, vector in zip(items, vectors, strict=True)}

        found = [*threads.map(call, range(40))]
        texts, images = (http.get(f"/models/{label}").json() for label in ("clip", "clip/images"))
        assert {each["pid"] for each in texts["workers"]} == {each["pid"] for each in images["workers"]}
        costs = {batch["cost"] / batch["rows"] for batch in images["recent"]}
        size = 400 * 300 + picture.stat().st_size
        assert costs == {10 + size / 65536}  # so that what a batch decodes is bounded
        policies = [http.get(f"/models/{label}/policy").json() for label in ("clip", "clip/images")]
        assert [each["profile"]["max_batch_size"] for each in policies] == [4, 2]
        stats = {each["version"]: each for each in http.get("/v2/models/clip/stats").json()["model_stats"]}
        assert all(each["batch_stats"] and each["inference_count"] >= 30 for each in stats.values())
        assert stats.keys() == {"", "images"}
        metrics = http.get("/metrics").text
        assert 'weir_batch_size_count{model="clip",version="images"}' in metrics
        assert http.get("/health/ready").json()["models"][0]["name"] == "clip"
        http.post("/v2/repository/models/clip/unload").raise_for_status()
        assert http.post("/v1/embeddings", json={"input": [image]}).status_code == 503
        stated = {"config": '{"max_batch_cost": 9}'}  # of texts: no image costs so little
        http.post("/v2/repository/models/clip/load", json={"parameters": stated}).raise_for_status()
        found.append(call(0))
        card = http.get("/v1/models/clip").json()
        assert (card["ready"], len(card["memory_bytes"])) == (True, 2)
    recorded = [directory / f"arrivals.{label}.jsonl" for label in ("clip", "clip--images")]
    assert all(len(each.read_text().splitlines()) >= 30 for each in recorded)
    for kind in ("text", "image"):
        vectors = [each[kind] for each in found if kind in each]
        np.testing.assert_allclose(vectors, [vectors[0]] * len(vectors), atol=1e-5)


@pytest.mark.parametrize(
    ("order", "own"),
    spread([("solved", {"policy": "auto"}), ("oldest", {}), ("oldest", {"threads": 1, "bulk_workers": 0})]),
)
def test_two_models_of_a_server_take_turns_on_a_device(tmp_path: Path, order: str, own: dict[str, Any]) -> None:
    first = tiny.sentence_model(tmp_path / "first")
    second = tiny.sentence_model(tmp_path / "second", "distilbert")
    settings: dict[str, Any] = {"port": 0, "device_map": ["cpu"], "calibrate": False, "cache": str(tmp_path / "cache")}
    turns: dict[str, Any] = {"device_group": "cpu", "device_order": order} | own
    with weir.embedding.serve(first, second, **settings, **turns) as server:
        with httpx.Client(base_url=server.url, timeout=60) as http, ThreadPoolExecutor(8) as threads:

            def call(model: str) -> int:
                return http.post("/v1/embeddings", json={"input": "it", "model": model}).status_code

            assert set(threads.map(call, ["first", "second"] * 20)) == {200}
            workers = [http.get(f"/models/{model}").json()["workers"] for model in ("first", "second")]
            device = http.get("/models/first/policy").json()["device"]
        first_pids, second_pids = ({worker["pid"] for worker in each} for each in workers)
        assert len(first_pids) == len(second_pids) == cpu_count()
        assert first_pids == second_pids if "threads" not in own else not first_pids & second_pids
        assert (device["group"], device["order"]) == ("cpu", order)
        assert sum(device["turns"].values()) > 0
