"""timeouts.py: a time that is none is refused, not read as none said; by every client, before anything is sent."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from weir.client import AsyncHttpClient, GrpcClient, HttpClient, WebSocketClient
from weir.client.retrying import of_call, of_client
from weir.errors import InvalidRequest, SettingsError

NONE = [0, -1, 0.0, float("nan"), float("inf"), "5", 10**400]
ONE = {"x": numpy.ones(1)}
NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize("timeout", NONE)
def test_what_is_no_time_is_refused(timeout: Any) -> None:
    with pytest.raises(SettingsError, match=r"timeout=.*greater than 0"):
        of_client(timeout)
    with pytest.raises(InvalidRequest, match=r"timeout=.*greater than 0"):
        of_call(timeout, 60.0)


def test_a_call_that_says_none_has_the_time_of_its_client() -> None:
    assert of_client(3) == 3.0
    assert of_call(None, 3.0) == 3.0
    assert of_call(0.5, 3.0) == 0.5


@pytest.mark.parametrize("make", [(HttpClient, "http"), (GrpcClient, "grpc"), (WebSocketClient, "ws")])
def test_no_client_is_made_with_none(make: tuple[Callable[..., Any], str]) -> None:
    client, scheme = make
    with pytest.raises(SettingsError, match="timeout=0:"):
        client(NOBODY.replace("http", scheme), timeout=0)


def test_no_call_begins_with_none() -> None:
    with HttpClient(NOBODY) as client:
        with pytest.raises(InvalidRequest, match="timeout=0:"):
            client.infer("doubles", ONE, timeout=0)
        with pytest.raises(InvalidRequest, match="timeout=0:"):
            list(client.stream("doubles", ONE, timeout=0))
        with pytest.raises(InvalidRequest, match="timeout=0:"):
            client.wait_until_server_ready(0)


def test_no_awaited_call_begins_with_none() -> None:
    async def main() -> None:
        async with AsyncHttpClient(NOBODY) as client:
            with pytest.raises(InvalidRequest, match="timeout=-1:"):
                await client.infer("doubles", ONE, timeout=-1)
            with pytest.raises(InvalidRequest, match="timeout=-1:"):
                [one async for one in client.stream("doubles", ONE, timeout=-1)]

    asyncio.run(main())
