"""The statistics of a service agree with a ledger that its model writes."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from weir import Model, Service


class Ledger(Model):
    """Writes down the size of each batch, in its worker."""

    def __init__(self, path: str) -> None:
        self._path = path

    def predict(self, batch: list[Any]) -> list[Any]:
        with Path(self._path).open("a") as ledger:
            ledger.write(f"{len(batch)}\n")
        return batch


async def test_counts_agree_with_the_models_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    async with Service(Ledger, params={"path": str(path)}, max_batch_size=8, workers=2) as service:
        await service.infer_many(list(range(100)))
        await asyncio.gather(*[service.infer(number) for number in range(37)])
        for number in range(5):
            await service.infer(number)
    ledger = [int(line) for line in path.read_text().split()]
    answer = service.statistics.to_dict()
    assert answer["inference_count"] == sum(ledger) == 142
    assert answer["execution_count"] == len(ledger)
    assert {each["batch_size"]: each["compute_infer"]["count"] for each in answer["batch_stats"]} == Counter(ledger)
    assert answer["inference_stats"]["success"]["count"] == 1 + 37 + 5
    assert answer["last_inference"] > 1_600_000_000_000
