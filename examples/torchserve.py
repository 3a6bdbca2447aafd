"""TorchServe's form of inference, as a protocol of its own: POST /predictions/{model}[/{version}] with one item as the body.

A package brings it by the entry point `torchserve = "examples.torchserve:TorchServe"` of the group `weir.protocols`;
`weir serve MODEL --protocols torchserve` speaks it, beside the protocols that Weir has.
"""

import json
import re
from collections.abc import Iterable

from weir.catalog.registry import Registry
from weir.errors import ModelNotFound, Unsupported, WeirError
from weir.protocols import HttpSettings
from weir.protocols.exchange import EventSource, Exchange
from weir.protocols.native import RequestHead, items_http_response, read_head_for
from weir.protocols.response import HttpResponse
from weir.serving.service import Service
from weir.wire.status import http_code

PATH = re.compile(r"/predictions/([^/]+)(?:/([^/]+))?")


class TorchServe:
    """Reads what TorchServe's clients send, and writes what they expect."""

    prefix = b"/predictions"

    def __init__(self, registry: Registry, settings: HttpSettings) -> None:
        self.registry = registry
        self.settings = settings

    def read_head(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestHead | None:
        """Return what the head of a request asks for; None if it is not in this protocol."""
        found = PATH.fullmatch(path)
        if found is None:
            return None
        service = self.registry.get(found[1], found[2] or "")
        return read_head_for(service, self.settings, method, path, headers)

    def named(self, path: str) -> Service | None:
        """Return the service that a path asks for, if there is one."""
        found = PATH.fullmatch(path)
        try:
            return None if found is None else self.registry.get(found[1], found[2] or "")
        except WeirError:
            return None

    async def respond(self, exchange: Exchange, head: RequestHead, body: bytes) -> HttpResponse:
        """Have the item computed, in a batch with others, and return its answer."""
        response = await exchange.infer_items(head, body)
        return items_http_response(head, response, response.write())

    async def stream(self, exchange: Exchange, head: RequestHead, body: bytes) -> EventSource:
        """Refuse: this form has one answer."""
        raise exchange.refused(
            Unsupported(f"model {head.service.facts.name!r} streams its responses, but this call returns one")
        )

    def error_response(self, error: BaseException, service: Service | None) -> HttpResponse:
        """Write an error in TorchServe's words."""
        code = http_code(error)
        kind = "ModelNotFoundException" if isinstance(error, ModelNotFound) else "InternalServerException"
        message = error.message if isinstance(error, WeirError) else "internal error"
        document = {"code": code, "type": kind, "message": message}
        return HttpResponse(code, [(b"content-type", b"application/json")], json.dumps(document).encode())
