"""What follows from the declaration of an endpoint."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp
from tests.frontends.http.models import Square

import weir
from weir.frontends.http.endpoints import (
    ANY,
    HttpEndpoint,
    answered,
    described_paths,
    listed,
    refusals_of,
    routes_of,
)
from weir.protocols.response import openai_error_answer
from weir.testing import FakeExecutor


def says(text: str) -> ASGIApp:
    async def answer(request: Request) -> Response:
        return PlainTextResponse(text)

    return answered(answer)


ENDPOINTS = [
    HttpEndpoint("POST", "/v1/things", says("made"), {"summary": "Make"}, openai_error_answer),
    HttpEndpoint("GET", "/v1/things", says("all"), {"summary": "List"}, openai_error_answer),
    HttpEndpoint("GET", "/v1/things/{thing:path}", says("one"), {"summary": "Show"}, openai_error_answer),
    HttpEndpoint("POST", "/", says("alias"), None, openai_error_answer),
    HttpEndpoint("GET", "/", says("index"), {"summary": "Index"}),
    HttpEndpoint("GET", "/", says("hidden"), {"summary": "Hidden"}),
    HttpEndpoint(ANY, "/v1/{path:path}", says("unknown"), None, openai_error_answer),
]


def ask(app: ASGIApp, *calls: tuple[str, str]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        transport: Any = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://weir") as client:
            return [await client.request(method, path) for method, path in calls]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path", "text"),
    [
        ("POST", "/v1/things", "made"), ("GET", "/v1/things", "all"), ("GET", "/v1/things/a/b", "one"), ("HEAD", "/", ""),
        ("GET", "/", "index"), ("POST", "/", "alias"), ("PATCH", "/v1/others", "unknown"),
    ],
)  # fmt: skip
def test_the_first_endpoint_of_a_method_and_path_answers(method: str, path: str, text: str) -> None:
    (answer,) = ask(Starlette(routes=routes_of(ENDPOINTS)), (method, path))
    assert (answer.status_code, answer.text) == (200, text)


def test_a_method_that_a_path_has_not_is_refused_as_its_api_writes_errors() -> None:
    app = Starlette(routes=routes_of(ENDPOINTS))
    refused, mixed = ask(app, ("DELETE", "/v1/things"), ("DELETE", "/"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")
    assert (refused.headers["allow"], refused.json()["error"]["message"]) == (
        "GET, POST", "/v1/things: takes GET, POST only",
    )  # fmt: skip
    assert (mixed.status_code, mixed.headers["allow"]) == (405, "GET, HEAD, POST")


def test_the_description_the_list_and_the_refusals_are_those_of_the_endpoints() -> None:
    assert described_paths(ENDPOINTS) == {
        "/v1/things": {"post": {"summary": "Make"}, "get": {"summary": "List"}},
        "/v1/things/{thing}": {"get": {"summary": "Show"}},
        "/": {"get": {"summary": "Index"}},
    }
    assert listed(routes_of(ENDPOINTS), "/v1/") == "POST /v1/things, GET /v1/things, GET /v1/things/{thing}"
    assert refusals_of(ENDPOINTS) == {"/v1": openai_error_answer, "/v1/things": openai_error_answer}


def test_the_methods_of_batch_jobs_are_refused_in_the_form_of_their_api(tmp_path: Path) -> None:
    app = weir.asgi(Square, executor=FakeExecutor(list), batch_dir=str(tmp_path))
    for answer in ask(app, ("DELETE", "/v1/batches"), ("PUT", "/v1/files/file-1")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


def test_the_index_has_what_can_be_changed_too() -> None:
    (answer,) = ask(weir.asgi(Square, executor=FakeExecutor(list)), ("GET", "/"))
    policy = answer.json()["pages"]["/models/{model}/policy"]
    assert policy.startswith("Explain the policy of one model") and "Solve the policy for other weights" in policy
