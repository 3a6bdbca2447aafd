"""What a server of vectors says of itself: in the words of bert-as-service, whose clients look for them, and some of Weir's."""

import platform
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from weir._version import __version__
from weir.embedding.metrics import TextClients
from weir.embedding.recipe import Pooling
from weir.embedding.texts import Encodes

# The version of bert-as-service whose clients are served; they compare it with their own.
STOCK_VERSION = "1.10.0"

# What bert-as-service's enumeration calls the poolings on the wire.
STOCK_POOLING = {
    Pooling.NONE: 0, Pooling.MAX: 1, Pooling.MEAN: 2, Pooling.MEAN_MAX: 3, Pooling.CLS: 4, Pooling.SEP: 5, Pooling.POOLER: 6,
    Pooling.CLASSIFICATION: 7, Pooling.REGRESSION: 8,
}  # fmt: skip


class Status:
    """Answers for the server that has `served`. `more` returns what else is to be said of its configuration, flags and the like."""

    def __init__(
        self, served: Mapping[str, Encodes], clients: TextClients, more: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        self._served = served
        self._clients = clients
        self._more = more
        self._started = datetime.now().astimezone()

    def config(self, client: str = "") -> dict[str, Any]:
        """Return the configuration, as `client` asks for it."""
        first = next(iter(self._served.values()))
        return {
            "client": client,
            "server_version": STOCK_VERSION,
            "weir_version": __version__,
            "python_version": platform.python_version(),
            "server_start_time": str(self._started),
            "server_current_time": str(datetime.now().astimezone()),
            "max_seq_len": first.max_length,
            "show_tokens_to_client": False,
            "models": {
                name: {"dimensions": each.dimensions, "max_seq_len": each.max_length}
                for name, each in self._served.items()
            },
            **self._more(),
        }

    def server_status(self, client: str = "") -> dict[str, Any]:
        """Return the configuration and the statistic."""
        return {**self.config(client), "statistic": self._clients.statistics()}

    def client_status(self) -> dict[str, Any]:
        """Return who has asked, the latest first."""
        return {"num_active_client": self._clients.active, "clients": self._clients.table()}
