"""Chains of tensors, those that a model repository describes, and what becomes of their steps."""

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.catalog.repository.shelf import write
from tests.rings import subcases
from tests.served import MODELS, serving

from weir import Chain, Conflict, InvalidRequest, Model, Registry, Service, SettingsError, Step, Switch, Tensor
from weir.catalog.chains import Steps
from weir.catalog.loading import ServiceMaker
from weir.catalog.manager import Manager
from weir.catalog.registry import running

INLINE = 'executor = "inline"'

CODE = """
import weir

class Plus(weir.Model):
    inputs = (weir.Tensor("x", "FP32", (-1, 2)),)
    outputs = (weir.Tensor("y", "FP32", (-1, 2)),)

    def predict(self, batch):
        return {"y": batch["x"] + 1}
"""

ENSEMBLE = """
platform = "ensemble"
inputs = [{name = "x", datatype = "FP32", shape = [-1, 2]}]
outputs = [{name = "z", datatype = "FP32", shape = [-1, 2]}]
steps = [{model = "plus"}, {model = "plus", inputs = {x = "y"}, outputs = {y = "z"}}]
"""


class Plus(Model):
    inputs = (Tensor("x", "FP32", (-1, 2)),)
    outputs = (Tensor("y", "FP32", (-1, 2)),)

    def predict(self, batch: Any) -> Any:
        return {"y": batch["x"] + 1}


class Twice(Chain):
    inputs = (Tensor("x", "FP32", (-1, 2)), Tensor("way", "INT32", (-1, 1)))
    outputs = (Tensor("y", "FP32", (-1, 2)),)
    steps = ("plus", Switch("way", {1: [Step("plus", inputs={"x": "y"})]}, default=[Step("plus")]))


async def test_tensors_have_names_on_their_way() -> None:
    chain = Twice()
    async with running(Registry([Service(Plus, executor="inline"), chain])):
        rows = {"x": numpy.zeros((3, 2), "float32"), "way": numpy.ones((3, 1), "int32")}
        assert (await chain.infer(rows))["y"].tolist() == [[2, 2]] * 3
        assert (await chain.infer(rows | {"way": 0 * rows["way"]}))["y"].tolist() == [[1, 1]] * 3
        with pytest.raises(InvalidRequest, match="elements must be equal"):
            await chain.infer(rows | {"way": numpy.array([[0], [1], [1]], "int32")})


async def test_a_repository_describes_a_chain_whose_steps_come_and_go_with_care(tmp_path: Path) -> None:
    folder = write(tmp_path, {"plus/1/model.py": CODE, "plus/config.toml": INLINE, "both/config.toml": ENSEMBLE})
    models = Registry([])
    manager = Manager(models, folder, ServiceMaker(()))
    await manager.load_model("both")  # and its step first
    chain = models.get("both", "1")
    assert chain.facts.platform == "ensemble"
    asked = {"x": numpy.zeros((1, 2), "float32")}
    assert (await chain.infer(asked))["z"].tolist() == [[2, 2]]
    with pytest.raises(Conflict, match="is a step of 'both'"):
        await manager.unload_model("plus")
    await manager.load_model("plus")  # replaced, which a chain does not mind
    assert (await chain.infer(asked))["z"].tolist() == [[2, 2]]
    for code, rule in (
        (CODE.replace("(-1, 2)", "(-1, 3)"), r"'plus': both.*input 'x': has shape \[-1, 3\], 'x' has \[-1, 2\]"),
        (ITEMS.format(factor=2), "step 'plus': takes items, the chain has tensors"),
    ):
        (tmp_path / "plus/1/model.py").write_text(code)
        with pytest.raises(InvalidRequest, match=rule):
            await manager.load_model("plus")
    assert (await chain.infer(asked))["z"].tolist() == [[2, 2]]  # the one before goes on
    await manager.unload_model("plus", unload_dependents=True)
    assert not models.services
    await manager.stop()


@subcases(
    ("steps", "said"),
    [
        (
            [Step("plus", inputs={"x": "w"})],
            "step 'plus': input 'x': no tensor 'w' is available here; there are x, way",
        ),
        ([Step("plus", inputs={"x": "way"})], "step 'plus': input 'x': is FP32, 'way' is INT32 there"),
        ([Step("plus", outputs={"y": "z"})], "output 'y': no tensor 'y' is available here; there are x, way, z"),
        ([Switch("way", {1: ["plus"], 2: [Step("plus", inputs={"x": "q"})]})], "input 'x': no tensor 'q' is available"),
    ],
)
async def test_a_chain_whose_tensors_do_not_meet_does_not_start(steps: Steps, said: str) -> None:
    models = Registry([Service(Plus, executor="inline"), Twice(steps)])
    with pytest.raises(SettingsError, match=said):
        await models.start()


ITEMS = """
import weir

class Times(weir.Model):
    def predict(self, batch):
        return [{factor} * x for x in batch]
"""


