"""A frontend for the tests of a file, and Weir's own clients of it."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.text_server.bert_as_service.opened import Connect, Opened


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    with Opened() as opened:
        yield opened


@pytest.fixture
def connect(opened: Opened) -> Iterator[Connect]:
    """Returns a client of the frontend; all are closed at the end."""
    with ExitStack() as stack:

        def made(to: Opened = opened, **said: Any) -> Any:
            return stack.enter_context(to.client(**said))

        yield made
