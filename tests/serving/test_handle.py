"""What the edge knows of a running model."""

import ast
import asyncio
import re

import pytest
from tests.serving.kit import Square
from tests.test_architecture import SOURCE, imports_of, name_of

from weir import Service
from weir.catalog.registry import Registry
from weir.serving.handle import ModelControl, ModelFacts, ModelHandle, Models
from weir.testing import FakeClock, FakeExecutor

EDGE = ("protocols", "frontends", "jobs", "text_server")
COMPOSES = {"weir.text_server.calibration"}  # makes a service of its own, to measure a model before the server starts


def members(protocol: type) -> set[str]:
    return {name for name in {**vars(protocol), **protocol.__annotations__} if not name.startswith("_")}


def service() -> Service:
    return Service(Square, name="area", version="2", executor=FakeExecutor(), clock=FakeClock(), max_batch_size=3)


def test_the_edge_does_not_import_services_and_their_registry() -> None:
    apart = {"weir.serving.service", "weir.catalog.registry"}
    paths = [path for part in EDGE for path in (SOURCE / part).rglob("*.py")]
    assert {name_of(path) for path in paths if apart & imports_of(path)} <= COMPOSES


def test_the_house_of_one_model_knows_no_protocol() -> None:
    """The queue of a model takes entries, whatever protocol its requests came in."""
    protocols = ("weir.wire.inference", "weir.wire.kserve", "weir.protocols")
    found = {(name_of(path), name) for path in (SOURCE / "serving").rglob("*.py") for name in imports_of(path)}
    assert not {(module, name) for module, name in found if name.startswith(protocols)}


def test_who_calls_a_service() -> None:
    paths = {*SOURCE.rglob("*.py")} - {*(SOURCE / "serving").rglob("*.py")}
    found = {
        (node.attr, name_of(path))
        for path in paths
        if re.search(r"\.(submit|submit_all|notify)\b", path.read_text())  # to parse all that there is takes seconds
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("submit", "submit_all", "notify")
        if ast.unparse(node.value).endswith(("service", "handle"))
    }
    dispatcher, exchange = "weir.fronts.dispatcher", "weir.protocols.exchange"
    assert sorted(found) == [
        ("notify", "weir.frontends.http.asgi"), ("notify", "weir.frontends.http.fast.shared"), ("notify", dispatcher), ("notify", exchange),
        *[("submit", f"weir.frontends.http.fast.{each}") for each in ("connection", "inference")], ("submit", dispatcher), ("submit", exchange),
        ("submit_all", dispatcher),
    ]  # fmt: skip


def test_a_service_is_a_handle_and_its_control_and_a_registry_has_handles() -> None:
    handle: ModelHandle = service()
    control: ModelControl = handle.control
    models: Models = Registry([service()])
    assert not {name for name in members(Models) if not hasattr(models, name)}
    for protocol, own in ((ModelHandle, handle), (ModelControl, control)):
        assert not {name for name in members(protocol) if not hasattr(own, name)}


def test_facts_say_what_is_served_and_within_which_limits() -> None:
    facts = service().facts
    assert (facts.name, facts.version, facts.label, facts.model) == ("area", "2", "area/2", Square)
    assert (facts.batching.max_batch_size, facts.streaming, facts.takes_tensors) == (3, False, False)
    assert not facts.hooked and not facts.needs_measure
    with pytest.raises(AttributeError):
        facts.name = "other"  # type: ignore[misc]  # that it may not be set is what is tested


def test_facts_are_others_after_a_reload_and_the_handle_is_the_same() -> None:
    async def facts() -> tuple[ModelFacts, ModelFacts, ModelFacts]:
        clock = FakeClock()
        old, new = (Service(Square, executor=FakeExecutor(), clock=clock, max_batch_size=size) for size in (1, 2))
        async with old, new:
            before = old.facts
            await old.replace_with(new).stop()
            return before, old.facts, new.facts

    before, after, other = asyncio.run(facts())
    assert after is other and after is not before
    assert (before.batching.max_batch_size, after.batching.max_batch_size) == (1, 2)
