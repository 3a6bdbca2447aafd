"""What the tests of batch jobs serve."""

import os
import time
from typing import Any

import weir

HELD = 1000  # a job with this number does not end before the test lets it


class Logged(weir.Model):
    """Squares numbers, and writes each into the file that the variable RAN names. 13 fails; HELD ends once there is no file RAN.held."""

    max_batch_size = 8

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.004)
        while HELD in batch and os.path.exists(os.environ["RAN"] + ".held"):
            time.sleep(0.005)
        with open(os.environ["RAN"], "a") as file:
            file.write("".join(f"{item}\n" for item in batch))
        if 13 in batch:
            raise ValueError("thirteen")
        return [item * item for item in batch]


class Length(weir.Model):
    """Tells how long items are."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return [len(item) for item in batch]
