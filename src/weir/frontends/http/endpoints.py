"""Endpoints of HTTP, each declared once. Routes, OpenAPI, the index at /, the list in a 404, refusals and the endpoints of batch jobs derive from them."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from weir.errors import MethodNotAllowed
from weir.frontends.http.asgi import Refuse, as_response, identified

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
    """Return the operations of the `endpoints` by path and method, as OpenAPI has them. Of two with the same method and path the first one counts."""
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        if each.described is not None:
            paths.setdefault(each.shown_path, {}).setdefault(each.method.lower(), each.described)
    return paths


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
