"""TorchServe's inference API: POST or PUT /predictions/NAME[/VERSION].

A model archive's handler gets the whole request, and decides the status and the headers of the response. Other models get one item.
"""

import re
from collections.abc import Iterable

from weir.errors import MethodNotAllowed, ModelError, ModelNotFound, SettingsError, WeirError
from weir.protocols.account import charge
from weir.protocols.exchange import Exchange
from weir.protocols.native import NativeProtocol, RequestHead, read_head_for
from weir.protocols.response import HttpResponse, error_headers
from weir.serving import NAME_IN_PATH
from weir.serving.handle import ModelHandle, Models
from weir.wire.predictions import CONTENT_TYPE, error_document, read_response, write
from weir.wire.status import http_code

_PATH = re.compile(rf"/predictions/({NAME_IN_PATH})")
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OF_THE_SERVER = re.compile("connection|content-(encoding|length)|date|keep-alive|server|transfer-encoding|upgrade")
_KINDS = {404: "ModelNotFound", 405: "MethodNotAllowed", 409: "ConflictStatus", 413: "RequestEntityTooLarge"}


def archive_version(service: ModelHandle) -> str:
    """Return the version that a model archive states; that of the model for any other."""
    return service.facts.version or getattr(service.facts.model, "archive_version", "")


def find(registry: Models, named: str) -> ModelHandle:
    """Return the service that the end of a path names: NAME or NAME/VERSION, of which a name may have a slash too. Raises ModelNotFound."""
    name, _, version = named.rpartition("/")
    if not name or registry.knows(named):
        return registry.get(named)
    service = registry.get(name)
    return service if version == archive_version(service) else registry.get(name, version)


class TorchServe(NativeProtocol):
    """The protocol of /predictions, see HttpProtocol."""

    prefix = b"/predictions"

    def read_head(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestHead | None:
        """See HttpProtocol."""
        if (service := self.service_at(path)) is None:
            return None
        if method not in ("POST", "PUT"):
            raise MethodNotAllowed(f"{method} {path}: takes POST and PUT only", details={"allow": ["POST", "PUT"]})
        if CONTENT_TYPE in service.facts.model.content_types:  # the handler reads what they say of the body
            kept = [each for each in headers if each[0] not in (b"accept", b"content-type")]
            headers = [*kept, (b"accept", CONTENT_TYPE.encode()), (b"content-type", CONTENT_TYPE.encode())]
        return read_head_for(service, self._settings, "POST", path, headers)

    def service_at(self, path: str) -> ModelHandle | None:
        """See NativeProtocol."""
        found = _PATH.fullmatch(path)
        return None if found is None else find(self._registry, found[1])

    async def respond(self, exchange: Exchange, head: RequestHead, body: bytes) -> HttpResponse:
        """See HttpProtocol."""
        if head.content_type != CONTENT_TYPE:
            return await super().respond(exchange, head, body)
        charge(len(body))
        sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in exchange.headers]
        body = write(((head.request_id or b"").decode("latin-1"), sent, body))
        return _response((await super().respond(exchange, head, body)).body)

    def error_response(self, error: BaseException, service: ModelHandle | None) -> HttpResponse:
        """See HttpProtocol."""
        return error_response(error)


def _response(output: bytes) -> HttpResponse:
    """Return the response that a handler has made. Raises ModelError for one that HTTP cannot carry."""
    status, headers, body = read_response(output)
    if not 200 <= status <= 599:
        raise ModelError(f"the handler set the status {status}, must be from 200 to 599")
    for name, value in headers:
        if _OF_THE_SERVER.fullmatch(name) or not (_NAME.fullmatch(name) and value.isprintable() and value.isascii()):
            rule = "which no model may, or to a value that no header has"
            raise ModelError(f"the handler set the header {name!r:.80}, {rule}")
    if status in (204, 304):  # which have no body
        return HttpResponse(status, [], b"")
    return HttpResponse(status, [(name.encode(), value.encode()) for name, value in headers], body)


def error_response(error: BaseException) -> HttpResponse:
    """Write an error as TorchServe does, whose status of a handler that fails is 503. Settings may come in a query."""
    code = 503 if isinstance(error, ModelError) else 400 if isinstance(error, SettingsError) else http_code(error)
    kind = _KINDS.get(code) or ("BadRequest" if code < 429 else "InternalServer")
    if isinstance(error, ModelNotFound) and error.message.startswith("unknown version"):
        kind = "ModelVersionNotFound"
    message = error.message if isinstance(error, WeirError) else "internal error"
    return HttpResponse(code, error_headers(error), error_document(code, kind, message))
