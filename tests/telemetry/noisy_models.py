"""Models that write to the terminal and to the log."""

import logging
import sys
from typing import Any

import weir


class Noisy(weir.Model):
    def predict(self, batch: list[Any]) -> list[Any]:
        print("x" * 100_000)
        print("y" * 100_000, file=sys.stderr)
        return batch


class Shown(weir.Model):
    def predict(self, batch: list[Any]) -> list[Any]:
        print("printed by the model")
        return [[sys.stdout.isatty(), sys.stderr.isatty()]] * len(batch)


class Forging(weir.Model):
    def predict(self, batch: list[Any]) -> list[Any]:
        logging.getLogger("model").warning("got %s", batch[0])
        try:
            raise KeyError(batch[0])
        except KeyError:
            logging.getLogger("model").exception("failed")
        raise ValueError(batch[0])
