"""Models of tensors that cannot batch, in process: each request is an item, which runs whole and alone."""

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.catalog.repository.shelf import services, write

from weir import Chain, Example, InvalidRequest, Model, ModelError, Service, SettingsError, Tensor
from weir.catalog.registry import Registry


class Total(Model):
    """Sums up all that it gets, and says how often it was asked with how much."""

    inputs = (Tensor("x", "FP32", (-1, 2), batch="none"),)
    outputs = (Tensor("sum", "FP32", (), batch="none"), Tensor("shape", "INT64", (2,), batch="none"))
    examples: ClassVar[Any] = (Example({"x": [[1, 2], [3, 4]]}, {"sum": 10, "shape": [2, 2]}),)

    def predict(self, batch: Any) -> Any:
        return {"sum": batch["x"].sum(), "shape": np.array(batch["x"].shape)}


class Own(Total):
    """Writes to what it gets."""

    owns_inputs = True

    def predict(self, batch: Any) -> Any:
        batch["x"] += 1
        return super().predict(batch)


class Short(Total):
    """Returns something else than it declares."""

    examples = ()

    def predict(self, batch: Any) -> Any:
        return {"sum": batch["x"].sum(axis=1), "shape": np.array(batch["x"].shape)}


async def answers_of(model: Any, *values: Any, **settings: Any) -> list[Any]:
    async with Service(model, **settings) as service:
        return await asyncio.gather(*(service.infer({"x": value}) for value in values), return_exceptions=True)


@pytest.mark.parametrize("executor", ["process", "thread", "inline"])
async def test_each_request_runs_alone_as_it_is(executor: str) -> None:
    values = [np.full((rows, 2), rows, np.float32) for rows in (1, 4, 4, 2, 0)]
    for depth in (1,) if executor == "inline" else (1, 2):
        answers = await answers_of(Total, *values, executor=executor, pipeline_depth=depth)
        assert [(float(each["sum"]), each["shape"].tolist()) for each in answers] == [
            (2.0, [1, 2]), (32.0, [4, 2]), (32.0, [4, 2]), (8.0, [2, 2]), (0.0, [0, 2]),
        ]  # fmt: skip


async def test_a_model_may_own_what_it_gets_and_what_does_not_fit_is_refused() -> None:
    given = np.zeros((2, 2), np.float32)
    (answer,) = await answers_of(Own, given, executor="inline")
    assert (float(answer["sum"]), given.sum()) == (4.0, 0.0)
    (refused,) = await answers_of(Total, [[1.0, 2.0, 3.0]], executor="inline")
    assert isinstance(refused, InvalidRequest)
    assert refused.message == "tensor 'x': has shape [1, 3], must be [-1, 2] (-1: any length)"
    (wrong,) = await answers_of(Short, [[1.0, 2.0]], executor="inline")
    assert isinstance(wrong, ModelError)
    assert wrong.message == "predict returned wrong tensors: tensor 'sum': has shape [1], must be [] (-1: any length)"


CODE = """
import weir

class Softmax(weir.Model):
    {tensors}

    def predict(self, batch):
        x = batch["x"]
        return {{"y": x / x.sum()}}
"""
OWN = 'inputs = [weir.Tensor("x", "FP32", (-1,))]\n    outputs = [weir.Tensor("y", "FP32", (-1,))]'
SAID = 'max_batch_size: 0 input { name: "x" data_type: TYPE_FP32 dims: 4 } output { name: "y" data_type: TYPE_FP32 dims: 4 }'


@pytest.mark.parametrize(("tensors", "config"), [(OWN, "max_batch_size: 0"), ("", SAID), (OWN, SAID)])
async def test_a_configuration_says_that_a_class_does_not_batch(tmp_path: Path, tensors: str, config: str) -> None:
    files = {"one/1/model.py": CODE.format(tensors=tensors), "one/config.pbtxt": config}
    (service,) = services(write(tmp_path, files), "one")
    async with service:
        answer = await service.infer({"x": [1, 2, 2, 5]})
    np.testing.assert_allclose(answer["y"], [0.1, 0.2, 0.2, 0.5])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("max_batch_size = 4", "'x' has no batch dimension in the model itself: max_batch_size must be 0"),
        ('batch_dimension = "no"', "batch_dimension='no': must be 'required', 'optional' or 'none'"),
        ("max_batch_size = -1", "max_batch_size=-1: must be 1 or more"),
        ("max_batch_size = 1.5", "max_batch_size=1.5"),
    ],
)
def test_a_configuration_that_contradicts_the_class_is_refused(tmp_path: Path, config: str, message: str) -> None:
    code = CODE.format(tensors=OWN.replace("(-1,)", "(-1,), batch='none'"))
    with pytest.raises(SettingsError) as refused:
        services(write(tmp_path, {"one/1/model.py": code, "one/config.toml": config}), "one")
    assert message in refused.value.message


async def test_a_chain_that_batches_has_no_step_that_cannot() -> None:
    class Line(Chain):
        inputs = (Tensor("x", "FP32", (-1, 2)),)
        outputs = (Tensor("sum", "FP32", (-1,)),)
        steps = ("total",)

    registry = Registry([Service(Total, executor="inline"), Line()])
    with pytest.raises(SettingsError, match=r"line: step 'total': cannot batch, .*must have max_batch_size 0"):
        await registry.start()
