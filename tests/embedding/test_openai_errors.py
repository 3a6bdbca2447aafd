"""What goes wrong at OpenAI's door, as its stock client shows it."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from tests.embedding.doors import Served, served
from tests.embedding.hashing import HashingEncoder


def sent(method: str, path: str, **said: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with served(HashingEncoder(), max_header_size=2000, max_body_size=1000) as server:
            return await server.client.request(method, path, **said)

    return asyncio.run(main())


@pytest.mark.parametrize(("method", "path", "status", "code", "rule"), [
    ("POST", "/v1/chat/completions", 404, "unknown_url", "no such path; there are POST /v1/embeddings, GET /v1/models"),
    ("GET", "/v1/", 404, "unknown_url", "/v1/: there is no such path"),
    ("GET", "/v1/embeddings", 405, "method_not_allowed", "/v1/embeddings: takes POST only"),
    ("POST", "/v1/models", 405, "method_not_allowed", "takes GET only"),
    ("DELETE", "/v1/models/hashing", 405, "method_not_allowed", "takes GET only"),
])  # fmt: skip
def test_what_is_not_there_is_refused_in_its_shape(method: str, path: str, status: int, code: str, rule: str) -> None:
    answer = sent(method, path, headers={"x-request-id": "r1"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert rule in error["message"] and error["param"] is None
    assert answer.headers["x-request-id"] == "r1"
    assert (answer.headers.get("allow") is not None) == (status == 405)


def test_the_stock_client_shows_the_reason() -> None:
    async def ask(server: Served) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError, match="there are POST /v1/embeddings") as caught:
                await client.chat.completions.create(model="any", messages=[])
            assert caught.value.code == "unknown_url"
            long: Any = {"input": "a b c d e f g", "extra_body": {"truncate": False}}
            with pytest.raises(openai.BadRequestError, match=r"input\[0\]: has 7 tokens") as refused:
                await client.embeddings.create(model="hashing", **long)
            assert refused.value.code == "context_length_exceeded"

    async def main() -> None:
        async with served(HashingEncoder()) as server:
            await ask(server)

    asyncio.run(main())


@pytest.mark.parametrize(("said", "place"), [
    (rb'{"input": ["a", "\ud800"]}', "input[1]"), (rb'{"input": "\ud800"}', "input"),
    (rb'{"input": "a", "user": "\ud800"}', "user"),
])  # fmt: skip
def test_half_of_a_surrogate_pair_is_named_by_its_place(said: bytes, place: str) -> None:
    error = sent("POST", "/v1/embeddings", content=said).json()["error"]
    assert error["message"].startswith(f"{place}: is not valid Unicode: character 0 is half of a surrogate pair")
    assert error["param"] == place.partition("[")[0]


def test_the_id_of_a_request_comes_back_whatever_happens() -> None:
    headers = {"x-request-id": "r1"}
    asked: list[dict[str, Any]] = [
        {"json": {"input": "a"}}, {"json": {"input": []}}, {"content": b"x" * 1001}, {"json": {"input": "a", "model": "other"}},
    ]  # fmt: skip
    for said in asked:
        answer = sent("POST", "/v1/embeddings", headers=headers, **said)
        assert answer.headers.get_list("x-request-id") == ["r1"], answer.status_code
    answer = sent("POST", "/v1/embeddings", headers={"x-request-id": "r" * 257}, json={"input": "a"})
    assert answer.status_code == 400 and "x-request-id" not in answer.headers
