"""Calls are tested over both servers: gRPC's core, and grpc.aio, which takes its place where the core cannot be had."""

from typing import Any

import pytest
from tests.frontends.grpc import kit
from tests.served import TEST_FRONTS

from weir.frontends.grpc.aio import AioCore
from weir.frontends.grpc.core import Core

OVER: dict[str, Any] = {"core": Core, "aio": AioCore}
if TEST_FRONTS:
    OVER["fronts"] = kit.FRONTS
# Tests that replace, or look at, what in a server with fronts other processes have or do later.
INSIDE = {
    "test_raw_tensors", "test_an_error_of_ours_says_nothing_to_strangers", "test_answers_are_those_of_other_requests",
    "test_deadlines_of_known_forms", "test_a_model_that_was_replaced_answers_by_its_own_rules",
}  # fmt: skip
OVER_BOTH = {"test_inference", "test_services"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in OVER_BOTH:
        over = {
            name: core for name, core in OVER.items() if name != "fronts" or metafunc.function.__name__ not in INSIDE
        }
        metafunc.parametrize("over", over.values(), ids=over, indirect=True)


@pytest.fixture(autouse=True)
def over(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve over the core that the parameter is, if there is one."""
    monkeypatch.setattr(kit, "CORE", getattr(request, "param", kit.CORE))
