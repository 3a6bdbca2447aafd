"""The statistics agree with a ledger that the model itself writes, batch by batch."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tritonclient.http as triton
from tests.late import triton_aio
from tests.served import Served

MODELS = Path(__file__).parent / "models.py"


def tensor(rows: int) -> triton.InferInput:
    """Return the input of `ledger`, of so many rows."""
    value = triton.InferInput("x", [rows, 1], "FP32")
    value.set_data_from_numpy(np.zeros((rows, 1), np.float32))
    return value


async def infer(address: str) -> None:
    """Ask, with JSON and with binary data, several at once, and more rows than a batch has."""
    async with triton_aio.InferenceServerClient(address, conn_limit=16) as client, httpx.AsyncClient() as plain:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0]}]}
        path = f"http://{address}/v2/models/ledger/infer"
        await asyncio.gather(
            *(client.infer("ledger", [tensor(rows)]) for rows in (1, 2, 3, 9, 1, 1)),
            *(plain.post(path, json=body) for _ in range(7)),
        )
        refused = await plain.post(path, json={"inputs": []})
        assert refused.status_code == 400


def test_they_agree_with_the_ledger(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    served = Served(f"{MODELS}:Ledger", "--param", f"path={ledger}", "--max-batch-size", 4)
    with served, triton.InferenceServerClient(served.until_ready().url.removeprefix("http://")) as client:
        asyncio.run(infer(served.url.removeprefix("http://")))
        batches = Counter(map(int, ledger.read_text().split()))
        [answer] = client.get_inference_statistics("ledger")["model_stats"]
        assert client.get_inference_statistics()["model_stats"] == [answer]
    assert answer["inference_count"] == sum(rows * count for rows, count in batches.items()) == 24
    assert (answer["name"], answer["execution_count"]) == ("ledger", batches.total())
    assert {each["batch_size"]: each["compute_infer"]["count"] for each in answer["batch_stats"]} == dict(batches)
    stats: dict[str, Any] = answer["inference_stats"]
    assert (stats["success"]["count"], stats["fail"]["count"]) == (13, 1)
    assert stats["compute_infer"]["ns"] > 0 and answer["last_inference"] > 1.6e12
