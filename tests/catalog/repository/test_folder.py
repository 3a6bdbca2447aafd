"""What is read of a folder of models."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.catalog.adapters.archives import archive
from tests.catalog.repository.shelf import plain, services, write
from tests.rings import subcases

from weir import Service
from weir.catalog.loading import make_service
from weir.catalog.manager import Manager
from weir.catalog.registry import Registry
from weir.catalog.repository import folder as inline_config
from weir.catalog.repository.folder import FolderRepository, InlineConfigs, Settling, Signature, Watcher, watching
from weir.catalog.sources import CombinedRepository, ModelToServe, Parameters, TargetRepository
from weir.errors import InvalidRequest, ModelNotFound, SettingsError
from weir.settings import read_model_table
from weir.testing import FakeExecutor

FILES = {"one/1/model.py": plain("a"), "one/2/model.py": plain("b"), "one/10/model.py": plain("c")}


def refused(folder: FolderRepository, name: str = "one") -> str:
    with pytest.raises(SettingsError) as error:
        services(folder, name)
    return error.value.message


def test_a_model_is_a_folder_with_versions(tmp_path: Path) -> None:
    folder = write(tmp_path, {**FILES, "two/1/model.py": plain(), ".hidden/1/model.py": plain(), "notes.txt": "x"})
    assert folder.names() == ["one", "two"]
    reading = folder.read("one")
    assert [(model.name, model.version, model.platform) for model in reading.versions] == [
        ("one", "1", "python"), ("one", "2", "python"), ("one", "10", "python"),
    ]  # fmt: skip
    assert reading.default is None
    assert [service.label for service in services(folder, "one")] == ["one/1", "one/2", "one/10"]


@pytest.mark.parametrize(
    ("said", "served"),
    [
        ('versions = "all"', ["1", "2", "10"]), ("versions = 2", ["2", "10"]), ('versions = ["10", "1"]', ["1", "10"]),
        ("versions = [2]", ["2"]), ("version_policy = {latest = {num_versions = 1}}", ["10"]),
        ("version_policy = {specific = {versions = [1, 2]}}", ["1", "2"]), ("version_policy = {all = {}}", ["1", "2", "10"]),
    ],
)  # fmt: skip
def test_the_file_says_which_versions_are_served(tmp_path: Path, said: str, served: list[str]) -> None:
    folder = write(tmp_path, {**FILES, "one/config.toml": said})
    assert [model.version for model in folder.read("one").versions] == served


def test_the_file_configures_a_model(tmp_path: Path) -> None:
    text = """
        default = "2"\ntarget = "model.py:Plain"\nroute = "/first"\nmax_batch_size = 4\nworkers = 2
        policy = "control-limit:2"\nexamples = [3, 4]\nwarmup_sizes = [1, 4]\n[params]
    """
    folder = write(tmp_path, {**FILES, "one/config.toml": text})
    reading = folder.read("one")
    assert (reading.default, reading.versions[0].routes) == ("2", ["/first"])
    service = services(folder, "one")[0]
    batching = service.facts.batching
    assert (batching.max_batch_size, service.workers.workers, batching.policy) == (4, 2, "control-limit:2")
    assert (service.facts.model.examples, service.facts.model.warmup_sizes) == ((3, 4), (1, 4))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"one/config.toml": "workers = 0"}, "one/config.toml: workers=0: must be 1 or more"),
        ({"one/config.toml": "worker = 1"}, "one/config.toml: worker: unknown setting; did you mean workers?"),
        ({"one/config.toml": "port = 1"}, "is a setting of the whole server"),
        ({"one/config.toml": "workers ="}, "one/config.toml: must be TOML"),
        ({"one/config.toml": 'name = "two"'}, "name='two': must be the name of the folder, 'one'"),
        ({"one/config.toml": 'platform = "vitis_xmodel"'}, "platform='vitis_xmodel': unknown platform"),
        ({"one/config.toml": 'platform = "jax"'}, "unknown platform 'jax'; available: python, onnx"),
        ({"one/config.toml": "[[models]]"}, "one/config.toml: models: ensembles in the AMD server's form are not read"),
        ({"one/config.toml": "versions = 0"}, "versions=0: must be"),
        ({"one/config.toml": 'versions = ["7"]'}, "versions: unknown version '7'; available: 1, 2, 10"),
        ({"one/config.toml": 'default = "7"'}, "default='7': must be one of 1, 2, 10"),
        ({"one/config.toml": "target = 3"}, "target=3: must be text"),
        ({"one/config.toml": "params = 3"}, "params=3: must be a table"),
        ({"one/config.toml": "examples = 3"}, "examples=3: must be a list"),
        ({"one/config.toml": "route = 3"}, "route=3: must be a path"),
        ({"one/config.toml": "inputs = 3"}, "inputs: must be tables"),
        ({"one/config.toml": '[[inputs]]\nname = "a"\nshape = ["x"]'}, "inputs['a'].shape='x': must be a whole number"),
        ({"one/config.toml": "[[inputs]]\nshape = [1]"}, "inputs: name='': must be text"),
        ({"one/config.toml": "dynamic_batching = {levels = 2}"}, "dynamic_batching.levels: unknown field"),
        ({"one/config.toml": "version_policy = {oldest = {}}"}, "must be latest, all or specific, not 'oldest'"),
        ({"one/config.pbtxt": "name: one {"}, "one/config.pbtxt: line 1"),
        ({"one/config.toml": b"\xff"}, "one/config.toml: cannot be read"),
        ({"one/config.toml": 'file = "../../two/1/model.py"'}, "must be a file in the version's folder"),
        ({"one/config.toml": 'file = "/etc/passwd"'}, "must be a file in the version's folder"),
        ({"one/config.toml": 'target = "..\\\\x.py:A"'}, "must be a file in the version's folder"),
        ({"one/config.toml": 'file = "other.py"'}, "file='other.py': there is no such file in 1/"),
        ({"one/config.toml": 'target = "model.py:None_"'}, "has no 'None_'; its models: Plain"),
        ({"one/1/model.py": plain() + "class More(Plain):\n    pass\n"}, "defines the models Plain, More: name one"),
        ({"one/1/model.py": "x = 1"}, "defines the models none"),
        ({"one/1/model.py": "raise ValueError('half')"}, "one/1/model.py"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    assert message in refused(write(tmp_path, {**FILES, **files}))


def test_a_model_without_versions_or_known_files_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, {"one/config.toml": "", "two/1/weights.bin": "x"})
    assert "there is no version" in refused(folder)
    assert "1/ has neither model.py nor an .onnx file" in refused(folder, "two")


@subcases("name", ["..", ".", "", "one/1", "../one", "/etc", "none", "one\0"])
def test_names_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    write(tmp_path / "inner", FILES)
    write(tmp_path, {"one/1/model.py": plain()})
    with pytest.raises(ModelNotFound):
        FolderRepository(tmp_path / "inner", read_model_table).read(name)


ODD = {
    "one/1/model.py": plain(),
    "owner/two/1/model.py": plain(),
    "owner/three/config.toml": "",
    "owner/notes/readme.txt": "",
    "four/model-settings.json": '{"name": "five", "implementation": "a.B"}',
    "five/config.pbtxt": "",
    "six/model-settings.json": '{"name": "seven", "implementation": "a.B"}',
    "owner/eight/model-settings.json": '{"name": "nine", "implementation": "a.B"}',
    "ten/1/1/model.py": plain(),
    "empty/notes.txt": "",
}


def test_a_model_is_found_by_its_path_where_it_is_found_among_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, every = write(tmp_path, ODD), inline_config.models_in(tmp_path)
    further = ["owner", "owner/notes", "six", "owner/eight", "ten", "one/1", "a/b/c", "no"]
    for name in (*every, *further):
        assert folder.folder_of(name) == every.get(name), name
    assert sorted(every) == ["empty", "five", "four", "nine", "one", "owner/three", "owner/two", "seven", "ten/1"]
    monkeypatch.setattr(inline_config, "models_in", lambda root: pytest.fail("it looked at all folders"))
    for name in ("one", "owner/two", "owner/three", "ten/1", "empty"):
        assert folder.folder_of(name) == tmp_path / name and folder.has(name)


def test_a_folder_of_one_model_is_a_repository_of_it(tmp_path: Path) -> None:
    write(tmp_path / "one", {"1/model.py": plain()})
    write(tmp_path / "two", {"1/model.py": plain(), "config.pbtxt": "max_batch_size: 4"})
    write(tmp_path / "three", {"model-settings.json": '{"name": "other-name", "implementation": "a.B"}'})
    write(tmp_path / "four", {"model-settings.json": '{"name": "one", "implementation": "a.B"}'})
    for folder, name in (("one", "one"), ("two", "two"), ("three", "other-name")):
        repository = FolderRepository(tmp_path / folder, read_model_table)
        assert repository.names() == [name] and len(repository.read(name).versions) == 1
        assert repository.models_of(tmp_path / folder / "1" / "model.py") == [name]
        assert repository.models_of(tmp_path / folder / ".hidden") == []
    several = FolderRepository(tmp_path, read_model_table)
    assert sorted(several.names()) == ["four", "one", "other-name", "two"]  # four's settings have a name that is taken
    assert several.folder_of("other-name") == tmp_path / "three"
    assert "other-name" in several.models_of(tmp_path / "three" / "model-settings.json")
    write(tmp_path, {"flat/model.py": plain(), "flat/config.pbtxt": ""})
    said = refused(several, "flat")
    assert "flat/config.pbtxt: model.py: must be in the folder of a version: mkdir 1 && mv model.py 1/" in said


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such directory"):
        FolderRepository(tmp_path / "none", read_model_table)
    (tmp_path / "gone").mkdir()
    folder = FolderRepository(tmp_path / "gone", read_model_table)
    (tmp_path / "gone").rmdir()
    assert folder.names() == []


def test_a_load_call_may_say_more_than_the_file(tmp_path: Path) -> None:
    folder = write(tmp_path, {**FILES, "one/config.toml": "max_batch_size = 4\nworkers = 2"})
    (model, *_) = folder.read("one", {"max_batch_size": 8, "version_policy": {"latest": {"num_versions": 1}}}).versions
    assert (model.version, model.settings) == ("10", {"max_batch_size": 8, "workers": 2})


def test_files_of_a_load_call_take_the_place_of_those_that_lie_there(tmp_path: Path) -> None:
    folder = write(tmp_path, {**FILES, "one/config.toml": "workers = 2"})
    for text in ("x", "y", "z"):
        (model,) = folder.read("one", {"max_batch_size": 3}, {"7/model.py": plain(text).encode()}).versions
        assert (model.version, model.settings) == ("7", {"max_batch_size": 3})
        assert model.folder is not None and text in (model.folder / "model.py").read_text()
    for name in ("model.py", "../1/model.py", "/1/model.py", "1/../../x", "1//x", "1/./x", "1/.x", "1/a\\b"):
        with pytest.raises(InvalidRequest, match="must be VERSION/NAME"):
            folder.read("one", {}, {name: b""})
    with pytest.raises(ModelNotFound):
        folder.read("../one", {}, {"1/model.py": b""})


def test_several_sources_are_one(tmp_path: Path) -> None:
    target = ModelToServe("m:Square", "square", {"a": 1}, [], {"workers": 2})
    sources = CombinedRepository([TargetRepository([target]), write(tmp_path, FILES)])
    assert sources.names() == ["square", "one"]
    assert len(sources.read("one").versions) == 3
    assert sources.read("square").versions == [target]
    (said,) = sources.read("square", {"workers": 3, "params": {"b": 2}}).versions
    assert (said.params, said.settings) == ({"a": 1, "b": 2}, {"workers": 3})
    for source, available in ((sources, "square, one"), (TargetRepository([target]), "square")):
        with pytest.raises(ModelNotFound, match=f"available: {available}$"):
            source.read("two")
    with pytest.raises(InvalidRequest, match="files can be sent for models of a repository only"):
        sources.read("square", {}, {"1/x": b""})
    with pytest.raises(SettingsError, match="params=3: must be a table"):
        sources.read("square", {"params": 3})


CHAIN = {"platform": "ensemble", "steps": ["one", "two"]}


def heard() -> InlineConfigs:
    return InlineConfigs(read_model_table, dict)


def test_a_chain_is_known_once_it_was_described() -> None:
    chains = heard()
    (model,) = chains.read("both", CHAIN).versions
    assert (model.name, model.platform, model.target, model.folder) == ("both", "ensemble", "", None)
    assert chains.names() == ["both"]
    (again,) = chains.read("both", {"max_queue_size": 7}).versions
    assert again.attributes == model.attributes and again.settings == {"max_queue_size": 7}
    with pytest.raises(InvalidRequest, match="a chain has no files"):
        chains.read("both", CHAIN, {"1/model.py": b""})
    with pytest.raises(SettingsError, match="steps"):
        chains.read("other", {"platform": "ensemble", "steps": [3]})
    assert chains.names() == ["both"]  # what cannot be read is not remembered
    for name in ("../x", "", "a b", "a/", "a//b", "a/infer"):
        with pytest.raises(ModelNotFound, match="must be of letters"):
            chains.read(name, CHAIN)


def test_only_a_chain_can_be_described() -> None:
    sources = CombinedRepository([TargetRepository([])], [heard()])
    assert sources.read("both", CHAIN).versions
    for config in ({"platform": "python", "target": "os:system"}, None):
        with pytest.raises(ModelNotFound, match="unknown model"):
            sources.read("other", config)


def test_not_more_than_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_config, "MAX_CHAINS", 1)
    chains = heard()
    chains.read("one", CHAIN)
    with pytest.raises(InvalidRequest, match="the most there may be"):
        chains.read("two", CHAIN)
    assert chains.read("one", CHAIN).versions


def test_a_model_settles_when_it_looks_the_same_twice() -> None:
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
        self.watcher = Watcher(self.folder, self.manager, quiet=0.0)
        self.made = asyncio.Queue[str]()

    def make(self, model: ModelToServe, parameters: Parameters | None = None, *, fresh: bool = False) -> Service:
        kind = make_service(model, ()).model
        service = Service(kind, name=model.name, version=model.version, executor=FakeExecutor())
        asyncio.run_coroutine_threadsafe(self.made.put(service.label), self.loop).result(60)
        return service

    async def __aenter__(self) -> "Told":
        self.loop = asyncio.get_running_loop()
        await self.manager.load_model("one")
        assert await self.made.get() == "one/1"
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.manager.stop(0.0)


async def test_what_has_settled_is_loaded_and_what_has_gone_is_unloaded(tmp_path: Path) -> None:
    async with Told(tmp_path) as told:
        write(tmp_path, {"one/2/model.py": plain("b"), "two/1/model.py": plain("c")})
        await told.watcher.step([tmp_path / "one" / "2" / "model.py", tmp_path / "two", Path("/elsewhere")])
        assert sorted([service.label for service in told.registry.all]) == ["one/1", "one/2", "two/1"]
        shutil.rmtree(tmp_path / "two")
        await told.watcher.step([tmp_path / "two"])
        assert list(told.registry.services) == ["one"]
        await told.manager.unload_model("one")
        await told.watcher.step([tmp_path / "one"])  # it is not running, and was known before: nobody asked for it
        assert list(told.registry.services) == []


async def test_a_new_model_that_does_not_load_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Told(tmp_path) as told:
        for part in ({"two/config.toml": ""}, {"two/1/model.py": plain("c")[:-9]}):  # a slow copy
            write(tmp_path, part)
            await told.watcher.step([tmp_path / "two"])
            assert list(told.registry.services) == ["one"]
        write(tmp_path, {"two/1/model.py": plain("c")})
        await told.watcher.step([tmp_path / "two"])
        assert list(told.registry.services) == ["one", "two"]
        assert caplog.text.count("model 'two' has changed, but failed to load") == 2


async def test_what_nobody_has_thought_of_ends_no_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Told(tmp_path) as told:
        write(tmp_path, {"two/1/model.py": plain("c")})
        with mock.patch.object(told.manager, "_make", side_effect=ZeroDivisionError):
            await told.watcher.step([tmp_path / "two"])
        assert "model 'two' has changed, but cannot be loaded" in caplog.text
        await told.watcher.step([tmp_path / "two"])
        assert list(told.registry.services) == ["one", "two"]


async def test_unfinished_files_are_nobodys_change(tmp_path: Path) -> None:
    async with Told(tmp_path) as told:
        before = told.registry.get("one")
        names = ("1/model.py.tmp", "1/.model.py.swp", "1/__pycache__/model.pyc", "1/model.py~", ".git/x")
        write(tmp_path / "one", dict.fromkeys(names, "x"))
        changed = [tmp_path / "one" / name for name in names]
        await told.watcher.step([*changed, tmp_path, tmp_path / ".hidden" / "x"])
        assert told.registry.get("one") is before


async def test_a_real_folder_is_watched(tmp_path: Path) -> None:
    async with Told(tmp_path) as told, watching([Watcher(told.folder, told.manager)]), asyncio.timeout(60):
        (tmp_path / "new.tmp" / "1").mkdir(parents=True)
        await asyncio.sleep(0)
        (tmp_path / "new.tmp" / "1" / "model.py").write_text(plain("n"))
        os.rename(tmp_path / "new.tmp", tmp_path / "new")
        made = asyncio.ensure_future(told.made.get())
        while not made.done():  # watching begins when the thread of the library does
            (tmp_path / "new" / "1" / "model.py").write_text(plain("n"))
            await asyncio.wait([made], timeout=2.0)
        assert made.result() == "new/1"


def test_archives_in_the_root_are_models(tmp_path: Path) -> None:
    archive(tmp_path / "net.mar", {"handler.py": ""})
    repository = write(tmp_path, {"square/1/model.py": ""})
    assert repository.names() == ["square", "net"] and repository.has("net")
    (model,) = repository.read("net").versions
    assert (model.target, model.platform, model.folder, model.version) == ("net.mar", "torchserve", tmp_path, "")
    other = {"file": "net.mar", "max_batch_size": 4}
    assert repository.takes(other, None) and not repository.takes({"file": "../net.mar"}, None)
    (model,) = repository.read("other", other).versions
    assert (model.name, model.target, model.settings) == ("other", "net.mar", {"max_batch_size": 4})
    assert repository.has("other")  # from now on
    (tmp_path / "net.mar").unlink()
    assert repository.models_of(tmp_path / "net.mar") == ["net"] and not repository.has("net")
