"""Models are loaded when their files have changed, and not before they are whole."""

import asyncio
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from tests.catalog.repository.shelf import plain, write

from weir import Service
from weir.catalog.loading import make_service
from weir.catalog.manager import Manager
from weir.catalog.registry import Registry
from weir.catalog.repository.watching import Settling, Signature, Watcher, watching
from weir.catalog.sources import ModelToServe, Parameters
from weir.testing import FakeExecutor


def test_a_model_settles_when_nothing_happens_to_it_and_it_looks_the_same_twice() -> None:
    files: dict[str, Signature] = {"one": (("a", 1, 1),), "two": ()}
    settling = Settling(0.5)
    settling.note("one", 10.0, files["one"])
    settling.note("two", 10.2, files["two"])
    assert settling.settled(10.4, files.__getitem__) == []
    files["one"] = (("a", 2, 2),)  # it grows without anybody being told
    assert settling.settled(10.6, files.__getitem__) == []
    assert settling.settled(10.8, files.__getitem__) == ["two"]
    assert settling.settled(11.1, files.__getitem__) == ["one"]
    assert settling.settled(99.0, files.__getitem__) == []


class Told:
    """A Manager whose services need no workers, and that tells of every model that was made."""

    def __init__(self, root: Path) -> None:
        self.folder = write(root, {"one/1/model.py": plain("a")})
        self.registry = Registry([])
        self.manager = Manager(self.registry, self.folder, self.make)
        self.made = asyncio.Queue[str]()

    def make(self, model: ModelToServe, parameters: Parameters | None = None, *, fresh: bool = False) -> Service:
        kind = make_service(model, ()).model
        service = Service(kind, name=model.name, version=model.version, executor=FakeExecutor())
        asyncio.run_coroutine_threadsafe(self.made.put(service.label), self.loop).result(10)
        return service

    async def __aenter__(self) -> "Told":
        self.loop = asyncio.get_running_loop()
        await self.manager.load_model("one")
        assert await self.made.get() == "one/1"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.manager.stop(0.0)


def test_what_has_settled_is_loaded_and_what_has_gone_is_unloaded(tmp_path: Path) -> None:
    async def main() -> None:
        async with Told(tmp_path) as told:
            watcher = Watcher(told.folder, told.manager, quiet=0.0)
            write(tmp_path, {"one/2/model.py": plain("b"), "two/1/model.py": plain("c")})
            await watcher.step([tmp_path / "one" / "2" / "model.py", tmp_path / "two", Path("/elsewhere")])
            assert sorted([service.label for service in told.registry.all]) == ["one/1", "one/2", "two/1"]
            shutil.rmtree(tmp_path / "two")
            await watcher.step([tmp_path / "two"])
            assert list(told.registry.services) == ["one"]
            await told.manager.unload_model("one")
            await watcher.step([tmp_path / "one"])  # it is not running, and was known before: nobody asked for it
            assert list(told.registry.services) == []

    asyncio.run(main())


def test_a_model_that_breaks_is_said_and_the_old_one_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Told(tmp_path) as told:
            before = told.registry.get("one")
            write(tmp_path, {"one/1/model.py": plain("b")[:-9]})
            await Watcher(told.folder, told.manager, quiet=0.0).step([tmp_path / "one"])
            assert told.registry.get("one") is before
            assert "model 'one' has changed, but failed to load" in caplog.text

    asyncio.run(main())


def test_a_new_model_that_does_not_load_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Told(tmp_path) as told:
            watcher = Watcher(told.folder, told.manager, quiet=0.0)
            for part in ({"two/config.toml": ""}, {"two/1/model.py": plain("c")[:-9]}):  # a slow copy
                write(tmp_path, part)
                await watcher.step([tmp_path / "two"])
                assert list(told.registry.services) == ["one"]
            write(tmp_path, {"two/1/model.py": plain("c")})
            await watcher.step([tmp_path / "two"])
            assert list(told.registry.services) == ["one", "two"]
            assert caplog.text.count("model 'two' has changed, but failed to load") == 2

    asyncio.run(main())


def test_what_nobody_has_thought_of_ends_no_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with Told(tmp_path) as told:
            watcher = Watcher(told.folder, told.manager, quiet=0.0)
            write(tmp_path, {"two/1/model.py": plain("c")})
            with mock.patch.object(told.manager, "_make", side_effect=ZeroDivisionError):
                await watcher.step([tmp_path / "two"])
            assert "model 'two' has changed, but cannot be loaded" in caplog.text
            await watcher.step([tmp_path / "two"])
            assert list(told.registry.services) == ["one", "two"]

    asyncio.run(main())


def test_unfinished_files_are_nobodys_change(tmp_path: Path) -> None:
    async def main() -> None:
        async with Told(tmp_path) as told:
            before = told.registry.get("one")
            names = ("1/model.py.tmp", "1/.model.py.swp", "1/__pycache__/model.pyc", "1/model.py~", ".git/x")
            write(tmp_path / "one", dict.fromkeys(names, "x"))
            changed = [tmp_path / "one" / name for name in names]
            await Watcher(told.folder, told.manager, quiet=0.0).step([*changed, tmp_path, tmp_path / ".hidden" / "x"])
            assert told.registry.get("one") is before

    asyncio.run(main())


def test_a_real_folder_is_watched(tmp_path: Path) -> None:
    async def main() -> None:
        async with Told(tmp_path) as told, watching(told.folder, told.manager), asyncio.timeout(30):
            (tmp_path / "new.tmp" / "1").mkdir(parents=True)
            await asyncio.sleep(0)
            (tmp_path / "new.tmp" / "1" / "model.py").write_text(plain("n"))
            os.rename(tmp_path / "new.tmp", tmp_path / "new")
            made = asyncio.ensure_future(told.made.get())
            while not made.done():  # watching begins when the thread of the library does
                (tmp_path / "new" / "1" / "model.py").write_text(plain("n"))
                await asyncio.wait([made], timeout=2.0)
            assert made.result() == "new/1"

    asyncio.run(main())


def test_nothing_is_watched_without_a_folder(tmp_path: Path) -> None:
    async def main() -> None:
        async with Told(tmp_path) as told, watching(None, told.manager):
            assert told.registry.services

    asyncio.run(main())
