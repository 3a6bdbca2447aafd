"""Endpoints of HTTP, each declared once, and the middleware that asks for the server's API key.

Routes, OpenAPI, the index at /, the list in a 404, refusals and the endpoints of batch jobs derive from the declarations.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weir.errors import MethodNotAllowed, Unauthorized
from weir.frontends.http.asgi import (
    Refuse,
    as_response,
    has_large_body,
    identified,
    inner_path,
    send_answer,
    send_early,
)
from weir.protocols.access import Access
from weir.protocols.response import HttpResponse, error_answer

ANY = "*"  # all methods that no other endpoint of the path has


class HttpEndpoint(NamedTuple):
    """What answers one method at one path, which may have parameters, as a Route of Starlette writes them.

    `described` is its operation in OpenAPI, with types in place of schemas; None for one that is only for other clients. `refuse` writes an error as its API
    does; without it, errors are raised to the application. `infers`: a POST of JSON is a request for inference with one response.
    """

    method: str
    path: str
    app: ASGIApp
    described: Mapping[str, Any] | None = None
    refuse: Refuse | None = None
    infers: bool = False

    @property
    def shown_path(self) -> str:
        """The path as OpenAPI writes it."""
        return re.sub(r":\w+}", "}", self.path)


class EndpointRoute(Route):
    """The endpoints of one path. It takes all methods, so that it refuses those that it has not as its own API does."""

    def __init__(self, endpoints: Mapping[str, HttpEndpoint]) -> None:
        super().__init__(next(iter(endpoints.values())).path, self.answer)
        self.app = self.answer
        self.methods = None
        self.endpoints = endpoints

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        found = self.endpoints.get(method) or self.endpoints.get(ANY)
        if found is not None:
            return await found.app(scope, receive, send)
        allow = sorted({*self.endpoints, *(["HEAD"] if "GET" in self.endpoints else [])})
        refuse = next(iter(self.endpoints.values())).refuse
        if refuse is None or any(each.refuse is None for each in self.endpoints.values()):
            raise HTTPException(405, headers={"Allow": ", ".join(allow)})
        request = Request(scope)
        known = [each for each in allow if each != "HEAD"]
        error = MethodNotAllowed(f"{request.url.path}: takes {', '.join(known)} only", details={"allow": known})
        await as_response(identified(refuse(error), request.headers.raw))(scope, receive, send)


def answered(answer: Callable[[Request], Awaitable[Response]]) -> ASGIApp:
    """Return the ASGI application whose requests `answer` answers."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (await answer(Request(scope, receive)))(scope, receive, send)

    return app


def routes_of(endpoints: Sequence[HttpEndpoint]) -> list[Route]:
    """Return a route for each path. Of two endpoints with the same method and path the first one counts."""
    paths: dict[str, dict[str, HttpEndpoint]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {}).setdefault(each.method, each)
    return [EndpointRoute(found) for found in paths.values()]


def described_paths(endpoints: Sequence[HttpEndpoint]) -> dict[str, dict[str, Any]]:
    """Return the operations of the `endpoints` by path and method, as OpenAPI has them, each with the parameters of its path. Of two with the same method
    and path the first one counts."""
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        if each.described is not None:
            names = [_in_path(name) for name in re.findall(r"{(\w+)}", each.shown_path)]
            named = {"parameters": [*names, *each.described.get("parameters", ())]} if names else {}
            paths.setdefault(each.shown_path, {}).setdefault(each.method.lower(), {**each.described, **named})
    return paths


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def refusals_of(endpoints: Sequence[HttpEndpoint]) -> dict[str, Refuse]:
    """Return what refuses a request without the server's key, by the beginning of its path."""
    found = {each.path.partition("{")[0].rstrip("/"): each.refuse for each in endpoints}
    return {path: refuse for path, refuse in found.items() if path and refuse is not None}


def listed(routes: Sequence[Any], prefix: str) -> str:
    """Return the methods and paths of those `routes` that begin with `prefix`, as a list for people."""
    found = [each for route in routes if isinstance(route, EndpointRoute) for each in route.endpoints.values()]
    return ", ".join(
        f"{each.method} {each.shown_path}" for each in found if each.method != ANY and each.path.startswith(prefix)
    )


# The paths of probes, which have no key.
OPEN = frozenset(("/health", "/health/live", "/health/ready", "/ping", "/v2/health/live", "/v2/health/ready"))


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
