"""Each model sees the modules of its own folder first, whatever else is served beside it."""

import asyncio
import importlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.repository.shelf import services
from tests.served import serving
from tests.waiting import until

from weir.catalog.adapters.triton_utils import load_class
from weir.catalog.loading import ServiceMaker, load_target, reread
from weir.catalog.manager import Manager
from weir.catalog.registry import Registry
from weir.catalog.repository.folder import FolderRepository
from weir.catalog.residency import Residency
from weir.catalog.sources import ModelToServe, TargetRepository
from weir.errors import Draining, InvalidRequest, ModelNotReady, SettingsError
from weir.model import Model
from weir.policy.residency import Room
from weir.protocols.exchange import once_read
from weir.settings import read_model_table
from weir.testing import FakeClock
from weir.workers import source
from weir.workers.source import ModelFolder, folder_of, loaded_apart

MODEL = """
import weir
import utils
from helpers.inner import NAME as inner
from spaces.deep import NAME as deep

class {name}(weir.Model):
    def predict(self, batch):
        import late
        import helpers.later as later
        from utils import NAME
        return [[utils.NAME, NAME, inner, deep, late.NAME, later.NAME, later.sibling()] for _ in batch]
"""
FILES = {
    "utils.py": "import other\nNAME = other.NAME\n",
    "other.py": "NAME = {name!r}\n",
    "late.py": "NAME = {name!r}\n",
    "helpers/__init__.py": "",
    "helpers/inner.py": "from .own import NAME\n",
    "helpers/own.py": "NAME = {name!r}\n",
    "helpers/later.py": "from . import own\nNAME = own.NAME\ndef sibling():\n    import other\n    return other.NAME\n",
    "spaces/deep.py": "from spaces.far import NAME\n",  # without an __init__.py
    "spaces/far.py": "NAME = {name!r}\n",
}


