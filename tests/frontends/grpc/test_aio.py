"""gRPC falls back to grpc.aio where the private core that Weir is built on is not what it was."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from tests.frontends.grpc.test_services import MODELS, check_client
from tests.served import Served

from weir.catalog.registry import Registry
from weir.frontends.grpc import CORE_VARIABLES, GrpcSettings, call, make_frontend
from weir.frontends.grpc.aio import AioCore
from weir.frontends.grpc.core import Core
from weir.frontends.grpc.server import GrpcServer
from weir.protocols import HttpSettings
from weir.protocols.kserve import KserveContext


def opened() -> GrpcServer:
    http = HttpSettings()
    frontend = make_frontend(KserveContext(Registry([]), http), GrpcSettings(grpc_port=0), http)
    assert isinstance(frontend, GrpcServer)
    return frontend


def test_this_grpcio_has_all_that_is_used_of_its_core(caplog: pytest.LogCaptureFixture) -> None:
    """If this fails, the names that it prints are gone from grpcio's core: see core.py, and the ceiling in pyproject.toml."""
    assert call.lacking() == []
    assert opened()._make_core is Core
    assert caplog.records == []
    imported = [sys.executable, "-c", "from grpc._cython import cygrpc; cygrpc.CompletionQueue()"]
    variables = {**CORE_VARIABLES, "GRPC_VERBOSITY": "ERROR"}
    done = subprocess.run(imported, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    assert "Unknown experiment" not in done.stderr


def test_a_missing_private_name_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(call, "NEEDED", (*call.NEEDED, "OfTomorrow"))
    assert opened()._make_core is AioCore
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"grpcio {grpc.__version__} has no OfTomorrow in its core: gRPC runs over grpc.aio" in record.getMessage()


def test_a_stock_client_is_served_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import grpc, sys\nsys.modules['grpc._cython.cygrpc'] = None\n")
    with Served(*MODELS, "--grpc-port", "0", env={"PYTHONPATH": str(tmp_path)}) as served:
        warned = served.until_logged(r"grpcio \S+ has no (.*) in its core: gRPC runs over grpc.aio")[1]
        assert warned.split(", ") == list(call.NEEDED)
        served.until_grpc().until_ready()
        check_client("standard.py", served.grpc)
