"""Models on demand, served by the real command: loaded by their first requests, and evicted when others need their memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
from tests.catalog.repository.shelf import write
from tests.served import serving

NAMED = """
import weir

class Named(weir.Model):
    def predict(self, batch):
        return [[{name!r}, item] for item in batch]
"""
CONFIG = 'needs_memory = "1GB"\narena_bytes = 0\n'


def fill(folder: Path, count: int, config: str = CONFIG) -> list[str]:
    """Write so many models, each of which answers with its name and the item; return their names."""
    names = [f"m{number}" for number in range(count)]
    for name in names:
        write(folder, {f"{name}/1/model.py": NAMED.format(name=name), f"{name}/config.toml": config})
    return names


def states(client: httpx.Client) -> dict[str, str]:
    return {each["name"]: each["state"] for each in client.get("/models").json()["models"]}


def test_many_models_share_room_for_a_few_and_nothing_is_lost_or_wrong(tmp_path: Path) -> None:
    names = fill(tmp_path, 40)
    flags = ("--model-repository", tmp_path, "--model-control", "on-demand", "--model-memory", "5GB")
    with serving(*flags) as (_, client):
        random = Random(1)
        order = random.choices(names, weights=[1 / rank for rank in range(1, 41)], k=30)

        def call(number: int) -> Any:
            name = order[number]
            if number % 2:
                answer = client.post(f"/infer/{name}", json=number)
                return [answer.status_code, answer.json()]
            tensor = {"name": "input", "datatype": "BYTES", "shape": [1], "data": [str(number)]}
            answer = client.post(f"/v2/models/{name}/infer", json={"inputs": [tensor]})
            return [answer.status_code, answer.json()]

        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(call, range(len(order))))
        for number, (status, answer) in enumerate(answers):
            assert status == 200, answer
            if number % 2:
                assert answer == [order[number], number]
            else:
                assert answer["model_name"] == order[number]
        loaded = [name for name, state in states(client).items() if state == "loaded"]
        assert 0 < len(loaded) <= 5
        assert len(states(client)) == 40
