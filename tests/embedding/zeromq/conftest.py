"""A door for the tests of a file, and Weir's own clients of it."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.embedding.zeromq.opened import Connect, Opened

from weir.client import EmbeddingClient


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    with Opened() as opened:
        yield opened


@pytest.fixture
def connect(opened: Opened) -> Iterator[Connect]:
    """Returns a client of the door; all are closed at the end."""
    with ExitStack() as stack:

        def made(to: Opened = opened, kind: Any = EmbeddingClient, **said: Any) -> Any:
            return stack.enter_context(kind(to.url, **{"port_out": to.port_out, "timeout": 20.0, **said}))

        yield made
