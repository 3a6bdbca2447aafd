"""Servers of texts that many tests share."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.text_server.hashing import HashingEncoder
from tests.text_server.served_texts import Standing

from weir.frontends.http.fast.handover import HandOver
from weir.text_server.texts import TextFacts


@pytest.fixture(scope="module")
def plain() -> Iterator[Standing]:
    """A server of one encoder, for requests that are alike whatever came before."""
    with Standing(HashingEncoder()) as server:
        yield server


@pytest.fixture(scope="module")
def prompted() -> Iterator[Standing]:
    """A server of an encoder with prompts."""
    prompts = {"query": "Instruct: Given a question\nQuery:", "passage": "passage: "}
    with Standing(HashingEncoder(facts=TextFacts(prompts=prompts))) as server:
        yield server


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The beginnings of what was left to the ASGI application."""
    found: list[bytes] = []
    go_on = HandOver.go_on

    def noted(self: HandOver, parser: Any, transport: Any, replay: bytes) -> None:
        found.append(replay)
        go_on(self, parser, transport, replay)

    monkeypatch.setattr(HandOver, "go_on", noted)
    yield found
