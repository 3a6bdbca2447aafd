"""Platforms that packages bring."""

import asyncio
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.catalog.repository.shelf import plain, services, write

from weir import Model, Service, SettingsError
from weir.catalog.loading import ServiceMaker
from weir.catalog.manager import Manager
from weir.catalog.registry import Registry
from weir.catalog.sources import ModelToServe
from weir.workers import source


class Table:
    """Serves a file of lines as a model that answers with the line of a number."""

    def load(self, model: ModelToServe) -> type[Model]:
        assert model.folder is not None
        lines = (model.folder / model.target).read_text().splitlines()

        class Lines(Model):
            def predict(self, batch: list[int]) -> list[Any]:
                return [lines[number] for number in batch]

        return Lines


def broken() -> None:
    raise KeyError("no")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "tests.catalog.repository.test_platforms"
    found = [
        EntryPoint(name, f"{here}:{what}", "weir.platforms") for name, what in (("table", "Table"), ("bad", "broken"))
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)


def test_a_package_may_bring_a_platform(tmp_path: Path, installed: None) -> None:
    files = {"one/1/lines.txt": "a\nb", "one/config.toml": 'platform = "table"\nfile = "lines.txt"'}
    (service,) = services(write(tmp_path, files), "one")
    assert (service.facts.platform, service.facts.model.__name__) == ("table", "Lines")


def test_one_that_cannot_be_made_is_named(tmp_path: Path, installed: None) -> None:
    folder = write(tmp_path, {"one/1/x": "", "one/config.toml": 'platform = "bad"'})
    with pytest.raises(SettingsError, match=r"platform='bad': .*:broken: KeyError: 'no'"):
        services(folder, "one")
    folder = write(tmp_path, {"one/1/x": "", "one/config.toml": 'platform = "none"'})
    with pytest.raises(
        SettingsError,
        match="available: python, onnx, sklearn, transformers, triton_python, mlserver, ensemble, bad, table",
    ):
        services(folder, "one")


WITH_NEIGHBOUR = """
import weir
from neighbour import ANSWER
import relative

class Plain(weir.Model):
    def predict(self, batch):
        return [[ANSWER, relative.NUMBER] for _ in batch]
"""
TENSORS = """
import weir

class Twice(weir.Model):
    {declared}
    def predict(self, batch):
        return {{"OUT": batch["IN"] * 2}}
"""
DECLARED = """
[[inputs]]
name = "IN"
datatype = "FP32"
shape = {shape}

[[outputs]]
name = "OUT"
datatype = "FP32"
shape = [-1, 3]
"""


def test_every_version_has_neighbours_of_its_own(tmp_path: Path) -> None:
    files = {}
    for version in ("1", "2"):
        files[f"one/{version}/model.py"] = WITH_NEIGHBOUR
        files[f"one/{version}/neighbour.py"] = f"ANSWER = 'v{version}'"
        files[f"one/{version}/relative.py"] = f"NUMBER = {version}"

    async def main() -> None:
        folder = write(tmp_path, files)
        for version, service in zip(("1", "2"), services(folder, "one"), strict=True):
            async with service:
                assert await service.infer(0) == [f"v{version}", int(version)]
            source.release(service.generation)

    asyncio.run(main())
    assert "neighbour" not in sys.modules and str(tmp_path / "one" / "1") not in sys.path


def test_a_model_that_changes_is_loaded_anew_and_one_that_breaks_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        folder, registry = write(tmp_path, {"one/1/model.py": plain("a")}), Registry([])
        manager = Manager(registry, folder, ServiceMaker(()))
        try:
            await manager.load_model("one")
            write(tmp_path, {"one/1/model.py": plain("b")})
            assert await registry.get("one").infer(0) == "a"
            await manager.load_model("one")
            assert await registry.get("one").infer(0) == "b"
            write(tmp_path, {"one/1/model.py": plain("c")[:-10], "one/2/model.py": plain("d")})
            with pytest.raises(Exception, match=r"failed to load 'one': .*SyntaxError"):
                await manager.load_model("one")
            # A worker that is replaced runs what was read, not what is in the file now.
            await registry.get("one").add_worker()
            assert set(await registry.get("one").infer_many([0] * 100)) == {"b"}
            await manager.load_model("one", version="2")
            assert [await registry.get("one", version).infer(0) for version in ("1", "2", "")] == ["b", "d", "d"]
        finally:
            await manager.stop(0.0)

    asyncio.run(main())


@pytest.mark.parametrize("shape", ["[-1, 3]", "[3]"])
@pytest.mark.parametrize(
    "declared",
    ["", "inputs = (weir.Tensor('IN', 'FP32', (-1, 3)),)\n    outputs = (weir.Tensor('OUT', 'FP32', (-1, 3)),)"],
)
def test_tensors_are_declared_in_the_file_or_the_class(tmp_path: Path, shape: str, declared: str) -> None:
    code = TENSORS.format(declared=declared or "number = 1")
    folder = write(tmp_path, {"one/1/model.py": code, "one/config.toml": DECLARED.format(shape=shape)})
    (service,) = services(folder, "one")
    (tensor,) = service.facts.model.inputs
    assert (tensor.name, tensor.datatype, tuple(tensor.shape)) == ("IN", "FP32", (-1, 3))

    async def main(service: Service) -> Any:
        async with service:
            return await service.infer({"IN": np.ones((2, 3), dtype=np.float32)})

    np.testing.assert_array_equal(asyncio.run(main(service))["OUT"], np.full((2, 3), 2.0, dtype=np.float32))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (DECLARED.format(shape="[-1, 4]"), "inputs: 'IN' has shape [-1, 4]; the model itself has [-1, 3]"),
        (DECLARED.format(shape="[3]").replace("FP32", "FP64"), "inputs: 'IN' has datatype 'FP64'; the model itself has 'FP32'"),
        (DECLARED.format(shape="[3]").replace('"IN"', '"X"'), "inputs: are X; the model itself has IN"),
    ],
)  # fmt: skip
def test_the_file_must_not_contradict_the_class(tmp_path: Path, said: str, message: str) -> None:
    declared = "inputs = (weir.Tensor('IN', 'FP32', (-1, 3)),)\n    outputs = (weir.Tensor('OUT', 'FP32', (-1, 3)),)"
    folder = write(tmp_path, {"one/1/model.py": TENSORS.format(declared=declared), "one/config.toml": said})
    with pytest.raises(SettingsError) as refused:
        services(folder, "one")
    assert message in refused.value.message


def test_a_target_may_be_an_installed_module_or_a_service(tmp_path: Path) -> None:
    service = plain("s") + "class Own(weir.Service):\n    model = Plain\n"
    folder = write(
        tmp_path,
        {
            "one/1/weights": "x", "one/config.toml": 'target = "tests.served_models:Power"\nparams = {exponent = 3}',
            "two/1/other.py": service, "two/config.toml": 'target = "other.py:Own"',
        },
    )  # fmt: skip
    (one,), (two,) = services(folder, "one"), services(folder, "two")
    assert (one.model.__name__, one.params) == ("Power", {"exponent": 3})
    assert type(two).__name__ == "Own"
