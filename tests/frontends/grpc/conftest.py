"""Calls are tested over both servers: gRPC's core, and grpc.aio, which takes its place where the core cannot be had."""

from typing import Any

import pytest
from tests.frontends.grpc import kit

from weir.frontends.grpc.aio import AioCore
from weir.frontends.grpc.core import Core

OVER_BOTH = {"test_inference", "test_inference_streaming", "test_services", "test_services_controlling"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in OVER_BOTH:
        metafunc.fixturenames.append("over")
        metafunc.parametrize("over", [Core, AioCore], ids=["core", "aio"], indirect=True)


@pytest.fixture
def over(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Serve over the core that the parameter is."""
    monkeypatch.setattr(kit, "CORE", request.param)
