"""Tensors from different frontends, and of different lengths, in one batch of a real worker."""

import asyncio
import json
from typing import Any

import numpy
import pytest

from weir.batching.request_state import RequestBase
from weir.errors import WeirError
from weir.messages import KSERVE, LENT, Dispatch, Form, Kind
from weir.model import PAD, RAGGED, Model, Tensor
from weir.serving.service import Service
from weir.wire.inference import ArenaArrays
from weir.wire.kserve_json import BodyPeek
from weir.wire.tensors import shape_key


class Reversed(Model):
    """Each row backwards, and how many rows there were in the batch."""

    inputs = (Tensor("x", "FP32", [-1, -1], varying=PAD),)
    outputs = (Tensor("y", "FP32", [-1, -1], like="x"), Tensor("rows", "INT64", [-1]))
    max_batch_size = 4
    policy = "full"

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        y = numpy.zeros_like(batch["x"])
        for row, length in enumerate(batch["x_lengths"]):
            y[row, :length] = batch["x"][row, :length][::-1]
        return {"y": y, "rows": numpy.full(len(y), len(y))}


class RaggedReversed(Reversed):
    inputs = (Tensor("x", "FP32", [-1, -1], varying=RAGGED),)

    def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = numpy.split(batch["x"], batch["x_lengths"].cumsum()[:-1])
        count = len(batch["x_lengths"])
        return {"y": numpy.concatenate([row[::-1] for row in rows]), "rows": numpy.full(count, count)}


class TensorsRequest(RequestBase):
    """A request of a frontend."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        self.answer.set_result(output)

    def fail(self, error: WeirError) -> None:
        self.answer.set_exception(error)


def from_json(service: Service, row: list[float]) -> TensorsRequest:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, len(row)], "data": row}
    body = json.dumps({"inputs": [tensor], "id": "7"}).encode()
    outline = BodyPeek(service.facts.model.inputs)(body)
    return TensorsRequest(Form(30.0, key=outline.key, content_type=KSERVE, accept=KSERVE), body, service.now())


def from_binary(service: Service, rows: list[list[float]]) -> TensorsRequest:
    array = numpy.array(rows, numpy.float32)
    block = service.reserve(array.nbytes)
    assert block is not None
    block.view[: array.nbytes] = array.tobytes()
    view = numpy.frombuffer(block.view, numpy.float32, array.size).reshape(array.shape)
    arrays = ArenaArrays({"x": view}, block)
    key, count = shape_key(arrays, service.facts.model.inputs), len(rows)
    form = Form(30.0, Kind.TENSORS, rows=count, cost=float(count), accept=LENT, key=key)
    return TensorsRequest(form, arrays, service.now())


@pytest.mark.parametrize("model", [Reversed, RaggedReversed])
async def test_they_share_a_batch_and_each_gets_its_own(model: type[Model]) -> None:
    async with Service(model) as service:
        body, binary = from_json(service, [1, 2, 3]), from_binary(service, [[4, 5], [6, 7]])
        service.submit(body)
        service.submit(binary)
        python = await service.infer({"x": [[8.0, 9.0, 10.0, 11.0, 12.0]]})
        assert python["y"].tolist() == [[12, 11, 10, 9, 8]]
        assert python["rows"].tolist() == [4]
        found = json.loads(await body.answer)
        assert (found["model_name"], found["id"]) == (service.name, "7")
        assert [output["data"] for output in found["outputs"]] == [[3, 2, 1], [4]]
        answer = await binary.answer
        assert answer["y"].tolist() == [[5, 4], [7, 6]]
        del answer, binary


async def test_the_place_of_a_request_is_free_after_its_end() -> None:
    """Whatever the end is: an answer, an error, a cancellation in the line."""

    class Touchy(Reversed):
        policy = "greedy"

        def predict(self, batch: dict[str, Any]) -> dict[str, Any]:
            if (batch["x"] < 0).any():
                raise ValueError("negative")
            return super().predict(batch)

    async with Service(Touchy) as service:
        free = service.executor.gauges()["arena_free_bytes"]
        good, bad = from_binary(service, [[1.0] * 20_000]), from_binary(service, [[-1.0] * 20_000] * 3)
        assert service.executor.gauges()["arena_free_bytes"] < free
        service.submit(good)
        service.submit(bad)
        late = from_binary(service, [[1.0] * 20_000])
        service.submit(late)
        service.cancel(late)
        assert (await good.answer)["y"].shape == (1, 20_000)
        with pytest.raises(WeirError, match="negative"):
            await bad.answer
        assert service.executor.gauges()["arena_free_bytes"] == free
