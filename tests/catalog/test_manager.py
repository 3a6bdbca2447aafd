"""Models are loaded, replaced and unloaded: one change at a time, each caller with what is true."""

import asyncio
import gc
import json
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.catalog.repository.shelf import plain, write
from tests.catalog.workshop import Scaled, Workshop
from tests.rings import subcases
from tests.waiting import turns

import weir
from weir.catalog.loading import REFUSED, ServiceMaker, apply, check_allowed
from weir.catalog.manager import (
    IMPORT_SWITCH_INTERVAL,
    MAX_CHANGES,
    ChangeQueue,
    Manager,
    ModelState,
    import_in_thread,
)
from weir.catalog.registry import Registry
from weir.catalog.repository.folder import upload_path, versions_in
from weir.catalog.repository.model_files import file_within
from weir.catalog.sources import ModelToServe
from weir.serving import NAME


async def test_a_model_is_loaded_replaced_and_unloaded() -> None:
    shop = Workshop(one={"": "old"})
    assert await shop.states() == {"one": "UNAVAILABLE"}
    await shop.manager.load_model("one")
    assert await shop.ask("one") == "old"
    shop.shelf.models["one"][""] = "new"
    before = shop.registry.get("one")
    await shop.manager.load_model("one")
    assert await shop.ask("one") == await before.infer(0) == "new"
    assert await shop.states() == {"one": "READY"}
    assert [executor.stopped for executor in shop.executors] == [True, False]
    await shop.manager.unload_model("one")
    assert shop.executors[1].stopped
    assert await shop.manager.index() == [ModelState("one", "", "UNAVAILABLE", "not loaded")]
    with pytest.raises(weir.ModelNotFound):
        await shop.ask("one")
    await shop.manager.unload_model("one")  # it is not there: nothing to do
    assert shop.threads.isdisjoint({threading.get_ident()})


async def test_what_is_unknown_is_reported() -> None:
    shop = Workshop(one={"": "a"})
    load, unload = shop.manager.load_model, shop.manager.unload_model
    await load("one")
    for change, unknown in (
        (load("two"), "'two'"), (unload("two"), "'two'"), (shop.manager.load_worker("two", {}), "'two'"),
        (shop.manager.unload_worker("two"), "'two'"),
        (load("one", version="3"), "unknown version '3'"), (unload("one", version="3"), "unknown version '3'"),
    ):  # fmt: skip
        with pytest.raises(weir.ModelNotFound, match=unknown):
            await change
    assert await shop.ask("one") == "a"


@pytest.mark.parametrize("where", ["read", "start"])
async def test_a_load_that_fails_leaves_the_old_one_serving(where: str) -> None:
    shop = Workshop(one={"": "old"}, two={"": "b"})
    await shop.manager.load_model("one")
    if where == "read":
        shop.shelf.models = {"one": {"": "broken"}, "two": {"": "broken"}}
    else:
        shop.fails = weir.ModelError("no weights", original_type="OSError")
    expected, why = (weir.InvalidRequest, "cannot be read") if where == "read" else (weir.ModelError, "no weights")
    for name in ("one", "two"):
        with pytest.raises(expected, match=f"failed to load '{name}': .*{why}"):
            await shop.manager.load_model(name)
    assert await shop.ask("one") == "old"
    one, two = await shop.manager.index()
    assert (one.state, two.state) == ("READY", "UNAVAILABLE")
    assert "load failed; the old model keeps running" in one.reason and why in two.reason
    shop.fails, shop.shelf.models["one"][""] = None, "new"
    await shop.manager.load_model("one")
    assert (await shop.manager.index())[0] == ModelState("one", "", "READY", "")


