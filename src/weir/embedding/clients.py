"""Who asks for vectors, how often and for how many texts at a time: what the status answers say, in bert-as-service's words.

Nothing here grows: of clients, sizes and intervals the latest `MOST` are kept.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger("weir")

MOST = 500  # clients, sizes and intervals that are remembered
ACTIVE_FOR = 180.0  # seconds after its last request that a client counts as active


@dataclass
class Client:
    """What is known of one client."""

    door: str
    requests: int = 0
    texts: int = 0
    last: float = 0.0
    warned: bool = False  # of its token ids


class Clients:
    """Counts requests, in all and by client. `clock` returns seconds; the `most` clients heard of last are remembered."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = MOST) -> None:
        self._clock = clock
        self._most = most
        self._clients: OrderedDict[str, Client] = OrderedDict()
        self._sizes: deque[int] = deque(maxlen=most)
        self._intervals: deque[float] = deque(maxlen=most)
        self._last: float | None = None
        self.data_requests = 0
        self.system_requests = 0
        self.texts = 0

    def asked(self, client: str, texts: int, *, door: str) -> None:
        """`client` has asked for the vectors of so many texts, at `door`."""
        now = self._clock()
        known = self._seen(client, door, now)
        known.requests += 1
        known.texts += texts
        self.data_requests += 1
        self.texts += texts
        self._sizes.append(texts)
        if self._last is not None:
            self._intervals.append(now - self._last)
        self._last = now

    def asked_about(self, client: str, *, door: str) -> None:
        """`client` has asked for the server's configuration or status, or for it to end."""
        self._seen(client, door, self._clock())
        self.system_requests += 1

    def warn_of_ids(self, client: str, count: int, model: str) -> None:
        """Say in the log that `client`, who has asked for vectors, sent `count` texts as token ids of another tokenizer, if any; once for each
        client that is remembered."""
        known = self._clients.get(client) if count else None
        if known is not None and not known.warned:
            known.warned = True
            _log.warning(
                "client %r sent %d texts as token ids that the tokenizer of %r would not make of them: those of another model give wrong vectors "
                "(LangChain: check_embedding_ctx_length=False)", client, count, model,
            )  # fmt: skip

    def _seen(self, client: str, door: str, now: float) -> Client:
        known = self._clients.setdefault(client, Client(door))
        self._clients.move_to_end(client)
        known.last = now
        if len(self._clients) > self._most:
            self._clients.popitem(last=False)
        return known

    @property
    def active(self) -> int:
        """How many of the clients that are remembered have asked for something within ACTIVE_FOR seconds."""
        since = self._clock() - ACTIVE_FOR
        return sum(client.last > since for client in self._clients.values())

    def statistics(self) -> dict[str, Any]:
        """Return what bert-as-service calls the statistic of a server."""
        return {
            "num_data_request": self.data_requests,
            "num_total_seq": self.texts,
            "num_sys_request": self.system_requests,
            "num_total_request": self.data_requests + self.system_requests,
            "num_total_client": len(self._clients),
            "num_active_client": self.active,
            **_spread("request_per_client", [client.requests for client in self._clients.values()]),
            **_spread("size_per_request", self._sizes),
            **_spread("last_two_interval", self._intervals),
            **_spread("request_per_second", [1.0 / interval for interval in self._intervals if interval > 0]),
        }

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each client that is remembered, the one heard of last first; `last` is seconds ago."""
        now = self._clock()
        return [
            {
                "identity": name,
                "door": client.door,
                "num_request": client.requests,
                "num_total_seq": client.texts,
                "last": now - client.last,
                "active": now - client.last < ACTIVE_FOR,
            }
            for name, client in reversed(self._clients.items())
        ]


def _spread(name: str, values: Collection[float]) -> dict[str, float]:
    """Return average, least and most of `values`, and how often the last two occur; nothing if there are none."""
    if not values:
        return {}
    least, most = min(values), max(values)
    return {
        f"avg_{name}": sum(values) / len(values),
        f"min_{name}": least,
        f"max_{name}": most,
        f"num_min_{name}": sum(value == least for value in values),
        f"num_max_{name}": sum(value == most for value in values),
    }