async def test_a_version_that_a_chain_names_stays_while_the_chain_is_there(tmp_path: Path) -> None:
    files = {f"times/{factor}/model.py": ITEMS.format(factor=factor) for factor in (2, 3)}
    chains = {f"{name}/config.toml": f'platform = "ensemble"\nsteps = [{step}]' for name, step in {
        "any": '"times"', "old": '{model = "times", version = "2"}',
    }.items()}  # fmt: skip
    folder = write(tmp_path, {**files, **chains, "times/config.toml": INLINE})
    models = Registry([])
    manager = Manager(models, folder, ServiceMaker(()))
    await manager.load_model("old")
    await manager.load_model("any")
    assert [await models.get(name).infer(5) for name in ("any", "old")] == [15, 10]
    shutil.rmtree(tmp_path / "times/2")
    for change in (manager.load_model("times"), manager.unload_model("times", version="2")):
        with pytest.raises(Conflict, match="is a step of 'old':"):
            await change
    await manager.unload_model("times", version="3")  # the other chain has what is left
    assert [await models.get(name).infer(5) for name in ("any", "old")] == [10, 10]
    await manager.unload_model("times", version="2", unload_dependents=True)
    assert not models.services
    await manager.stop()


async def test_a_server_starts_the_steps_of_what_it_starts(tmp_path: Path) -> None:
    chain = 'platform = "ensemble"\nsteps = ["{0}", "{0}"]'
    texts = {"outer": chain.format("inner"), "inner": chain.format("times"), "times": INLINE}
    files = {f"{name}/config.toml": text for name, text in texts.items()}
    folder = write(tmp_path, {**files, "times/1/model.py": ITEMS.format(factor=2)})
    make = ServiceMaker(())
    models = Registry([make(version) for version in folder.read("outer").versions])
    manager = Manager(models, folder, make)
    await manager.start()
    assert list(models.services) == ["outer", "inner", "times"]
    assert await models.get("outer").infer(1) == 16
    await manager.stop()


async def test_steps_that_lead_in_a_circle_are_not_loaded(tmp_path: Path) -> None:
    chain = 'platform = "ensemble"\nsteps = ["{}"]'
    folder = write(tmp_path, {"one/config.toml": chain.format("two"), "two/config.toml": chain.format("one")})
    manager = Manager(Registry([]), folder, ServiceMaker(()))
    with pytest.raises(InvalidRequest, match="steps lead in a circle"):
        await manager.load_model("one")
    assert not manager.registry.services
    await manager.stop()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps = []", "at least one table"), ("steps = [3]", "must be a table"), ("steps = [{}]", "one of the keys"),
        ('steps = [{model = "a", x = 1}]', "unknown key"), ("steps = [{model = 1}]", "must be a name"),
        ('steps = [{model = "a", inputs = {a = 1}}]', "table of names"), ("steps = [{switch = 1}]", "must be a key"),
        ("steps = [{branch = {}}]", "table of lists"), ('steps = [{branch = {a = ["b"]}, fail_fast = 1}]', "true or false"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say_is_refused(tmp_path: Path, text: str, words: str) -> None:
    folder = write(tmp_path, {"both/config.toml": f'platform = "ensemble"\n{text}'})
    with pytest.raises(SettingsError, match=words):
        folder.read("both")


def test_branches_and_switches_in_a_file(tmp_path: Path) -> None:
    default = '[{branch = {x = ["one"], y = ["two"]}, fail_fast = false}]'
    switch = f'switch = "kind"\ncases = {{1 = ["one"], b = [{{model = "two"}}]}}\ndefault = {default}'
    text = f'platform = "ensemble"\n[[steps]]\n{switch}'
    folder = write(tmp_path, {"both/config.toml": text, "bare/config.toml": 'platform = "ensemble"'})
    (switch,) = (folder.read("both").versions[0].attributes or {})["steps"]
    assert set(switch.cases) == {"1", 1, "b"}
    assert not switch.default[0].fail_fast
    with pytest.raises(SettingsError, match=r"must have \[\[steps\]\]"):
        ServiceMaker(())(folder.read("bare").versions[0])
    other = write(tmp_path, {"odd/config.toml": 'platform = "python"\nsteps = ["a"]'})
    with pytest.raises(SettingsError, match="steps: are for platform"):
        other.read("odd")


def test_a_served_chain_is_called_as_any_model(tmp_path: Path) -> None:
    items = 'platform = "ensemble"\nsteps = ["square", {branch = {a = ["square"], b = ["square", "square"]}}]'
    write(tmp_path, {"plus/1/model.py": CODE, "both/config.toml": ENSEMBLE, "powers/config.toml": items})
    with serving(f"{MODELS}:Square", "--model-repository", tmp_path, "--grpc-port", 0) as (_, client):
        assert client.post("/infer/powers", content="2").json() == {"a": 16, "b": 256}
        assert client.post("/infer/powers/batch", content="[1,2]").json()[1] == {"output": {"a": 16, "b": 256}}
        asked = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}], "id": "7"}
        answer = client.post("/v2/models/both/infer", json=asked).json()
        assert (answer["outputs"][0]["name"], answer["outputs"][0]["data"]) == ("z", [3.0, 4.0])
        assert (answer["model_name"], answer["id"]) == ("both", "7")
        assert client.get("/v2/models/both").json()["platform"] == "ensemble"
        refused = client.post("/v2/repository/models/plus/unload", json={})
        assert "is a step of 'both'" in refused.json()["error"]
        together = {"parameters": {"unload_dependents": True}}
        assert client.post("/v2/repository/models/plus/unload", json=together).status_code == 200
        assert client.get("/v2/models/both").status_code == 404