async def test_versions_are_served_side_by_side() -> None:
    shop = Workshop(one={"1": "a", "2": "b", "10": "c"})
    await shop.manager.load_model("one")
    assert [await shop.ask("one", version) for version in ("", "1", "2", "10")] == ["c", "a", "b", "c"]
    shop.shelf.models["one"] = {"1": "a2", "2": "b2"}
    await shop.manager.load_model("one", version="1")
    assert [await shop.ask("one", version) for version in ("", "1", "2")] == ["c", "a2", "b"]
    gone = shop.registry.get("one", "10")
    shop.shelf.default["one"] = "1"
    await shop.manager.load_model("one")
    assert await shop.states() == {"one/1": "READY", "one/2": "READY"}
    assert await shop.ask("one") == await gone.infer(0) == "a2"
    await shop.manager.unload_model("one", version="1")
    with pytest.raises(weir.ModelNotFound, match="unknown model 'one/2'"):
        await shop.manager.unload_model("one/2")
    assert (await shop.ask("one"), await shop.states()) == ("b2", {"one/2": "READY"})
    assert sum(not executor.stopped for executor in shop.executors) == 1


async def test_while_the_default_version_is_unloaded_another_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Workshop(one={"1": "a", "2": "b"})
    await shop.manager.load_model("one")
    last = shop.registry.get("one")
    held = shop.executors[shop.made.index(last)]
    monkeypatch.setattr(held, "_predict", None)
    accepted = last.infer(0)
    unloading = asyncio.ensure_future(shop.manager.unload_model("one", version="2"))
    await turns(20)
    assert await shop.ask("one") == "a"
    with pytest.raises(weir.Draining):
        await shop.ask("one", "2")
    assert await shop.states() == {"one/1": "READY", "one/2": "UNLOADING"}
    held.respond_next(lambda batch: ["b" for _ in batch])
    assert await accepted == "b"
    await unloading
    assert (await shop.ask("one"), await shop.states()) == ("a", {"one/1": "READY"})


async def test_while_a_model_loads_its_requests_are_refused_with_the_reason() -> None:
    shop = Workshop(one={"": "a"})
    shop.gate = asyncio.Event()
    loading = asyncio.ensure_future(shop.manager.load_model("one"))
    await shop.starting.wait()
    with pytest.raises(weir.ModelNotReady, match="'one' is not ready: loading"):
        await shop.ask("one")
    assert await shop.states() == {"one": "LOADING"}
    assert shop.registry.ready
    shop.gate.set()
    await loading
    assert await shop.ask("one") == "a"


async def test_contradictory_changes_of_twenty_clients_end_in_one_state() -> None:
    shop, random, told = Workshop(one={"": "a"}, two={"": "b"}), Random(7), list[str]()

    async def client() -> None:
        for _ in range(15):
            name = random.choice(("one", "two"))
            change = random.choice(("load", "unload", "worker", "add", "remove"))
            await asyncio.sleep(0)
            try:
                if change == "load":
                    await shop.manager.load_model(name)
                elif change == "unload":
                    await shop.manager.unload_model(name)
                elif change == "remove":
                    await shop.manager.unload_worker(random.choice((name, f"{name}-1")))
                else:
                    said: dict[str, Any] = {"tag": random.choice(("x", "y")), "share": change == "worker"}
                    assert (await shop.manager.load_worker(name, said)).startswith(name)
                told.append(change)
            except weir.WeirError as error:
                told.append(type(error).__name__)

    await asyncio.gather(*[client() for _ in range(20)])
    assert len(told) == 20 * 15
    assert set(told) == {"load", "unload", "worker", "add", "remove", "ModelNotFound"}
    running = shop.registry.all
    for service, executor in zip(shop.made, shop.executors, strict=True):
        assert executor.stopped != (service in running)
        if service in running:
            assert len(executor.states()) == service.workers.workers
    for name in list(shop.registry.services):
        assert await shop.ask(name)
    ready = {each.name for each in await shop.manager.index(ready_only=True)}
    assert ready == set(shop.registry.services)
    await shop.manager.stop(0.0)
    assert all(executor.stopped for executor in shop.executors)


async def test_a_caller_who_leaves_does_not_undo_the_change_he_requested() -> None:
    shop = Workshop(one={"": "a"})
    shop.gate = asyncio.Event()
    loading = asyncio.ensure_future(shop.manager.load_model("one"))
    await shop.starting.wait()
    loading.cancel()
    shop.gate.set()
    await shop.manager.load_model("one", version="")
    assert len(shop.made) == 2
    assert shop.executors[0].stopped and await shop.ask("one") == "a"


