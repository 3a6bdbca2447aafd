"""ASGI middleware that refuses requests without the server's API key."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weir.errors import Unauthorized
from weir.frontends.http.asgi import has_large_body, inner_path, send_answer, send_early
from weir.protocols.access import Access
from weir.protocols.response import HttpResponse, error_answer

# The paths of probes, which have no key.
OPEN = frozenset(("/health", "/health/live", "/health/ready", "/ping", "/v2/health/live", "/v2/health/ready"))

Refuse = Callable[[BaseException], HttpResponse]

_DENIAL = "websocket.http.response"
_BASIC = (b"www-authenticate", b'Basic realm="weir"')


class Gate:
    """Passes requests with a key, and requests to open paths, on to `app`. Refuses all others.

    `refusals` maps prefixes of paths to what makes the response; the longest prefix of a path counts. `body_timeout` is how many seconds the rest of a refused large body is read.
    """

    def __init__(self, app: ASGIApp, access: Access, refusals: Mapping[str, Refuse], body_timeout: float) -> None:
        self._app = app
        self._access = access
        self._refusals = dict(sorted(refusals.items(), key=lambda item: -len(item[0])))
        self._body_timeout = body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or open one WebSocket."""
        if scope["type"] in ("http", "websocket") and inner_path(scope) not in OPEN:
            try:
                scope = {**scope, "headers": self._access.require_http(scope["headers"])}
            except Unauthorized as error:
                return await self._refuse(error, scope, receive, send)
        await self._app(scope, receive, send)

    async def _refuse(self, error: Unauthorized, scope: Scope, receive: Receive, send: Send) -> None:
        path = inner_path(scope)
        refuse = next((refuse for prefix, refuse in self._refusals.items() if path.startswith(prefix)), error_answer)
        answer = refuse(error)
        if scope["type"] == "websocket":
            return await _deny(answer, scope, send)
        if _wants_page(scope):  # a browser then asks its user for the key
            answer.headers.append(_BASIC)
        await send_early(scope, receive, send, answer, closing=has_large_body(scope), within=self._body_timeout)


def with_key(document: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an OpenAPI `document` that also describes the key, which paths need it, and the response to a request without it."""
    described = deepcopy(document)
    described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    described["security"] = [{"key": []}]
    for path, operations in described["paths"].items():
        for operation in operations.values():
            if path in OPEN:
                operation["security"] = []
            else:
                operation["responses"].setdefault("401", {"description": f"Unauthorized: {Unauthorized.__doc__}"})
    return described


async def _deny(answer: HttpResponse, scope: Scope, send: Send) -> None:
    if _DENIAL not in scope.get("extensions", {}):
        return await send({"type": "websocket.close"})  # the ASGI server sends status 403

    async def send_denial(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    await send_answer(send_denial, answer)


def _wants_page(scope: Scope) -> bool:
    return scope["method"] == "GET" and any(
        name == b"accept" and b"text/html" in value for name, value in scope["headers"]
    )
