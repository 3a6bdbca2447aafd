"""A real server process with the models that stock clients' examples ask, and more."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.served import Served

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
server_name = "stock"
allow_shared_memory = true
max_body_size = 4194304

[models.simple]
target = "{root}/examples/repository/simple/1/model.py:Simple"
[models.simple_string]
target = "{root}/examples/repository/simple_string/1/model.py:SimpleString"
[models.simple_identity]
target = "{root}/examples/repository/simple_identity/1/model.py:SimpleIdentity"
[models.square]
target = "{root}/examples/square.py:Square"
[models.types]
target = "{root}/tests/protocols/kserve/models.py:Types"
[models.vector]
target = "{root}/tests/protocols/kserve/models.py:Vector"
"""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve all of them, in a process started with the command."""
    config = tmp_path_factory.mktemp("served") / "weir.toml"
    config.write_text(CONFIG.format(root=ROOT))
    with Served("--config", config) as served:
        served.until_ready()
        yield served


@pytest.fixture
def address(server: Served) -> str:
    """Where it is, as clients want it: host and port."""
    return server.url.removeprefix("http://")


@pytest.fixture(scope="session")
def client(server: Served) -> Iterator[httpx.Client]:
    """Speak HTTP to it."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
