"""What the tests of batch jobs serve."""

import os
import time
from typing import Any

import weir


class Logged(weir.Model):
    """Squares numbers, and writes each into the file that the variable RAN names. 13 fails."""

    max_batch_size = 8

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(0.004)
        with open(os.environ["RAN"], "a") as file:
            file.write("".join(f"{item}\n" for item in batch))
        if 13 in batch:
            raise ValueError("thirteen")
        return [item * item for item in batch]
