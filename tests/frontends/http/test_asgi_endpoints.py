"""What follows from the declaration of an endpoint.

The gate, in front of an application that says where it was reached.
"""

from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tests.frontends.http.models import Square
from tests.late import openapi_spec_validator
from tests.rings import subcases

import weir
from weir.catalog.registry import Registry
from weir.frontends.grpc.services import Services
from weir.frontends.http.application import exception_handlers
from weir.frontends.http.asgi import ANY, Gate, HttpEndpoint, answered, described_paths, listed, refusals_of, routes_of
from weir.frontends.http.fast.plan import HttpHead, _may
from weir.protocols import HttpSettings
from weir.protocols.access import Access, AccessSettings
from weir.protocols.kserve import KserveContext
from weir.protocols.response import HttpResponse, openai_error_response
from weir.testing import FakeExecutor


def says(text: str) -> ASGIApp:
    async def answer(request: Request) -> Response:
        return PlainTextResponse(text)

    return answered(answer)


ENDPOINTS = [
    HttpEndpoint("POST", "/v1/things", says("made"), {"summary": "Make"}, openai_error_response),
    HttpEndpoint("GET", "/v1/things", says("all"), {"summary": "List"}, openai_error_response),
    HttpEndpoint("GET", "/v1/things/{thing:path}", says("one"), {"summary": "Show"}, openai_error_response),
    HttpEndpoint("POST", "/", says("alias"), None, openai_error_response),
    HttpEndpoint("GET", "/", says("index"), {"summary": "Index"}),
    HttpEndpoint("GET", "/", says("hidden"), {"summary": "Hidden"}),
    HttpEndpoint(ANY, "/v1/{path:path}", says("unknown"), None, openai_error_response),
]


async def ask(app: Any, *calls: tuple[str, str], **headers: str) -> list[httpx.Response]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weir") as client:
        return [await client.request(method, path, headers=headers) for method, path in calls]


async def test_the_first_endpoint_of_a_method_and_path_answers() -> None:
    texts = {
        ("POST", "/v1/things"): "made", ("GET", "/v1/things"): "all", ("GET", "/v1/things/a/b"): "one", ("HEAD", "/"): "",
        ("GET", "/"): "index", ("POST", "/"): "alias", ("PATCH", "/v1/others"): "unknown",
    }  # fmt: skip
    answers = await ask(Starlette(routes=routes_of(ENDPOINTS)), *texts)
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, text) for text in texts.values()]


async def test_a_method_that_a_path_has_not_is_refused_as_its_api_writes_errors() -> None:
    handlers = exception_handlers(KserveContext(Registry([]), HttpSettings()))
    app = Starlette(routes=routes_of(ENDPOINTS), exception_handlers=handlers)
    refused, mixed = await ask(app, ("DELETE", "/v1/things"), ("DELETE", "/"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed")
    assert (refused.headers["allow"], refused.json()["error"]["message"]) == (
        "GET, HEAD, POST", "DELETE /v1/things: takes GET, POST only",
    )  # fmt: skip
    assert (mixed.status_code, mixed.headers["allow"]) == (405, "GET, HEAD, POST")


def test_descriptions_lists_and_refusals_are_those_of_the_endpoints() -> None:
    thing = {"name": "thing", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    assert described_paths(ENDPOINTS) == {
        "/v1/things": {"post": {"summary": "Make"}, "get": {"summary": "List"}},
        "/v1/things/{thing}": {"get": {"summary": "Show", "parameters": [thing]}},
        "/": {"get": {"summary": "Index"}},
    }
    assert listed(routes_of(ENDPOINTS), "/v1/") == "POST /v1/things, GET /v1/things, GET /v1/things/{thing}"
    assert refusals_of(ENDPOINTS) == {"/v1": openai_error_response, "/v1/things": openai_error_response}


async def test_batch_jobs_are_described_and_refuse_in_the_form_of_their_api(tmp_path: Path) -> None:
    app = weir.asgi(Square, executor=FakeExecutor(list), batch_dir=str(tmp_path))
    *refused, description = await ask(
        app, ("DELETE", "/v1/batches"), ("PUT", "/v1/files/file-1"), ("GET", "/openapi.json")
    )
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert "/v1/batches/{batch}/cancel" in description.json()["paths"]
    openapi_spec_validator.OpenAPIV31SpecValidator(description.json()).validate()


async def test_the_index_has_what_can_be_changed_too() -> None:
    (answer,) = await ask(weir.asgi(Square, executor=FakeExecutor(list)), ("GET", "/"))
    policy = answer.json()["pages"]["/models/{model}/policy"]
    assert policy.startswith("Explain the policy of one model") and "Solve the policy for other weights" in policy


async def reached(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def own(error: BaseException) -> HttpResponse:
    return HttpResponse(401, [(b"content-type", b"text/plain")], b"own: " + str(error).encode())


GATE = Gate(reached, Access(AccessSettings(api_key="k3y")), {"/own": own}, HttpSettings())


async def test_the_class_and_the_name_of_the_key_are_known_on_every_channel(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k3y\nnightly bulk\n")
    access = Access(AccessSettings(api_key_file=str(tmp_path / "keys")))
    sent = [(b"authorization", b"Bearer nightly"), (b"x-weir-class", b"interactive")]
    caller = sha256(b"nightly").hexdigest()[:16]
    expected = [(b":caller", caller.encode()), sent[0], (b"x-weir-class", b"bulk")]

    found: list[Scope] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(scope)

    scope = {"type": "http", "path": "/any", "root_path": "", "headers": sent}
    await Gate(application, access, {}, HttpSettings())(scope, None, None)  # type: ignore[arg-type]  # it calls neither
    head = HttpHead("POST", b"/any", "1.1", sent)
    call: Any = SimpleNamespace(metadata=(("authorization", "Bearer nightly"), ("x-weir-class", "interactive")))
    services = Services.__new__(Services)
    services._access = access

    assert found[0]["headers"] == expected
    assert _may(head, access)
    assert head.headers == expected
    assert services.admit("/any", call)
    assert call.metadata == (("authorization", "Bearer nightly"), ("x-weir-class", "bulk"))
    assert call.caller == caller


@subcases("path", ["/health/live", "/v2/health/ready"])
async def test_probes_are_let_through_and_nothing_that_looks_like_them(path: str) -> None:
    async def below(scope: Any, receive: Any, send: Any) -> None:
        await GATE(scope | {"root_path": "/below"}, receive, send)

    assert [answer.status_code for answer in await ask(GATE, ("GET", path))] == [200]
    assert [answer.status_code for answer in await ask(below, ("GET", "/below" + path))] == [200]
    others = (path + "/", path + "/x", "/x" + path, path.upper(), path.replace("/health", "//health"), "/health/deep")
    assert {answer.status_code for answer in await ask(GATE, *[("GET", other) for other in others])} == {401}


@subcases(("extensions", "answer"), [
    ({}, ["websocket.close"]),
    ({"websocket.http.response": {}}, ["websocket.http.response.start", "websocket.http.response.body"]),
])  # fmt: skip
async def test_a_websocket_is_not_opened(extensions: dict[str, Any], answer: list[str]) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    await GATE({"type": "websocket", "path": "/v2/ws", "headers": [], "extensions": extensions}, receive, send)
    assert [message["type"] for message in sent] == answer


async def test_what_is_no_call_is_let_through() -> None:
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append(scope["type"])

    unused: Any = None
    await Gate(app, Access(AccessSettings(api_key="k3y")), {}, HttpSettings())({"type": "lifespan"}, unused, unused)
    assert heard == ["lifespan"]
