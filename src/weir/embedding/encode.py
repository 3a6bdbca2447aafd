"""The door that speaks as bert-as-service does over HTTP: POST /encode, GET /status/server and /status/client, POST /terminate.

A text that is longer than the model reads is cut, unless the server was told not to; the answer says which were, in
`truncated` and in the header X-Weir-Truncated.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.routing import Route

from weir.embedding.asking import read_asked, read_document
from weir.embedding.bert_status import client_fields
from weir.embedding.calling import Caller, EmbeddingContext, Listing, TextCall, as_json, truncated_places
from weir.embedding.status import Status
from weir.embedding.texts import Encoded
from weir.errors import InvalidRequest
from weir.messages import JSON, MSGPACK
from weir.protocols.content_negotiation import accept_of
from weir.protocols.control import Control
from weir.protocols.endpoint import Call, Endpoint
from weir.protocols.response import HttpResponse, encode_safely, error_headers, error_value
from weir.protocols.status import http_code

NAME = "encode"


class Encode:
    """Answers the calls. `end` has the server end, for those whom `control` lets."""

    def __init__(self, site: EmbeddingContext, status: Status, *, control: Control, end: Callable[[], None]) -> None:
        self._site = site
        self._status = status
        self._control = control
        self._end = end

    def routes(self) -> list[Route]:
        """Return the routes."""
        endpoint = partial(Endpoint, settings=self._site.http, refuse=partial(EncodeCall.refusal, self._site))
        return [
            Route(EncodeCall.path, endpoint(self.encode), methods=["POST"]),
            Route("/status/server", endpoint(self.server_status), methods=["GET"]),
            Route("/status/client", endpoint(self.client_status), methods=["GET"]),
            Route("/terminate", endpoint(self.terminate), methods=["POST"]),
        ]

    async def encode(self, call: Call) -> HttpResponse | None:
        """Encode `texts`."""
        return await EncodeCall.answer_to(call, self._site)

    async def server_status(self, call: Call) -> HttpResponse:
        """Show the server's configuration and what it has been asked."""
        whose = Caller(call.headers).whose(call.peer)
        self._site.clients.asked_about(whose, door=NAME)
        return _document(self._status.server_status(whose))

    async def client_status(self, call: Call) -> HttpResponse:
        """Show what is known of the caller, as bert-as-service does, and of all clients that are remembered."""
        whose = Caller(call.headers).whose(call.peer)
        known = self._status.client_status()
        return _document(client_fields(whose, known["clients"], self._site.http) | known)

    async def terminate(self, call: Call) -> HttpResponse:
        """Have the server finish what it has accepted, and end: for who may control it."""
        self._control.require_http(call.peer, call.headers)
        asyncio.get_running_loop().call_soon(self._end)
        return _document({"status": 200, "description": "the server finishes what it has accepted, and ends"})


class EncodeCall(TextCall):
    """One call of POST /encode."""

    door = NAME
    path = "/encode"

    _identity: Any = None

    def read(self) -> None:
        """Read the body."""
        site, headers = self.site, dict(self.headers)
        said = read_document(self.body, headers.get(b"content-type", b"").decode("latin-1"), site)
        self._identity = said.get("id")
        self._asked = asked = read_asked(said, site)
        self._accept = accept_of(headers.get(b"accept", b"").decode("latin-1"), [JSON, MSGPACK])
        self.texts = asked.texts
        self.encoder = site.models.get(asked.model)

    async def encoded(self) -> HttpResponse | None:
        """Return the vectors."""
        asked, encoder = self._asked, self.encoder
        if asked.dimensions is not None and not 1 <= asked.dimensions <= encoder.dimensions:
            raise InvalidRequest(
                f"dimensions={asked.dimensions}: must be 1 to {encoder.dimensions}, as many as vectors of {encoder.name!r} have"
            )
        encoded = await self.vectors(
            dimensions=asked.dimensions, truncate=asked.truncate, want_tokens=asked.show_tokens, prompt=asked.prompt,
            whole_words=asked.whole_words,
        )  # fmt: skip
        return await self.answer(encoded, partial(_WRITERS[self._accept], asked.id))

    def refused(self, error: BaseException) -> HttpResponse:
        """Return the answer for `error`."""
        return self.refusal(self.site, error, self.model, self._identity)

    @staticmethod
    def error_answer(site: EmbeddingContext, error: BaseException, identity: Any) -> HttpResponse:
        """Return the answer for `error` as bert-as-service says it."""
        return error_answer(error, identity, development=site.http.development)


def error_answer(error: BaseException, identity: Any = None, *, development: bool = False) -> HttpResponse:
    """Return the answer for `error`: `type` and `description` as bert-as-service says it, with the code, and the `id`."""
    value = error_value(error, development=development)
    status = http_code(error)
    document = {"id": identity, "type": value["type"], "description": value["message"], "status": status}
    if value["details"] is not None:
        document["details"] = value["details"]
    return HttpResponse(status, error_headers(error), encode_safely(document))


def _as_json(identity: Any, encoded: Encoded) -> Listing:
    vectors = encoded.vectors
    numbers = vectors.size // len(vectors)
    return Listing(_said(identity, encoded), "result", len(vectors), numbers, lambda a, b: list(as_json(vectors[a:b])))


def _as_msgpack(identity: Any, encoded: Encoded) -> HttpResponse:
    """The vectors as the bytes of an array, for clients that can read them so."""
    vectors = encoded.vectors.astype("<f4", order="C", copy=False)
    document = _said(identity, encoded) | {"shape": list(vectors.shape), "result": vectors.data.cast("B")}
    return HttpResponse(200, [(b"content-type", MSGPACK.encode())], msgspec.msgpack.encode(document))


def _said(identity: Any, encoded: Encoded) -> dict[str, Any]:
    document: dict[str, Any] = {"id": identity, "status": 200}
    if cut := truncated_places(encoded):
        document["truncated"] = cut
    if encoded.tokens is not None:
        document["tokens"] = encoded.tokens
    return document


_WRITERS: dict[str, Callable[[Any, Encoded], HttpResponse | Listing]] = {JSON: _as_json, MSGPACK: _as_msgpack}


def _document(value: dict[str, Any]) -> HttpResponse:
    return HttpResponse(200, [(b"content-type", JSON.encode()), (b"cache-control", b"no-store")], encode_safely(value))