async def test_the_end_of_the_server_ends_a_load_and_those_that_wait() -> None:
    shop = Workshop(one={"": "a"}, two={"": "b"})
    await shop.manager.load_model("two")
    shop.gate = asyncio.Event()
    changes = [asyncio.ensure_future(shop.manager.load_model(name)) for name in ("one", "two")]
    await shop.starting.wait()
    await shop.manager.drain(0.0)
    await shop.manager.stop(0.0)
    for change in changes:
        with pytest.raises(weir.Draining, match="shutting down"):
            await change
    with pytest.raises(weir.Draining):
        await shop.manager.unload_model("two")
    assert all(executor.stopped for executor in shop.executors)


async def test_a_start_that_fails_stops_the_others() -> None:
    shop = Workshop(one={"": "a"}, two={"": "b"})
    good = shop.make(shop.shelf.read("one").versions[0])
    shop.fails = weir.ModelError("no weights")
    bad = shop.make(shop.shelf.read("two").versions[0])
    registry = Registry([good, bad])
    manager = Manager(registry, shop.shelf, shop.make)
    with pytest.raises(weir.ModelError, match="no weights"):
        await manager.start()
    assert not good.ready and shop.executors[0].stopped


async def test_files_and_code_need_to_be_allowed() -> None:
    shop = Workshop(one={"": "a"})
    manager = Manager(shop.registry, shop.shelf, shop.make)
    for change in (
        manager.load_model("one", files={"1/model.py": b""}),
        manager.load_model("one", config={"env": "A=1"}),
        manager.load_worker("one", {"policy": "mine:Policy"}),
    ):
        with pytest.raises(weir.Forbidden, match="allow"):
            await change
    await shop.manager.load_model("one", config={"a": 1}, files={"1/model.py": b""})
    assert shop.shelf.asked == [({"a": 1}, {"1/model.py": b""})]


async def test_a_drain_during_a_reload_finishes_what_was_accepted() -> None:
    """Also what a model had accepted that is being unloaded."""
    for change in ("load_model", "unload_model"):
        shop = Workshop(a={"": "one"})
        await shop.manager.load_model("a")
        former, service = shop.executors[0], shop.registry.get("a")
        former._predict = None
        call = service.infer(0)
        await turns()
        changed = asyncio.ensure_future(getattr(shop.manager, change)("a"))
        while not former.pending or not (service._former or service.draining):
            await turns()
        drained = asyncio.ensure_future(shop.manager.drain())
        await turns()
        assert not call.done()
        assert not drained.done()
        former.respond_next(lambda batch: ["one" for _ in batch])
        await drained
        assert await call == "one"
        with pytest.raises(weir.Draining):
            await changed
        await shop.manager.stop(0.0)
        assert former.stopped


async def test_changes_are_made_in_the_order_in_which_they_were_requested() -> None:
    changes, made = ChangeQueue(), list[int]()

    async def change(number: int) -> int:
        await turns(10 - number)
        made.append(number)
        return number

    asked = [changes.make(partial(change, number)) for number in range(10)]
    assert await asyncio.gather(*asked) == made == list(range(10))


async def test_the_line_is_bounded_and_ends_with_the_server() -> None:
    changes = ChangeQueue()

    async def for_ever() -> None:
        await asyncio.Event().wait()

    asked = [asyncio.ensure_future(changes.make(for_ever)) for _ in range(MAX_CHANGES)]
    await asyncio.sleep(0)
    with pytest.raises(weir.Overloaded, match="pending, which is the maximum"):
        await changes.make(for_ever)
    left = asked.pop()
    left.cancel()
    await asyncio.sleep(0)
    await changes.close()
    for each in asked:
        with pytest.raises(weir.Draining):
            await each
    with pytest.raises(asyncio.CancelledError):
        await left
    with pytest.raises(weir.Draining):
        await changes.make(for_ever)


