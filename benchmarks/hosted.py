"""Weir as an application, which gunicorn starts several times: each is a whole server with a queue and a worker of its own."""

from typing import Any

import weir
from benchmarks.models import Exactly, Square


def square() -> Any:
    """Return the smallest model."""
    return weir.asgi(Square, max_batch_size=64)


def exactly(policy: str) -> Any:
    """Return the model that takes as long as its profile says, with the policy in this file."""
    return weir.asgi(Exactly, policy=policy)
