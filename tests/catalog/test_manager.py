"""Models are loaded, replaced and unloaded: one change at a time, each caller with what is true."""

import asyncio
import gc
import sys
import threading
from functools import partial
from random import Random
from typing import Any

import pytest
from tests.catalog.workshop import Workshop
from tests.serving.kit import turns

from weir import Draining, Forbidden, InvalidRequest, ModelError, ModelNotFound, ModelNotReady, Overloaded, WeirError
from weir.catalog.manager import IMPORT_SWITCH_INTERVAL, MAX_CHANGES, ChangeQueue, Manager, ModelState, import_in_thread
from weir.catalog.registry import Registry


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
    with pytest.raises(ModelNotFound):
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
        with pytest.raises(ModelNotFound, match=unknown):
            await change
    assert await shop.ask("one") == "a"


@pytest.mark.parametrize("where", ["read", "start"])
async def test_a_load_that_fails_leaves_the_old_one_serving(where: str) -> None:
    shop = Workshop(one={"": "old"}, two={"": "b"})
    await shop.manager.load_model("one")
    if where == "read":
        shop.shelf.models = {"one": {"": "broken"}, "two": {"": "broken"}}
    else:
        shop.fails = ModelError("no weights", original_type="OSError")
    expected, why = (InvalidRequest, "cannot be read") if where == "read" else (ModelError, "no weights")
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
    assert (await shop.ask("one"), await shop.states()) == ("b2", {"one/2": "READY"})
    assert sum(not executor.stopped for executor in shop.executors) == 1


async def test_while_the_default_version_is_unloaded_another_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Workshop(one={"1": "a", "2": "b"})
    await shop.manager.load_model("one")
    last = shop.registry.get("one")
    held = shop.executors[shop.made.index(last)]
    monkeypatch.setattr(held, "_answer", None)
    accepted = last.infer(0)
    unloading = asyncio.ensure_future(shop.manager.unload_model("one", version="2"))
    await turns(20)
    assert await shop.ask("one") == "a"
    with pytest.raises(Draining):
        await shop.ask("one", "2")
    assert await shop.states() == {"one/1": "READY", "one/2": "UNLOADING"}
    held.answer_next(lambda batch: ["b" for _ in batch])
    assert await accepted == "b"
    await unloading
    assert (await shop.ask("one"), await shop.states()) == ("a", {"one/1": "READY"})


async def test_while_a_model_loads_its_requests_are_refused_with_the_reason() -> None:
    shop = Workshop(one={"": "a"})
    shop.gate = asyncio.Event()
    loading = asyncio.ensure_future(shop.manager.load_model("one"))
    await shop.starting.wait()
    with pytest.raises(ModelNotReady, match="'one' is not ready: loading"):
        await shop.ask("one")
    assert await shop.states() == {"one": "LOADING"}
    assert shop.registry.ready
    shop.gate.set()
    await loading
    assert await shop.ask("one") == "a"


async def test_while_a_model_is_unloaded_what_was_accepted_is_finished() -> None:
    shop = Workshop(one={"": "a"})
    await shop.manager.load_model("one")
    shop.executors[0]._answer = None
    call = shop.registry.get("one").infer(0)
    await turns()
    unloading = asyncio.ensure_future(shop.manager.unload_model("one"))
    await turns(10)
    with pytest.raises(Draining):
        await shop.ask("one")
    assert await shop.states() == {"one": "UNLOADING"}
    shop.executors[0].answer_next(lambda batch: ["late"])
    await unloading
    assert await call == "late"


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
            except WeirError as error:
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
        with pytest.raises(Draining, match="shutting down"):
            await change
    with pytest.raises(Draining):
        await shop.manager.unload_model("two")
    assert all(executor.stopped for executor in shop.executors)


async def test_a_start_that_fails_stops_the_others() -> None:
    shop = Workshop(one={"": "a"}, two={"": "b"})
    good = shop.make(shop.shelf.read("one").versions[0])
    shop.fails = ModelError("no weights")
    bad = shop.make(shop.shelf.read("two").versions[0])
    registry = Registry([good, bad])
    manager = Manager(registry, shop.shelf, shop.make)
    with pytest.raises(ModelError, match="no weights"):
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
        with pytest.raises(Forbidden, match="allow"):
            await change
    await shop.manager.load_model("one", config={"a": 1}, files={"1/model.py": b""})
    assert shop.shelf.asked == [({"a": 1}, {"1/model.py": b""})]


async def test_a_drain_during_a_reload_finishes_what_was_accepted() -> None:
    """Also what a model had accepted that is being unloaded."""
    for change in ("load_model", "unload_model"):
        shop = Workshop(a={"": "one"})
        await shop.manager.load_model("a")
        former, service = shop.executors[0], shop.registry.get("a")
        former._answer = None
        call = service.infer(0)
        await turns()
        changed = asyncio.ensure_future(getattr(shop.manager, change)("a"))
        async with asyncio.timeout(20):
            while not former.pending or not (service._former or service.draining):  # noqa: ASYNC110  (there is no event to wait for)
                await asyncio.sleep(0.001)
        drained = asyncio.ensure_future(shop.manager.drain())
        await turns()
        assert not call.done()
        assert not drained.done()
        former.answer_next(lambda batch: ["one" for _ in batch])
        await drained
        assert await call == "one"
        with pytest.raises(Draining):
            await changed
        await shop.manager.stop(0.0)
        assert former.stopped


async def test_changes_are_made_in_the_order_in_which_they_were_requested() -> None:
    changes, made = ChangeQueue(), list[int]()

    async def change(number: int) -> int:
        for _ in range(10 - number):
            await asyncio.sleep(0)
        made.append(number)
        return number

    asked = [changes.make(partial(change, number)) for number in range(10)]
    assert await asyncio.gather(*asked) == made == list(range(10))


async def test_a_change_that_fails_stops_nobody() -> None:
    async def divide(by: int) -> int:
        return 3 // by

    changes = ChangeQueue()
    made = [changes.make(partial(divide, by)) for by in (0, 1)]
    failed, succeeded = await asyncio.gather(*made, return_exceptions=True)
    assert isinstance(failed, ZeroDivisionError) and succeeded == 3


async def test_the_line_is_bounded_and_ends_with_the_server() -> None:
    changes = ChangeQueue()

    async def for_ever() -> None:
        await asyncio.Event().wait()

    asked = [asyncio.ensure_future(changes.make(for_ever)) for _ in range(MAX_CHANGES)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="pending, which is the maximum"):
        await changes.make(for_ever)
    left = asked.pop()
    left.cancel()
    await asyncio.sleep(0)
    await changes.close()
    for each in asked:
        with pytest.raises(Draining):
            await each
    with pytest.raises(asyncio.CancelledError):
        await left
    with pytest.raises(Draining):
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
