"""A server under test, over HTTP."""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weir.bench.batches import Counts
from weir.bench.ledger import Ledger
from weir.bench.targets.address import parse_address
from weir.bench.targets.answers import HttpAnswer, error_of, outcome_of
from weir.bench.targets.asking import counted, example_of
from weir.bench.targets.dialling import Dialler
from weir.bench.targets.fetching import fetch, fetch_json, request_bytes
from weir.bench.targets.payloads import read_payloads
from weir.bench.targets.pool import Pool
from weir.errors import SettingsError
from weir.fields import AT_LEAST_ONE, POSITIVE, check, setting

_SPARE = 16  # connections that are open ahead of need
_OTHER_FILES = 100  # that this process may have open beside its connections
_PASSING = (408, 429, 503)  # codes of a server that is there, and has too much to do


@dataclass(frozen=True)
class HttpOptions:
    """How a server is asked."""

    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = setting(10.0, "seconds until a request is given up", rule=POSITIVE)
    max_connections: int = setting(1000, "connections that may be open at once", rule=AT_LEAST_ONE)
    insecure: bool = setting(False, "take any certificate")
    channels: int = setting(4, "connections of gRPC and WebSocket, which carry many requests each", rule=AT_LEAST_ONE)
    rows: int = setting(1, "rows of an inference request that is made up", rule=AT_LEAST_ONE)

    def __post_init__(self) -> None:
        check(self)


class HttpTarget:
    """Sends POST requests to `url`, whose bodies are `data` (see `read_payloads`; None: the model's own example)."""

    def __init__(
        self, url: str, data: str | Sequence[Any] | None = None, options: HttpOptions | None = None, *,
        name: str | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.name = name or url
        self._options = options or HttpOptions()
        self._address = parse_address(url)
        self._dialler = Dialler(self._address, insecure=self._options.insecure)
        self._bodies = None if data is None else read_payloads(data)
        self._requests: list[bytes] = []
        self._model: str | None = None
        self._clock = clock
        self._ledger = Ledger()
        self._pool = Pool(
            self._dialler, self, limit=self._options.max_connections,
            spare=min(_SPARE, self._options.max_connections), timeout=self._options.timeout, clock=clock,
        )  # fmt: skip

    @property
    def connections(self) -> int:
        """How many were open at most."""
        return self._pool.most

    @property
    def held(self) -> int:
        """How many requests had to wait because no more connections were allowed."""
        return self._pool.held

    async def open(self) -> None:
        """Find the server, see that it answers, and open the first connections."""
        _allow_files(self._options.max_connections)
        await self._dialler.find()
        self._requests = await self._made()
        answer = await fetch(self._dialler, self._requests[0], self._options.timeout)
        if outcome_of(answer) != "ok" and answer.status not in _PASSING:
            raise SettingsError(f"{self._address.url}: {_said(answer)}")
        self._model = await self._served_model()
        await self._pool.warm()

    async def start_round(self, ledger: Ledger) -> None:
        """Report to `ledger` from now on."""
        self._ledger = ledger

    def send(self, index: int) -> None:
        """Send a request."""
        requests = self._requests
        self._pool.send(index, requests[index % len(requests)])

    def give_up(self) -> None:
        """End what took too long."""
        self._pool.give_up()

    async def counts(self) -> Counts | None:
        """Return what the server's /metrics say of the model."""
        if self._model is None:
            return None
        return await counted(self._dialler, self._model, self._options.timeout)

    async def close(self) -> None:
        """Drop the connections."""
        await self._pool.close()

    # What the pool says.

    def left(self, index: int, now: float) -> None:
        """Note when a request was sent."""
        self._ledger.sent[index] = now

    def ended(self, index: int, outcome: str) -> None:
        """Note how it ended."""
        self._ledger.end(index, self._clock(), outcome)

    async def _made(self) -> list[bytes]:
        """Return the requests to send, one after the other and round again."""
        bodies = self._bodies if self._bodies is not None else [await self._example()]
        return [request_bytes("POST", self._address, self._options.headers, body) for body in bodies]

    async def _example(self) -> bytes:
        """Return the first example that the server describes for this path."""
        document = await fetch_json(self._dialler, "/openapi.json", self._options.timeout)
        path = self._address.path.partition("?")[0]
        example = example_of(document, path)
        if example is None:
            known = _paths(document)
            wrong = "describes no example to send; say what with --data"
            if known and path not in known:
                wrong = f"takes no requests at this path, but at {', '.join(known)}"
            raise SettingsError(f"{self._address.url}: the server {wrong}")
        return msgspec.json.encode(example)

    async def _served_model(self) -> str | None:
        """Return the name under which the server counts what is asked here; None if it is not a Weir."""
        index = await fetch_json(self._dialler, "/", self._options.timeout)
        path = self._address.path.partition("?")[0]
        try:
            names = [model["name"] for model in index["models"] if path in model["paths"]]
        except (KeyError, TypeError):
            return None
        return names[0] if len(names) == 1 else None


def _allow_files(connections: int) -> None:
    """Let this process have so many connections open. Raises SettingsError if it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        rule = f"must be at most {hard - _OTHER_FILES}, for this process may open {hard} files (ulimit -Hn)"
        raise SettingsError(f"max_connections={connections}: {rule}")
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _paths(document: Any) -> list[str]:
    paths = document.get("paths") if isinstance(document, dict) else None
    if not isinstance(paths, dict):
        return []
    return [path for path, methods in paths.items() if isinstance(methods, dict) and "post" in methods]


def _said(answer: HttpAnswer) -> str:
    message = error_of(answer).get("message")
    text = message if isinstance(message, str) else " ".join(answer.body[:200].decode("latin-1").split())
    return f"{outcome_of(answer)}: {text}" if text else outcome_of(answer)
