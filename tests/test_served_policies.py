"""Solved policies through the real command: `weir serve --policy auto` and `--policy FILE.npz`."""

import signal
import threading
from pathlib import Path

import httpx
from tests.served import MODELS, serving
from tests.tuning.banks import small_bank


def test_auto_measures_serves_solves_and_explains() -> None:
    arguments = f"{MODELS}:Steady", "--name", "square", "--policy", "auto:seconds=0.3"
    with serving(*arguments, env={"COLUMNS": "200"}) as (served, client):
        assert "auto:seconds=0.3 (greedy, learning)" in " ".join(served.table.split())
        answers = client.post("/infer/square/batch", json=list(range(100))).json()
        assert [answer["output"] for answer in answers] == [x * x for x in range(100)]
        while not (explained := client.get("/models/square/policy").json())["solved"]["count"]:
            assert client.post("/infer/square", json=3).json() == 9
        assert (explained["solved"]["reason"], explained["profile"]["max_batch_size"]) == ("start", 8)
        changed = client.put("/models/square/policy", json={"energy_weight": 2.0}).json()
        assert changed["prices"]["energy_weight"] == 2.0
        assert 'weir_policy_resolves_total{model="square",reason="prices"} 1.0' in client.get("/metrics").text


def test_a_drain_ends_what_is_being_solved(tmp_path: Path) -> None:
    path = tmp_path / "square.policy.npz"
    path.write_bytes(small_bank().to_bytes())
    with serving(f"{MODELS}:Square", "--policy", path, "--max-batch-size", "4") as (served, client):
        before = {child.pid for child in served.children()}
        codes = []

        def change() -> None:
            with httpx.Client(base_url=served.url, timeout=60) as other:
                codes.append(other.put("/models/square/policy", json={"latency_objective": "p99=30ms"}).status_code)

        thread = threading.Thread(target=change)
        thread.start()
        while not {child.pid for child in served.children()} - before:
            assert client.get("/health/ready").status_code == 200
        served.signal(signal.SIGTERM)
        thread.join(60)
        assert (served.wait(), codes) == (0, [503])
