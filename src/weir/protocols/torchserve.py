"""TorchServe's inference API: POST or PUT /predictions/NAME[/VERSION].

A model archive's handler gets the whole request, and decides the status and the headers of the response. Other models get one item.
"""

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from weir.errors import MethodNotAllowed, ModelError, ModelNotFound, RequestError, Unsupported, WeirError
from weir.protocols import HttpSettings
from weir.protocols.account import charge
from weir.protocols.exchange import EventSource, Exchange
from weir.protocols.native import RequestHead, check_length, items_http_response, read_head_for
from weir.protocols.response import Headers, HttpResponse, error_headers
from weir.serving import NAME_IN_PATH
from weir.serving.handle import ModelHandle
from weir.wire.predictions import CONTENT_TYPE, PredictionRequest, PredictionResponse, read_response, write
from weir.wire.status import http_code

if TYPE_CHECKING:
    from weir.serving.handle import Models

_PATH = re.compile(rf"/predictions/({NAME_IN_PATH})")
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OF_THE_SERVER = frozenset(
    ("connection", "content-encoding", "content-length", "date", "keep-alive", "server", "transfer-encoding", "upgrade")
)


class PredictionHead(RequestHead):
    """The head of a request for a model archive; `sent` are its headers."""

    __slots__ = ("sent",)

    def __init__(self, service: ModelHandle, headers: Headers, settings: HttpSettings) -> None:
        super().__init__(service, False)
        self.content_type = self.accept = CONTENT_TYPE
        self.sent = headers
        for name, value in headers:
            if name == b"content-length":
                check_length(value, settings.max_body_size)
            else:
                self.read(name, value)
        self.form = self.made_form(CONTENT_TYPE, CONTENT_TYPE)


def archive_version(service: ModelHandle) -> str:
    """Return the version that a model archive states; that of the model for any other."""
    return service.facts.version or getattr(service.facts.model, "archive_version", "")


def find(registry: "Models", named: str) -> ModelHandle:
    """Return the service that the end of a path names: NAME or NAME/VERSION, of which a name may have a slash too. Raises ModelNotFound."""
    name, _, version = named.rpartition("/")
    if registry.knows(named) or not name:
        return registry.get(named)
    if registry.knows(name) and version == archive_version(service := registry.get(name)):
        return service
    return registry.get(name, version)


class TorchServe:
    """The protocol of /predictions, see HttpProtocol."""

    prefix = b"/predictions"

    def __init__(self, registry: "Models", settings: HttpSettings) -> None:
        self._registry = registry
        self._settings = settings

    def read_head(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestHead | None:
        """See HttpProtocol."""
        found = _PATH.fullmatch(path)
        if found is None:
            return None
        if method not in ("POST", "PUT"):
            raise MethodNotAllowed(f"{method} {path}: takes POST and PUT only", details={"allow": ["POST", "PUT"]})
        service = find(self._registry, found[1])
        if CONTENT_TYPE in service.facts.model.content_types:
            return PredictionHead(service, list(headers), self._settings)
        return read_head_for(service, self._settings, "POST", path, headers)

    def named(self, path: str) -> ModelHandle | None:
        """See HttpProtocol."""
        found = _PATH.fullmatch(path)
        try:
            return None if found is None else find(self._registry, found[1])
        except WeirError:
            return None

    async def respond(self, exchange: Exchange, head: RequestHead, body: bytes) -> HttpResponse:
        """See HttpProtocol."""
        if not isinstance(head, PredictionHead):
            response = await exchange.infer_items(head, body)
            return items_http_response(head, response, response.write())
        sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.sent if name[:1] != b":"]
        charge(len(body))
        packed = write(PredictionRequest((head.request_id or b"").decode("latin-1"), sent, body))
        del body
        (output,) = (await exchange.infer_items(head, packed)).write()
        if isinstance(output, WeirError):
            raise output
        return _response(output)

    async def stream(self, exchange: Exchange, head: RequestHead, body: bytes) -> EventSource:
        """Refuse: a prediction has one response."""
        name = head.service.facts.name
        raise exchange.refused(
            Unsupported(f"model {name!r} streams its responses, but this call returns one; POST /infer/{name}")
        )

    def error_response(self, error: BaseException, service: ModelHandle | None) -> HttpResponse:
        """See HttpProtocol."""
        return error_response(error)


def _response(output: bytes) -> HttpResponse:
    """Return the response that a handler has made. Raises ModelError for one that HTTP cannot carry."""
    try:
        made: PredictionResponse = read_response(output)
    except msgspec.MsgspecError as error:
        raise ModelError(f"the handler's response cannot be read: {error}") from error
    if not 200 <= made.status <= 599:
        raise ModelError(f"the handler set the status {made.status}, must be from 200 to 599")
    for name, value in made.headers:
        if name in _OF_THE_SERVER or not (_NAME.fullmatch(name) and value.isprintable() and value.isascii()):
            raise ModelError(
                f"the handler set the header {name!r:.80}, which no model may, or to a value that no header has"
            )
    if made.status in (204, 304):  # which have no body
        return HttpResponse(made.status, [], b"")
    return HttpResponse(made.status, [(name.encode(), value.encode()) for name, value in made.headers], made.body)


_TYPES = {
    404: "ModelNotFoundException",
    405: "MethodNotAllowedException",
    409: "ConflictStatusException",
    413: "RequestEntityTooLargeException",
}


def error_response(error: BaseException) -> HttpResponse:
    """Write an error as TorchServe does, whose status of a handler that fails is 503."""
    code = 503 if isinstance(error, ModelError) else http_code(error)
    kind = _TYPES.get(code) or ("BadRequestException" if isinstance(error, RequestError) else "InternalServerException")
    if isinstance(error, ModelNotFound) and error.message.startswith("unknown version"):
        kind = "ModelVersionNotFoundException"
    message = error.message if isinstance(error, WeirError) else "internal error"
    body = json.dumps({"code": code, "type": kind, "message": message}, indent=2).encode()
    return HttpResponse(code, error_headers(error), body)
