"""The OpenAPI document tells the truth: schemathesis makes requests of it and holds the answers of a real server to it."""

from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.served import Served

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> dict[str, Any]:
    """The document of the server."""
    document: dict[str, Any] = client.get("/openapi.json").json()
    return document


def test_it_is_valid(document: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(document).validate()


def test_the_paths_of_the_protocol_are_there(document: dict[str, Any]) -> None:
    assert {
        "/v2", "/v2/health/ready", "/v2/models/{model}/versions/{version}/ready", "/v2/models/simple/infer",
        "/v2/repository/models/{model}/load", "/v2/workers/{worker}/load",
        "/v2/systemsharedmemory/region/{region}/register",
    } <= set(document["paths"])  # fmt: skip
    assert not any("trace" in path or "logging" in path for path in document["paths"])


def test_bodies_and_answers_are_those_that_the_routes_declare(document: dict[str, Any]) -> None:
    def shape(path: str, method: str, part: str) -> Any:
        operation = document["paths"][path][method]
        return (operation["requestBody"] if part == "reads" else operation["responses"]["200"])["content"]

    register = "/v2/systemsharedmemory/region/{region}/register"
    schema = shape(register, "post", "reads")["application/json"]["schema"]["$ref"].rpartition("/")[2]
    region = document["components"]["schemas"][schema]
    assert region["required"] == ["key", "byte_size"] and region["properties"]["byte_size"]["minimum"] == 1
    statistics = shape("/v2/models/{model}/stats", "get", "answers")["application/json"]["schema"]
    assert statistics == {"$ref": "#/components/schemas/AllStatistics"}
    assert list(shape("/v2/workers/{worker}/load", "post", "answers")) == ["text/plain"]
    config = document["components"]["schemas"]["ModelConfig"]
    assert {"max_batch_size", "instance_group"} <= set(config["required"])
    infer = shape("/v2/models/simple/infer", "post", "reads")["application/json"]["schema"]
    (tensor, _) = infer["properties"]["inputs"]["items"]["oneOf"]
    assert tensor["properties"]["name"] == {"const": "INPUT0"} and tensor["properties"]["shape"]["maxItems"] == 2


def test_the_examples_work(client: httpx.Client, document: dict[str, Any]) -> None:
    count = 0
    for path, operations in document["paths"].items():
        if path.startswith("/v2/models/") and path.endswith("/infer"):
            body = operations["post"]["requestBody"]["content"]["application/json"]
            for example in body.get("examples", {}).values():
                assert client.post(path, json=example["value"]).status_code == 200, path
                count += 1
    assert count >= 4


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
def test_what_it_says_of_the_protocol_is_so(
    server: Served, document: dict[str, Any], mode: schemathesis.GenerationMode
) -> None:
    """Whatever is sent, by the schema or against it: codes, content types and bodies are those described."""
    schema = schemathesis.openapi.from_dict({**document, "servers": []}).include(path_regex="^/v2")
    schema.config.update(base_url=server.url)
    seen: set[int] = set()
    for found in schema.get_all_operations():
        assert isinstance(found, Ok), found
        operation: Any = found.ok()
        has_effects = operation.method == "post" and operation.path.endswith("load")  # felt by the others
        if has_effects or (mode is schemathesis.GenerationMode.NEGATIVE and not operation.body):
            continue

        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        @hypothesis.settings(
            max_examples=3, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
        )  # fmt: skip
        def holds(case: Any) -> None:
            seen.add(case.call_and_validate(checks=CHECKS).status_code)

        holds()
    assert 400 in seen and (mode is schemathesis.GenerationMode.NEGATIVE or {200, 404} <= seen), seen
