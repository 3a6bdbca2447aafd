"""Each model sees the modules of its own folder first, whatever else is served beside it."""

import asyncio
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.catalog.repository.shelf import services
from tests.served import Served

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
from weir.workers.source import FOLDER, ModelFolder, folder_of, loaded_apart

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


def answer(served: Served, name: str) -> set[str]:
    found = httpx.post(f"{served.url}/infer/{name}", json=1, timeout=30)
    assert found.status_code == 200, found.text
    return set(found.json())


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_models_with_modules_of_the_same_names(tmp_path: Path, executor: str) -> None:
    targets = [f"{write(tmp_path / name.lower(), name)}:{name}" for name in ("Alpha", "Beta")]
    with Served(*targets, "--executor", executor, "--allow-control") as served:
        served.until_ready()
        for _ in range(2):
            assert (answer(served, "alpha"), answer(served, "beta")) == ({"Alpha"}, {"Beta"})
            for name in ("alpha", "beta"):  # its code is read again
                loaded = httpx.post(f"{served.url}/v2/repository/models/{name}/load", timeout=30)
                assert loaded.status_code == 200, loaded.text


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_models_of_a_repository_with_modules_of_the_same_names(tmp_path: Path, executor: str) -> None:
    for name in ("alpha", "beta"):
        write(tmp_path / name / "1", name)
    with Served("--model-repository", tmp_path, "--executor", executor, "--allow-control") as served:
        served.until_ready()
        assert (answer(served, "alpha"), answer(served, "beta")) == ({"alpha"}, {"beta"})
        write(tmp_path / "alpha" / "1", "changed")
        loaded = httpx.post(f"{served.url}/v2/repository/models/alpha/load", timeout=30)
        assert loaded.status_code == 200, loaded.text
        assert (answer(served, "alpha"), answer(served, "beta")) == ({"changed"}, {"beta"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


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
    found = []
    for name in ("Alpha", "Beta"):
        target = write(folder / name, name)
        target.write_text(FINDS_BY_NAME.format(name=name))
        found.append(load_target(f"{target}:{name}"))
    for kind, name in zip(found, ("Alpha", "Beta"), strict=True):
        assert issubclass(kind, Model)
        answers = kind().predict([1])[0]
        assert answers == [name] * 4 + ["json", "importlib.machinery", "json", "weir-serving"]
    for name in ("Alpha", "Beta"):
        source.forget(folder_of(str(folder / name)))


def test_a_module_of_the_working_directory_beside_a_file(folder: Path) -> None:
    for where, name in ((folder, "Here"), (folder / "there", "There")):
        where.mkdir(exist_ok=True)
        (where / "isolated_model.py").write_text(SIMPLE.format(name=name, module="isolated_utils"))
        (where / "isolated_utils.py").write_text(f"NAME = {name!r}\n")
    there = load_target("there/isolated_model.py:There")
    here = load_target("isolated_model:Here")
    for model, name in ((there, "There"), (here, "Here")):
        assert [
            module.NAME for key, module in vars(sys.modules[model.__module__]).items() if key == "isolated_utils"
        ] == [name]


def test_a_module_that_the_program_has_already_keeps_its_place(folder: Path) -> None:
    (folder / "isolated_json").mkdir()
    (folder / "isolated_json" / "json.py").write_text("raise ValueError('not the one')")
    (folder / "isolated_json" / "weir.py").write_text("raise ValueError('not the one')")
    (folder / "isolated_json" / "model.py").write_text(SIMPLE.format(name="Plain", module="json"))
    model = load_target("isolated_json/model.py:Plain")
    assert sys.modules[model.__module__].json is importlib.import_module("json")


def test_a_name_is_apart_only_where_it_is_taken(folder: Path) -> None:
    for where in ("one", "two"):
        (folder / where).mkdir()
        (folder / where / "isolated_taken.py").write_text("NAME = 1\n")
    one, two = folder_of(str(folder / "one")), folder_of(str(folder / "two"))
    assert one.name_of("isolated_taken") == "isolated_taken" != two.name_of("isolated_taken")
    assert one.name_of("isolated_missing") == "isolated_missing"
    module = importlib.import_module(two.name_of("isolated_taken"))
    assert getattr(module, FOLDER) is two and module.__file__ == str(folder / "two" / "isolated_taken.py")


PICKLED = r"""
import pickle
import utils
import helpers.inner

NAMED = [pickle.loads(each) for each in (b"cutils\nNamed\n)R.", b"chelpers.inner\nInner\n)R.")]
"""


def write_pickled(folder: Path, name: str) -> Path:
    (folder / "helpers").mkdir(parents=True, exist_ok=True)
    (folder / "utils.py").write_text(f"class Named:\n    name = {name!r}\n")
    (folder / "helpers" / "inner.py").write_text(f"class Inner:\n    name = {name!r}\n")
    (folder / "model.py").write_text(PICKLED)
    return folder / "model.py"


def read_pickled(path: Path) -> list[str]:
    folder = loaded_apart(str(path.parent), path.parent.name)
    module = reread("the model", f"pickled_{path.parent.name}", path, folder)
    return [each.name for each in module.NAMED]


def test_pickles_find_the_classes_of_the_models_own_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert read_pickled(write_pickled(folder / "alpha", "first")) == ["first", "first"]
    assert read_pickled(write_pickled(folder / "alpha", "again")) == ["again", "again"]


def test_a_pickle_never_finds_the_class_of_another_model(folder: Path) -> None:
    read_pickled(write_pickled(folder / "alpha", "alpha"))
    with pytest.raises(SettingsError, match="utils: another model's module has this name in this process"):
        read_pickled(write_pickled(folder / "beta", "beta"))


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


async def test_a_model_on_demand_of_which_one_version_is_broken_leaves_nothing_behind(tmp_path: Path) -> None:
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
    write(folder / "alpha", "Alpha", "isolated_main.py")
    (folder / "alpha" / "isolated_broken.py").write_text("import utils\nraise ValueError('broken')\n")
    write(folder / "beta", "Beta", "isolated_main.py")
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


async def test_the_names_of_an_unloaded_models_modules_are_free_for_another_folder(folder: Path) -> None:
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
    for name, answer in (("More", "More"), ("Beta", "Beta")):
        assert set(await manager.registry.get(name).infer(1)) == {answer}
    assert manager.registry.get("Beta").generation.model.__module__ != "isolated_main"
    await manager.unload_model("More")
    await manager.unload_model("Beta")
    assert "utils" not in sys.modules


async def test_a_server_that_ends_while_it_replaces_a_model_leaves_no_names_taken(folder: Path) -> None:
    write(folder / "alpha", "Alpha", "isolated_main.py")
    os.mkfifo(folder / "gate")
    (folder / "alpha" / "isolated_main.py").write_text(
        "import weir\nimport utils\nclass Alpha(weir.Model):\n"
        f"    def predict(self, batch):\n        open({str(folder / 'gate')!r}).close()\n        return batch\n"
    )
    manager = manager_of("alpha/isolated_main.py:Alpha")
    await manager.load_model("Alpha")
    service = manager.registry.get("Alpha")
    former = service.generation
    call = service.infer(1)
    replaced = asyncio.ensure_future(manager.load_model("Alpha"))
    while service.generation is former:  # noqa: ASYNC110  (there is no event to wait for)
        await asyncio.sleep(0.001)
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
        (folder / where).mkdir()
        for name in names:
            (folder / where / f"{name}.py").write_text(f"NAME = {where!r}\n")
    folders = [folder_of(str(folder / where)) for where in ("one", "two")]
    found: dict[str, set[str]] = {"one": set(), "two": set()}

    def load(where: str, models: ModelFolder, order: list[str]) -> None:
        for name in order:
            found[where].add(models.builtins["__import__"](name).NAME)

    threads = [
        threading.Thread(target=load, args=(where, models, order))
        for where, models in zip(("one", "two"), folders, strict=True)
        for order in (names, names[::-1])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"one": {"one"}, "two": {"two"}}


TRITON = """
import triton_python_backend_utils as pb_utils
import isolated_neighbour

class TritonPythonModel:
    def names(self):
        from isolated_neighbour import NAME
        return [isolated_neighbour.NAME, NAME, isolated_neighbour.folder(), pb_utils.get_model_dir()]
"""


def test_models_of_triton_in_one_process_have_their_own_modules_and_folder(folder: Path) -> None:
    found = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "isolated_neighbour.py").write_text(
            f"NAME = {name!r}\ndef folder():\n    import triton_python_backend_utils as own\n    return own.get_model_dir()\n"
        )
        found.append(load_class(TRITON.encode(), str(folder / name / "model.py"))())
    for model, name in zip(found, ("one", "two"), strict=True):
        assert model.names() == [name, name, str(folder / name), str(folder / name)]
