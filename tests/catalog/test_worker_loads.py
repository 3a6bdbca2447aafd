"""Loads as the AMD Inference Server has them: endpoints, shared by those who say the same parameters."""

from typing import Any

import pytest
from tests.catalog.workshop import Scaled, Workshop
from tests.rings import subcases

from weir import Conflict, Forbidden, InvalidRequest, ModelNotFound
from weir.catalog.loading import REFUSED, apply, check_allowed
from weir.catalog.sources import ModelToServe

MODEL = ModelToServe("shelf:Scaled", "one", {"factor": 2}, [], {"workers": 2})


async def test_the_same_parameters_share_an_endpoint_and_others_make_one() -> None:
    shop = Workshop(one={"": "a"})
    load = shop.manager.load_worker
    assert await load("one", {"tag": "x"}) == "one"
    assert await load("one", {"tag": "x"}) == "one"
    assert await load("one", {"tag": "y"}) == "one-1"
    assert await load("one", {}) == "one-2"
    assert await load("one", {"tag": "x", "share": True}) == "one"
    assert [await shop.ask(name) for name in ("one", "one-1", "one-2")] == ["x", "y", "a"]
    assert [service.workers.workers for service in shop.registry.all] == [1, 1, 1]
    assert await load("one", {"tag": "y", "share": False}) == "one-1"
    assert await load("one", {"tag": "z", "share": False}) == "one-3"
    assert [service.workers.workers for service in shop.registry.all] == [1, 2, 1, 1]
    assert len(shop.made) == 4


async def test_unloading_ends_one_worker_and_with_the_last_the_endpoint() -> None:
    shop = Workshop(one={"": "a"})
    for tag in ("x", "y", "y"):
        await shop.manager.load_worker("one", {"tag": tag, "share": False})
    for left in ([1, 1], [1]):
        await shop.manager.unload_worker("one-1")
        assert [service.workers.workers for service in shop.registry.all] == left
    with pytest.raises(ModelNotFound, match="'one-1'"):
        await shop.manager.unload_worker("one-1")
    await shop.manager.unload_worker("one")
    assert await shop.manager.load_worker("one", {"tag": "y"}) == "one"
    assert await shop.ask("one") == "y"


async def test_a_model_that_runs_anyway_is_the_endpoint_without_parameters() -> None:
    shop = Workshop(one={"1": "a", "2": "b"})
    await shop.manager.load_model("one")
    assert await shop.manager.load_worker("one", {"share": False}) == "one"
    assert shop.registry.get("one").workers.workers == 2
    assert await shop.manager.load_worker("one", {"tag": "x"}) == "one-1"
    assert await shop.states() == {"one/1": "READY", "one/2": "READY", "one-1/2": "READY"}


async def test_a_model_that_is_reloaded_keeps_the_workers_that_it_was_given() -> None:
    shop = Workshop(one={"1": "a", "2": "b"})

    def workers() -> list[int]:
        return [service.workers.first_workers for service in shop.registry.versions("one").values()]

    await shop.manager.load_model("one")
    for _ in range(2):
        await shop.manager.load_worker("one", {"share": False})
    await shop.manager.load_model("one")
    assert workers() == [1, 3]
    await shop.manager.unload_worker("one")
    await shop.manager.load_model("one", version="2")
    await shop.manager.load_model("one", version="1")
    assert workers() == [1, 2]
    shop.adding_fails = True
    with pytest.raises(Conflict, match="failed to load 'one': no room"):
        await shop.manager.load_model("one")
    assert workers() == [1, 2]
    assert "the old model keeps running: no room" in (await shop.manager.index())[1].reason
    shop.adding_fails = False
    await shop.manager.unload_model("one")
    await shop.manager.load_model("one")
    assert workers() == [1, 1]


async def test_an_endpoint_is_reloaded_with_its_parameters() -> None:
    shop = Workshop(one={"": "a"})
    await shop.manager.load_worker("one", {})
    await shop.manager.load_worker("one", {"tag": "x"})
    shop.shelf.models["one"][""] = "a2"
    for name in ("one", "one-1"):
        await shop.manager.load_model(name)
    assert [await shop.ask(name) for name in ("one", "one-1")] == ["a2", "x"]
    assert await shop.manager.load_worker("one", {"tag": "x"}) == "one-1"


async def test_names_of_endpoints_avoid_other_models() -> None:
    shop = Workshop(one={"": "a"}, **{"one-1": {"": "b"}})
    await shop.manager.load_worker("one", {})
    assert await shop.manager.load_worker("one", {"tag": "x"}) == "one-2"
    assert await shop.manager.load_worker("one-1", {}) == "one-1"


def test_a_parameter_goes_to_the_constructor_or_is_a_setting() -> None:
    said: dict[str, Any] = {
        "factor": 3, "batch_size": 8, "timeout": 5, "batchers": 1, "workers": 1, "policy": "greedy", "predict_timeout": 2,
        "retry_in_halves": False,
    }  # fmt: skip
    applied = apply(said, MODEL, Scaled)
    assert applied.params == {"factor": 3}
    assert applied.settings == {
        "workers": 1, "max_batch_size": 8, "max_queue_delay": 0.005, "policy": "greedy", "predict_timeout": 2.0,
        "retry_in_halves": False,
    }  # fmt: skip
    assert apply({"batch": 4}, MODEL, Scaled).settings["max_batch_size"] == 4


@subcases(
    ("said", "message"),
    [
        (
            {"input_size": 3},
            "parameter 'input_size': is not a setting, and the constructor of Scaled takes factor, tag",
        ),
        ({"batch_size": "8"}, "parameter batch_size='8': must be of type int"),
        ({"workers": True}, "parameter workers=True: must be of type int or str"),
        ({"timeout": "5ms"}, "parameter timeout='5ms': must be a number of milliseconds"),
        ({"backpressure": 1}, "parameter backpressure=1: must be of type bool"),
        *(({name: 2}, f"parameter '{name}': ") for name in REFUSED),  # what has no meaning here
    ],
)
def test_wrong_parameters_are_named(said: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        apply(said, MODEL, Scaled)
    assert refused.value.message == message or (message.endswith(": ") and message in refused.value.message)


async def test_a_wrong_value_is_an_invalid_request() -> None:
    shop = Workshop(one={"": "a"})
    with pytest.raises(InvalidRequest, match=r"failed to load 'one': .*max_batch_size=0: must be 1 or more"):
        await shop.manager.load_worker("one", {"batch_size": 0})
    with pytest.raises(InvalidRequest, match="share='no': must be true or false"):
        await shop.manager.load_worker("one", {"share": "no"})
    assert await shop.states() == {"one": "UNAVAILABLE"}
    await shop.manager.load_worker("one", {})
    with pytest.raises(InvalidRequest, match=r"failed to load 'one-1': .*max_batch_size=0: must be 1 or more"):
        await shop.manager.load_worker("one", {"batch_size": 0})
    assert [state.name for state in await shop.manager.index()] == ["one"]  # nobody could load a one-1 again


def test_what_may_bring_code_or_files_needs_a_flag() -> None:
    for said in ({"env": "A=1"}, {"executor": "inline"}, {"policy": "mine:Policy"}, {"policy": "bank.npz"}):
        with pytest.raises(Forbidden, match="--allow-model-files"):
            check_allowed(said, allow_files=False)
        check_allowed(said, allow_files=True)
    with pytest.raises(Forbidden):
        check_allowed({"policy": "auto:profile=model.toml"}, allow_files=False)
    for harmless in ("greedy", "control-limit:4", "auto", "auto:seconds=2"):
        check_allowed({"policy": harmless, "workers": 2}, allow_files=False)
