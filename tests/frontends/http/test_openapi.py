"""The OpenAPI document is valid, complete and tells the truth."""

import asyncio
import json
from typing import Annotated, Any, Literal
from urllib.parse import urljoin

import httpx
import pydantic
import pytest
from starlette.applications import Starlette
from tests.frontends.http.models import MODELS, Add, Count, Echo, Length, Shout, Square
from tests.late import openapi_spec_validator
from tests.streaming_models import Prefixes as Stories

from weir.catalog.registry import Registry
from weir.frontends.http.application import make_app
from weir.frontends.http.asgi import HttpEndpoint, described_paths
from weir.frontends.http.openapi import ModelList, described_page, openapi
from weir.protocols import HttpSettings
from weir.protocols.kserve import KserveContext
from weir.protocols.response import HttpResponse
from weir.serving.service import Service
from weir.testing import FakeExecutor


async def page() -> Annotated[HttpResponse, ModelList]:
    """Say what there is."""
    raise NotImplementedError


def described(*models: Any, routes: dict[str, str] | None = None) -> dict[str, Any]:
    registry = Registry([Service(model, executor=FakeExecutor()) for model in models], routes)
    pages = [
        HttpEndpoint("GET", path, Starlette(), described_page("GET", path, page)) for path in ("/", "/models/{model}")
    ]
    document = openapi(registry, described_paths(pages))
    decoded: dict[str, Any] = json.loads(json.dumps(document))
    return decoded


@pytest.mark.parametrize("models", [MODELS, (Square,), (Length, Count)])
def test_it_is_valid(models: Any) -> None:
    openapi_spec_validator.OpenAPIV31SpecValidator(described(*models)).validate()


def test_every_path_is_there() -> None:
    assert set(described(Square, Echo, routes={"square": "/api/sq"})["paths"]) == {
        "/infer/square", "/infer/square/batch", "/api/sq", "/api/sq/batch", "/infer/echo", "/infer/echo/batch", "/",
        "/models/{model}",
    }  # fmt: skip
    assert {"/inference", "/inference/batch"} <= set(described(Square)["paths"])


def test_a_streaming_model_answers_with_events() -> None:
    document = described(Stories, Square)
    openapi_spec_validator.OpenAPIV31SpecValidator(document).validate()
    assert {path for path in document["paths"] if "prefixes" in path} == {"/infer/prefixes"}
    responses = document["paths"]["/infer/prefixes"]["post"]["responses"]
    assert list(responses["200"]["content"]) == ["text/event-stream"]
    assert "501" in responses


def body_of(operation: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = operation["requestBody"]["content"]["application/json"]
    return body


def test_declared_types_are_described() -> None:
    document = described(Length, Count)
    point = body_of(document["paths"]["/infer/length"]["post"])["schema"]
    assert point["properties"]["x"] == {"title": "X", "type": "number"}
    tree = body_of(document["paths"]["/infer/count"]["post"])["schema"]
    assert tree["$ref"] == "#/components/schemas/count.Input.Node"
    node = document["components"]["schemas"]["count.Input.Node"]
    assert node["properties"]["children"]["items"]["$ref"] == "#/components/schemas/count.Input.Node"


def test_unions_refer_to_their_members() -> None:
    class Cat(pydantic.BaseModel):
        kind: Literal["cat"]

    class Dog(pydantic.BaseModel):
        kind: Literal["dog"]

    class Pet(pydantic.BaseModel):
        pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]

    class Vet(Echo):
        Input = Pet

    document = described(Vet)
    openapi_spec_validator.OpenAPIV31SpecValidator(document).validate()
    pet = body_of(document["paths"]["/infer/vet"]["post"])["schema"]["properties"]["pet"]
    assert pet["discriminator"]["mapping"]["cat"] == "#/components/schemas/vet.Input.Cat"
    assert {"vet.Input.Cat", "vet.Input.Dog"} <= set(document["components"]["schemas"])


def test_examples_that_json_cannot_say_are_shown_somehow() -> None:
    class Odd(Echo):
        examples = (object(), {1, 2}, b"bytes")

    values = body_of(described(Odd)["paths"]["/infer/odd"]["post"])["examples"]
    assert len(values) == 3


def test_tensors_are_described() -> None:
    schema = body_of(described(Add)["paths"]["/infer/add"]["post"])["schema"]
    assert schema["required"] == ["a", "b"]
    rows = schema["properties"]["a"]
    assert (rows["type"], rows["items"]["minItems"], rows["items"]["items"]) == ("array", 2, {"type": "number"})
    assert rows["description"] == "FP32, shape [-1, 2]"


def test_examples_are_shown() -> None:
    operation = described(Length)["paths"]["/infer/length"]["post"]
    assert body_of(operation)["examples"] == {"1": {"value": {"x": 3.0, "y": 4.0}}}
    assert operation["responses"]["200"]["content"]["application/json"]["examples"] == {"1": {"value": 5.0}}
    batch = described(Square)["paths"]["/infer/square/batch"]["post"]
    assert body_of(batch)["examples"] == {"all": {"value": [3, 1.5]}}


def test_errors_are_described_with_their_codes() -> None:
    responses = described(Square)["paths"]["/infer/square"]["post"]["responses"]
    assert set(responses) == {"200", "400", "408", "413", "415", "422", "429", "500", "503", "504"}
    assert "Overloaded" in responses["429"]["description"]
    assert "Retry-After" in responses["429"]["headers"]


def test_content_types_are_those_that_the_model_speaks() -> None:
    document = described(Shout, Add)
    assert set(document["paths"]["/infer/shout"]["post"]["requestBody"]["content"]) == {
        "application/json", "application/msgpack", "application/octet-stream", "text/plain", "text/x-loud",
    }  # fmt: skip
    assert set(document["paths"]["/infer/add"]["post"]["requestBody"]["content"]) == {
        "application/json", "application/msgpack",
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/openapi.json", "/api-doc/openapi.json"])
def test_the_servers_are_relative_to_the_document(path: str) -> None:
    """So that they hold behind a proxy that removes a prefix, which only the caller knows."""
    app: Any = make_app(KserveContext(Registry([Service(Square, executor=FakeExecutor())]), HttpSettings()))

    async def ask() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return (await client.get(path)).json()["servers"]

    ((server,),) = (asyncio.run(ask()),)
    for prefix in ("", "/ml", "/some/where"):
        seen = urljoin(f"http://proxy{prefix}{path}", server["url"])
        assert seen.rstrip("/") + "/infer/square" == f"http://proxy{prefix}/infer/square"