async def test_work_is_done_in_a_thread_that_lets_the_loop_go_on() -> None:
    def work() -> tuple[bool, float, bool]:
        return threading.current_thread() is threading.main_thread(), sys.getswitchinterval(), gc.isenabled()

    before = sys.getswitchinterval(), gc.isenabled()
    main, interval, collects = await import_in_thread(work)
    assert not main and interval == pytest.approx(IMPORT_SWITCH_INTERVAL) and not collects
    assert (sys.getswitchinterval(), gc.isenabled()) == before
    with pytest.raises(ZeroDivisionError):
        await import_in_thread(lambda: 1 // 0)
    assert (sys.getswitchinterval(), gc.isenabled()) == before


# Loads as the AMD Inference Server has them: endpoints, shared by those who say the same parameters.


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
    with pytest.raises(weir.ModelNotFound, match="'one-1'"):
        await shop.manager.unload_worker("one-1")
    await shop.manager.unload_worker("one")
    assert await shop.manager.load_worker("one", {"tag": "y"}) == "one"
    assert await shop.ask("one") == "y"


async def test_resizing_neither_loads_a_model_nor_unloads_it() -> None:
    shop = Workshop(one={"": "a"})
    await shop.manager.load_model("one")
    await shop.manager.resize("one", 1)
    await shop.manager.resize("one", -1)
    with pytest.raises(weir.Conflict):
        await shop.manager.resize("one", -1)
    assert [service.workers.workers for service in shop.registry.all] == [1]
    await shop.manager.unload_model("one")
    with pytest.raises(weir.ModelNotFound):
        await shop.manager.resize("one", 1)
    assert not shop.registry.all


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
    with pytest.raises(weir.Conflict, match="failed to load 'one': no room"):
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
    with pytest.raises(weir.InvalidRequest) as refused:
        apply(said, MODEL, Scaled)
    assert refused.value.message == message or (message.endswith(": ") and message in refused.value.message)


async def test_a_wrong_value_is_an_invalid_request() -> None:
    shop = Workshop(one={"": "a"})
    with pytest.raises(weir.InvalidRequest, match=r"failed to load 'one': .*max_batch_size=0: must be 1 or more"):
        await shop.manager.load_worker("one", {"batch_size": 0})
    with pytest.raises(weir.InvalidRequest, match="share='no': must be true or false"):
        await shop.manager.load_worker("one", {"share": "no"})
    assert await shop.states() == {"one": "UNAVAILABLE"}
    await shop.manager.load_worker("one", {})
    with pytest.raises(weir.InvalidRequest, match=r"failed to load 'one-1': .*max_batch_size=0: must be 1 or more"):
        await shop.manager.load_worker("one", {"batch_size": 0})
    assert [state.name for state in await shop.manager.index()] == ["one"]  # nobody could load a one-1 again


def test_what_may_bring_code_or_files_needs_a_flag() -> None:
    for said in ({"env": "A=1"}, {"executor": "inline"}, {"policy": "mine:Policy"}, {"policy": "bank.npz"}):
        with pytest.raises(weir.Forbidden, match="--allow-model-files"):
            check_allowed(said, allow_files=False)
        check_allowed(said, allow_files=True)
    with pytest.raises(weir.Forbidden):
        check_allowed({"policy": "auto:profile=model.toml"}, allow_files=False)
    for harmless in ("greedy", "control-limit:4", "auto", "auto:seconds=2"):
        check_allowed({"policy": harmless, "workers": 2}, allow_files=False)


# What callers of the control endpoints may say that cannot be: each is refused by name, and what runs goes on.


def manager_of(root: Path, files: dict[str, str | bytes]) -> Manager:
    """Return a manager of these models under `root`."""
    registry = Registry([])
    registry.reserve(["v2", "metrics"])
    return Manager(registry, write(root, files), ServiceMaker(()), allow_files=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"route": "/v2/mine"}, "route='/v2/mine': /v2 is reserved"),
        ({"route": "/metrics"}, "route='/metrics'"),
        ({"route": ["/a", "/a/batch"]}, "route='/a/batch': is where the route '/a' takes lists"),
        ({"max_batch_size": 10**30}, "max_batch_size=1000000000"),
        ({"max_batch_size": 1 << 31}, "max_batch_size=2147483648: must be 1 or more, and at most 2147483647"),
        ({"max_queue_size": 10**30}, "max_queue_size=1000000000"),
        ({"workers": 10**30}, "workers=1000000000"),
        ({"arena_bytes": 1 << 63}, "arena_bytes=9223372036854775808: must be a number of at most 64 bits"),
    ],
)
async def test_a_load_that_cannot_be_is_refused_and_the_old_one_goes_on(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    manager = manager_of(tmp_path, {"one/1/model.py": plain("a"), "one/config.toml": 'executor = "inline"'})
    await manager.load_model("one")
    with pytest.raises(weir.InvalidRequest) as refused:
        await manager.load_model("one", config=json.loads(json.dumps(config)))
    assert message in refused.value.message
    assert await manager.registry.get("one").infer(0) == "a"
    assert len(manager.registry.all) == 1
    await manager.stop(0.0)


async def test_uploaded_files_lie_as_long_as_a_model_runs_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (there := tmp_path / "there").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(there))
    manager = manager_of(tmp_path / "models", {"one/1/model.py": plain("a"), "one/config.toml": 'executor = "inline"'})

    async def lying(*texts: str, **config: Any) -> int:
        files = {f"{version}/model.py": text.encode() for version, text in enumerate(texts, 1)}
        await manager.load_model("one", config={"executor": "inline", **config}, files=files)
        return len(list(there.iterdir()))

    for answer in ("b", "c"):
        assert await lying(plain(answer), plain(answer)) == 1
        assert await manager.registry.get("one").infer(0) == answer
    for texts, config in (
        ([plain(), "broken"], {}),
        (["broken"], {}),
        ([plain()], {"nothing": 1}),
        ([plain()], {"params": {"x": 1}}),
    ):
        with pytest.raises(weir.WeirError):
            await lying(*texts, **config)
        assert len(list(there.iterdir())) == 1
    assert await manager.registry.get("one").infer(0) == "c"
    await manager.unload_model("one")
    assert not list(there.iterdir())
    await manager.stop(0.0)