def write(folder: Path, name: str, main: str = "model.py") -> Path:
    for path, text in {main: MODEL, **FILES}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text.format(name=name))
    return folder / main


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_models_with_modules_of_the_same_names(tmp_path: Path, executor: str) -> None:
    targets = [f"{write(tmp_path / 'targets' / name, name)}:{name}" for name in ("Alpha", "Beta")]
    for name in ("gamma", "delta"):
        write(tmp_path / "models" / name / "1", name)
    repository = ("--model-repository", tmp_path / "models")
    with serving(*targets, *repository, "--executor", executor, "--allow-control") as (_, client):

        def check(**changed: str) -> None:
            for name in ("Alpha", "Beta", "gamma", "delta"):
                found = client.post(f"/infer/{name.lower()}", json=1)
                assert (found.status_code, set(found.json())) == (200, {changed.get(name, name)}), found.text

        check()
        write(tmp_path / "models" / "gamma" / "1", "changed")
        for name in ("alpha", "beta", "gamma"):  # its code is read again
            loaded = client.post(f"/v2/repository/models/{name}/load")
            assert loaded.status_code == 200, loaded.text
        check(gamma="changed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def put(folder: Path, **modules: str) -> None:
    """Write `modules` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text + "\n")


SIMPLE = """
import weir
import {module}

class {name}(weir.Model):
    def predict(self, batch):
        return [{module}.NAME for _ in batch]
"""


FINDS_BY_NAME = """
import importlib
import os
import importlib.util
import importlib.machinery as machinery
import importlib.metadata
from importlib import import_module as found
import weir

class {name}(weir.Model):
    def predict(self, batch):
        return [[*self.names(), *self.same()] for _ in batch]

    @staticmethod
    def names():
        import importlib as late
        inner = late.import_module(".inner", "helpers")
        return [each("utils").NAME for each in (importlib.import_module, found, late.import_module)] + [inner.NAME]

    @staticmethod
    def same():
        distribution = importlib.metadata.distribution("weir-serving").name
        return importlib.util.find_spec("json").name, machinery.__name__, importlib.import_module("json").__name__, distribution
"""


def test_modules_that_code_finds_by_their_names_are_those_of_its_folder(folder: Path) -> None:
    found: dict[str, Any] = {}
    for name in ("Alpha", "Beta"):
        target = write(folder / name, name)
        target.write_text(FINDS_BY_NAME.format(name=name))
        found[name] = load_target(f"{target}:{name}")
    for name, kind in found.items():
        assert issubclass(kind, Model)
        assert kind().predict([1])[0] == [name] * 4 + ["json", "importlib.machinery", "json", "weir-serving"]
    for name in found:
        source.forget(folder_of(str(folder / name)))


def test_a_module_of_the_working_directory_beside_a_file(folder: Path) -> None:
    for where, name in ((".", "Here"), ("there", "There")):
        put(
            folder / where,
            isolated_model=SIMPLE.format(name=name, module="isolated_utils"),
            isolated_utils=f"NAME = {name!r}",
        )
    there = load_target("there/isolated_model.py:There")
    here = load_target("isolated_model:Here")
    for model, name in ((there, "There"), (here, "Here")):
        assert name == sys.modules[model.__module__].isolated_utils.NAME


def test_a_module_that_the_program_has_already_keeps_its_place(folder: Path) -> None:
    wrong = "raise ValueError('not the one')"
    put(folder / "isolated_json", json=wrong, weir=wrong, model=SIMPLE.format(name="Plain", module="json"))
    model = load_target("isolated_json/model.py:Plain")
    assert sys.modules[model.__module__].json is importlib.import_module("json")


PICKLED = r"""
import pickle
import utils
import helpers.inner

NAMED = [pickle.loads(each) for each in (b"cutils\nNamed\n)R.", b"chelpers.inner\nInner\n)R.")]
"""


def read_pickled(folder: Path, name: str) -> list[str]:
    put(folder, utils=f"class Named:\n    name = {name!r}", model=PICKLED)
    put(folder / "helpers", inner=f"class Inner:\n    name = {name!r}")
    apart = loaded_apart(str(folder), folder.name)
    module = reread("the model", f"pickled_{folder.name}", folder / "model.py", apart)
    return [each.name for each in module.NAMED]


def test_pickles_find_the_classes_of_the_models_own_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for name in ("first", "again"):
        assert read_pickled(folder / "alpha", name) == [name, name]
    with pytest.raises(SettingsError, match="utils: another model's module has this name in this process"):
        read_pickled(folder / "beta", "beta")


def test_what_an_ended_model_has_loaded_is_forgotten(tmp_path: Path) -> None:
    def loaded() -> int:
        return sum(name.startswith("weir_model_grows_1") for name in sys.modules)

    write(tmp_path / "grows" / "1", "grows")
    folder = FolderRepository(tmp_path, read_model_table)
    (first,) = services(folder, "grows")
    one = loaded()
    (second,) = services(folder, "grows")  # the first one may still serve
    assert one > 1 and loaded() == 2 * one - 1
    source.release(first.generation)
    assert loaded() == one
    source.release(second.generation)
    assert loaded() == 0


async def test_a_model_on_demand_with_a_broken_version_leaves_nothing_behind(tmp_path: Path) -> None:
    """It is read again and again."""
    write(tmp_path / "halved" / "1", "halved")
    write(tmp_path / "halved" / "2", "halved").write_text("raise ValueError('broken')\n")
    residency = Residency(Room(1e9), clock=FakeClock())
    folder = FolderRepository(tmp_path, read_model_table)
    manager = Manager(Registry([]), folder, ServiceMaker((), on_demand=residency), residency=residency)
    with pytest.raises(ModelNotReady, match="broken"):
        await once_read(lambda: manager.registry.get("halved"))
    assert not [name for name in sys.modules if name.startswith("weir_model_halved_1")]
    await manager.stop()


def manager_of(*targets: str) -> Manager:
    """Return a manager of these models, which run in this process once they are loaded."""
    models = [ModelToServe(each, each.rpartition(":")[2], {}, [], {"executor": "thread"}) for each in targets]
    return Manager(Registry([]), TargetRepository(models), ServiceMaker(()))


async def test_a_target_that_cannot_be_loaded_leaves_no_names_taken(folder: Path) -> None:
    for name in ("Alpha", "Beta"):
        write(folder / name.lower(), name, "isolated_main.py")
    put(folder / "alpha", isolated_broken="import utils\nraise ValueError('broken')")
    manager = manager_of(
        "alpha/isolated_broken.py:Broken", "alpha/isolated_main.py:Missing", "beta/isolated_main.py:Beta"
    )
    for name in ("Broken", "Missing"):
        with pytest.raises(InvalidRequest):
            await manager.load_model(name)
    await manager.load_model("Beta")
    assert manager.registry.get("Beta").generation.model.__module__ == "isolated_main"
    await manager.stop()
    assert "isolated_main" not in sys.modules


async def test_the_names_of_an_unloaded_models_modules_are_free(folder: Path) -> None:
    for name in ("Alpha", "Beta"):
        write(folder / name.lower(), name, "isolated_main.py")
    manager = manager_of("alpha/isolated_main.py:Alpha", "beta/isolated_main.py:Beta")
    path = list(sys.path)
    for name in ("Alpha", "Beta", "Alpha"):
        await manager.load_model(name)
        service = manager.registry.get(name)
        assert service.generation.model.__module__ == "isolated_main"
        assert set(await service.infer(1)) == {name}
        assert name == importlib.import_module("utils").NAME  # as pickles find it
        await manager.unload_model(name)
        assert "utils" not in sys.modules and sys.path == path


async def test_a_folder_keeps_its_names_while_one_of_its_models_runs(folder: Path) -> None:
    for name in ("Alpha", "Beta"):
        write(folder / name.lower(), name, "isolated_main.py")
    write(folder / "alpha", "More", "isolated_more.py")
    manager = manager_of("alpha/isolated_main.py:Alpha", "alpha/isolated_more.py:More", "beta/isolated_main.py:Beta")
    for name in ("Alpha", "More", "Alpha"):  # the last replaces the first
        await manager.load_model(name)
    await manager.unload_model("Alpha")
    assert "utils" in sys.modules
    await manager.load_model("Beta")
    for name in ("More", "Beta"):
        assert set(await manager.registry.get(name).infer(1)) == {name}
    assert manager.registry.get("Beta").generation.model.__module__ != "isolated_main"
    await manager.unload_model("More")
    await manager.unload_model("Beta")
    assert "utils" not in sys.modules


async def test_a_server_that_ends_during_a_reload_leaves_no_names_taken(folder: Path) -> None:
    write(folder / "alpha", "Alpha", "isolated_main.py")
    os.mkfifo(folder / "gate")
    waits = f"    def predict(self, batch):\n        open({str(folder / 'gate')!r}).close()\n        return batch"
    put(folder / "alpha", isolated_main=f"import weir\nimport utils\nclass Alpha(weir.Model):\n{waits}")
    manager = manager_of("alpha/isolated_main.py:Alpha")
    await manager.load_model("Alpha")
    service = manager.registry.get("Alpha")
    former = service.generation
    call = service.infer(1)
    replaced = asyncio.ensure_future(manager.load_model("Alpha"))
    await until(lambda: service.generation is not former)
    stopped = asyncio.ensure_future(manager.stop())
    with pytest.raises(Draining):
        await replaced
    (folder / "gate").write_text("")  # once the batch reads it
    assert await call == 1
    await stopped
    assert "utils" not in sys.modules


def test_threads_may_import_at_the_same_time(folder: Path) -> None:
    names = [f"isolated_{number}" for number in range(200)]
    for where in ("one", "two"):
        put(folder / where, **dict.fromkeys(names, f"NAME = {where!r}"))

    def load(where: str, models: ModelFolder, order: list[str]) -> set[tuple[str, str]]:
        return {(where, models.builtins["__import__"](name).NAME) for name in order}

    with ThreadPoolExecutor(4) as pool:
        loads = [
            pool.submit(load, where, folder_of(str(folder / where)), order)
            for where in ("one", "two")
            for order in (names, names[::-1])
        ]
    assert set[tuple[str, str]]().union(*[each.result() for each in loads]) == {("one", "one"), ("two", "two")}


TRITON = """
import triton_python_backend_utils as pb_utils
import isolated_neighbour

class TritonPythonModel:
    def names(self):
        from isolated_neighbour import NAME
        return [isolated_neighbour.NAME, NAME, isolated_neighbour.folder(), pb_utils.get_model_dir()]
"""


def test_models_of_triton_in_one_process_have_their_own_modules_and_folder(folder: Path) -> None:
    own = "def folder():\n    import triton_python_backend_utils as own\n    return own.get_model_dir()"
    found = {}
    for name in ("one", "two"):
        put(folder / name, isolated_neighbour=f"NAME = {name!r}\n{own}")
        found[name] = load_class(TRITON.encode(), str(folder / name / "model.py"))()
    for name, model in found.items():
        assert model.names() == [name, name, str(folder / name), str(folder / name)]
