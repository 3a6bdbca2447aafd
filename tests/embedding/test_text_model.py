"""Several text models of one server: their workers divide the CPUs as one budget of threads, and the server says what each of them takes."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.embedding import tiny

import weir.embedding
from weir.embedding.settings import ComputingSettings, TextSettings
from weir.embedding.text_model import TextModelSpec, memory_of, share_cpus
from weir.workers.process.launch import available_cpus


def spec(**settings: Any) -> TextModelSpec:
    computing = ComputingSettings(device_map=["cpu"])
    return TextModelSpec("small", Path("small"), TextSettings(), computing, settings)


@pytest.mark.parametrize(("stated", "cpus", "expected"), [
    ([{}], 8, [(8, 1)]),
    ([{}, {}], 8, [(4, 1), (4, 1)]),
    ([{}, {}, {}], 8, [(3, 1), (3, 1), (2, 1)]),
    ([{}, {}, {}], 2, [(1, 1), (1, 1), (1, 1)]),
    ([{"workers": 2, "threads": 3}, {}], 8, [(2, 3), (2, 1)]),
    ([{"workers": 3}, {}, {}], 8, [(3, 2), (3, 1), (2, 1)]),
])  # fmt: skip
def test_models_divide_the_cpus(
    stated: list[dict[str, Any]], cpus: int, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.embedding.text_model.available_cpus", lambda: list(range(cpus)))
    specs = share_cpus([spec(**each) for each in stated])
    assert [(each.workers, each.threads) for each in specs] == expected


def test_a_server_of_two_models_keeps_to_the_budget_and_says_what_they_take(tmp_path: Path) -> None:
    first = tiny.sentence_model(tmp_path / "first")
    second = tiny.sentence_model(tmp_path / "second", "distilbert")
    settings: dict[str, Any] = {"port": 0, "device_map": ["cpu"], "calibrate": False, "cache": str(tmp_path / "cache")}
    with weir.embedding.serve(first, second, **settings) as server, httpx.Client(base_url=server.url) as http:
        for name in ("first", "second"):
            answer = http.post("/v1/embeddings", json={"input": "it", "model": name}).json()
            assert np.isfinite(answer["data"][0]["embedding"]).all()
        cards = http.get("/v1/models").json()["data"]
        assert http.get("/v1/models/first").json()["workers"] == cards[0]["workers"]
    assert sum(card["workers"] * card["threads_per_worker"] for card in cards) <= max(len(available_cpus()), 2)
    assert all(len(card["memory_bytes"]) == card["workers"] and min(card["memory_bytes"]) > 1 << 20 for card in cards)


def test_the_memory_of_a_process_that_there_is_not_is_unknown() -> None:
    assert memory_of(1 << 30) is None
