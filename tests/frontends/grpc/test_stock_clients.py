"""Clients that nobody here wrote, each in a process of its own, against a real server process."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.late import needs_kserve
from tests.served import Served

ROOT = Path(__file__).parents[3]
REPOSITORY = ROOT / "examples" / "repository"
CLIENTS = Path(__file__).parent / "clients"
MODELS = (
    REPOSITORY / "simple" / "1" / "model.py:Simple",
    REPOSITORY / "simple_string" / "1" / "model.py:SimpleString",
    ROOT / "tests" / "streaming_models.py:Count",
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Served(*MODELS, "--grpc-port", "0", "--allow-shared-memory") as served:
        yield served.until_grpc().until_ready().grpc


def check_client(client: str, address: str) -> None:
    command = [sys.executable, "-W", "ignore", str(CLIENTS / client), address]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("client", ["standard.py", "triton.py", pytest.param("kserve_client.py", marks=needs_kserve)])
def test_client(address: str, client: str) -> None:
    check_client(client, address)