def test_a_name_is_no_longer_than_a_files_may_be(tmp_path: Path) -> None:
    folder = write(tmp_path, {"one/1/model.py": plain()})
    for name in ("x" * 256, "x" * 100_000):
        with pytest.raises(weir.ModelNotFound):
            folder.read(name)
        with pytest.raises(
            weir.InvalidRequest, match=r"must be VERSION/NAME.*up to 255 for each part and 1024 for all"
        ):
            folder.read("one", {}, {f"1/{name}": b""})
        with pytest.raises(weir.InvalidRequest):
            upload_path("/".join(["1", *["x" * 200] * 6]))
    for file in ("y" * 300, "z" * 5000):
        with pytest.raises(Exception, match=r"one: file='[yz]+.*must be a file in|there is no such file"):
            file_within(tmp_path / "one" / "1", file, "one")
    assert NAME.fullmatch("x" * 255) and not NAME.fullmatch("x" * 256)


def test_versions_are_numbers_from_one_on(tmp_path: Path) -> None:
    for name in ("1", "2", "10", "01", "0", "00", "007", "a1", "1.5", "9" * 19):
        (tmp_path / name).mkdir()
    assert versions_in(tmp_path) == ["1", "2", "10"]


async def test_the_index_shows_no_absolute_paths(tmp_path: Path) -> None:
    broken = "raise ValueError('cannot open ' + __file__)"
    manager = manager_of(tmp_path, {"one/1/model.py": broken, "two/1/model.onnx": b"no graph"})
    for name in ("one", "two"):
        with pytest.raises(weir.InvalidRequest):
            await manager.load_model(name)
    reasons = [state.reason for state in await manager.index()]
    assert "cannot open model.py" in reasons[0] and "cannot be read" in reasons[1]
    assert not any(str(tmp_path) in reason for reason in reasons)
