"""Models that the browser watches."""

import time
from typing import Any

import weir


class Steady(weir.Model):
    """Takes a moment for each batch."""

    max_batch_size = 16

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.002)
        return [x * x for x in batch]


class Narrow(weir.Model):
    """Has room for few."""

    max_batch_size = 2
    max_queue_size = 4

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.05)
        return batch
