"""Requests that differ in nothing but the bytes of their tensors: they are read as all others are, only sooner."""

import asyncio
import gc
import random
from typing import Any

import grpc
import numpy as np
import pytest
from tests.frontends.grpc.kit import INFER, Double, Rig, asking, refused, run, serving

from weir import Model, Service, Tensor
from weir.catalog.registry import Registry
from weir.errors import InvalidRequest, ModelError
from weir.frontends.grpc import inference as forms
from weir.frontends.grpc.inference import LONGEST, Form, Forms, Writing
from weir.messages import OBJECT, Kind
from weir.serving.inference import QueueEntry
from weir.wire.inference import AskedOutput, InferenceRequest, TensorValue
from weir.wire.kserve_grpc import parse_request, raw_at_end, read_request, read_response, write_request

WORK = QueueEntry(None, Kind.TENSORS, OBJECT, OBJECT, 1, 1.0, None, False)


class Both(Model):
    """A tensor model with two inputs and two outputs."""

    inputs = (Tensor("a", "INT32", (-1, -1)), Tensor("b", "FP64", (-1, 2)))
    outputs = (Tensor("sum", "FP64", (-1, 2)), Tensor("b", "FP64", (-1, 2)))

    def predict(self, batch: Any) -> Any:
        return {"sum": batch["a"].sum(axis=1, keepdims=True) + batch["b"], "b": batch["b"]}


def asking_both(
    first: int, model: str = "both", columns: int = 3, outputs: Any = None, **said: Any
) -> InferenceRequest:
    a = np.arange(first, first + columns, dtype=np.int32).reshape(1, columns)
    tensors = [TensorValue("a", "INT32", a), TensorValue("b", "FP64", np.array([[first, 0.5]]))]
    return InferenceRequest(model, tensors, outputs=outputs, **said)


def learned(request: InferenceRequest, service: Any = None) -> Forms:
    """Return a memory that has seen `request` twice."""
    known, body = Forms(), write_request(request)
    service = service or Service(Both, executor="inline")
    for _ in range(2):
        known.learn(body, request, service, WORK)
    known.service = service  # type: ignore[attr-defined]  # which nobody else keeps
    return known


def test_a_request_is_known_from_the_second_on_and_read_as_ever() -> None:
    known, service = Forms(), Service(Both, executor="inline")
    for count in range(2):
        assert known.find(write_request(asking_both(0))) is None, count
        known.learn(write_request(asking_both(count)), asking_both(count), service, WORK)
    body = write_request(asking_both(7))
    form = known.find(body)
    assert form is not None and form.serves(service) and (form.model, form.version) == ("both", "")
    for name, array in form.arrays(body).items():
        read = next(each.array for each in asking_both(7).inputs if each.name == name)
        assert (array.dtype, array.tolist(), array.flags.writeable) == (read.dtype, read.tolist(), False)


def test_whatever_is_found_is_read_as_it_is_otherwise() -> None:
    """Every byte of a message is changed, taken away or doubled: either its form is not known, or it says the same."""
    known, body = learned(asking_both(0)), write_request(asking_both(3))
    changed = [body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :] for at in range(len(body)) for bit in range(8)]
    changed += [body[:at] + body[at + 1 :] for at in range(len(body))]
    changed += [body[: at + 1] + body[at:] for at in range(len(body))]
    found = 0
    for each in changed:
        form = known.find(each)
        if form is not None:
            found += 1
            read = read_request(parse_request(each))
            arrays = form.arrays(each)
            assert [(value.name, value.array.tobytes(), value.array.shape) for value in read.inputs] == [
                (name, array.tobytes(), array.shape) for name, array in arrays.items()
            ]
    assert found >= 8 * (12 + 16)  # every bit of the tensors


def raw(*tensors: bytes) -> bytes:
    return b"".join(b"\x3a" + bytes([len(tensor)]) + tensor for tensor in tensors)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (raw(b"1", b"22") + b"\x0a\x01m", 2),  # another field comes last
        (raw(b"1") + b"\x0a\x01m" + raw(b"22"), 2),
        (b"\x0a\x01m" + raw(b"1"), 2),
        (b"\x0a\x01m" + raw(b"1")[:-1], 1),
        (b"\x0a\x01m", 0),
        (b"", 0),
        (b"\x7b" + raw(b"1"), 1),  # a group
        (b"\x0a\x01m" * 64 + raw(b"1"), 1),
        (b"\x38\x05\x0a\x01m", 1),  # the number of the field with another type
    ],
)
def test_messages_of_other_forms_are_not_remembered(body: bytes, count: int) -> None:
    assert not raw_at_end(body, count)


def test_raw_tensors_at_the_end_are_found() -> None:
    assert raw_at_end(b"\x38\x05" + raw(b"1", b"22"), 2) == [(2, 4, 5), (5, 7, 9)]


@pytest.mark.parametrize(
    "request_",
    [
        asking_both(0, id="mine"),
        asking_both(0, parameters={"priority": 1}),
        asking_both(0, outputs=[AskedOutput("sum", {"binary_data": True})]),
        asking_both(0, columns=LONGEST),
        InferenceRequest("both", []),
        InferenceRequest("both", [TensorValue("a", "BYTES", np.array([b"1"], object))]),
        InferenceRequest("both", [TensorValue("a", "INT32", np.empty((1, 0), np.int32))]),
        InferenceRequest("both", [TensorValue("a", "INT32", np.ones((1, 1), np.int32), {"p": 1})]),
    ],
)
def test_requests_that_say_more_are_not_remembered(request_: InferenceRequest) -> None:
    assert learned(request_).find(write_request(request_)) is None


def test_a_generation_that_was_replaced_is_not_served_nor_kept() -> None:
    known = learned(asking_both(0))
    form = known.find(write_request(asking_both(0)))
    assert form is not None and not form.serves(Service(Both, executor="inline"))
    del known.service  # type: ignore[attr-defined]
    gc.collect()
    assert form._generation() is None


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_MOST_LENGTHS", 8)
    service, known = Service(Both, executor="inline"), Forms()
    for columns in range(1, 40):
        for model in ("a", "bb", "ccc", "dddd", "eeeee", "ffffff"):
            request = asking_both(0, model, columns)
            for _ in range(2):
                known.learn(write_request(request), request, service, WORK)
        assert known.find(write_request(asking_both(1, "ffffff", columns))) is not None
    assert len(known._lengths) <= 8
    assert max(map(len, known._lengths.values())) <= forms._MOST_HEADS


def counting(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, for each call, whether it was of a known form."""
    known: list[bool] = []
    find = Forms.find

    def counted(self: Forms, body: bytes) -> Form | None:
        form = find(self, body)
        known.append(form is not None)
        return form

    monkeypatch.setattr(Forms, "find", counted)
    return known


@pytest.mark.parametrize("outputs", [None, [AskedOutput("b", {})]])
def test_answers_are_those_of_other_requests(outputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = counting(monkeypatch)

    async def test(rig: Rig) -> None:
        for first in range(6):
            bodies = []
            for name in ("", "mine"):  # that one is never known
                answer = await rig.raw(INFER, write_request(asking_both(first, outputs=outputs, id=name)))
                read = read_response(answer)
                bodies.append([(each.name, each.datatype, each.array.tolist()) for each in read.outputs])
                assert (read.model, read.version, read.id, read.parameters) == ("both", "", name, {})
            assert bodies[0] == bodies[1]
            assert bodies[0][-1] == ("b", "FP64", [[first, 0.5]])

    observer = run(test, Both)
    assert known == [False, False] * 2 + [True, False] * 4
    assert observer.ends == 12


def test_many_at_once_in_batches_of_processes_and_of_other_shapes() -> None:
    async def test(rig: Rig) -> None:
        rng = random.Random(7)
        asked = [(rng.randrange(1000), rng.randrange(1, 4)) for _ in range(200)]
        answers = await asyncio.gather(*[rig.infer(asking_both(first, columns=columns)) for first, columns in asked])
        for (first, columns), answer in zip(asked, answers, strict=True):
            total = float(sum(range(first, first + columns)))
            assert [each.array.tolist() for each in answer.outputs] == [[[total + first, total + 0.5]], [[first, 0.5]]]

    run(test, Both, executor="process")


class Odd(Model):
    """Answers with what the request's number asks for."""

    inputs = (Tensor("x", "INT32", (-1, 2)),)
    outputs = (Tensor("text", "BYTES", (-1,)),)

    def predict(self, batch: Any) -> Any:
        if int(batch["x"].max()) == 13:
            raise ValueError("thirteen")
        return {"text": np.array([str(row).encode() for row in batch["x"].tolist()], object)}


def test_errors_and_texts_of_known_forms() -> None:
    async def test(rig: Rig) -> None:
        for _ in range(4):
            assert (await rig.infer(asking(1, 2, model="odd"))).outputs[0].array.tolist() == [b"[1, 2]"]
        code, said = await refused(rig.infer(asking(13, 13, model="odd")))
        assert (code, "thirteen" in said) == (grpc.StatusCode.INTERNAL, True)

    run(test, Odd)


def test_deadlines_of_known_forms() -> None:
    timeouts: list[float] = []
    submit = Service.submit

    def noted(self: Service, request: Any, now: float | None = None) -> None:
        timeouts.append(request.timeout)
        submit(self, request, now)

    async def test(rig: Rig) -> None:
        for timeout in (None, 20.0, None, 20.0, 3e6):
            assert (await rig.infer(asking(1, 2), timeout=timeout)).outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Service, "submit", noted)
        run(test)
    default = Service(Double, executor="inline").settings.timeout
    assert [timeout == default for timeout in timeouts] == [True, False, True, False, True]
    assert all(15.0 < timeout < 21.0 for timeout in (timeouts[1], timeouts[3]))


def test_an_answer_that_lacks_an_output_is_the_models_failure() -> None:
    service = Service(Both, executor="inline")
    form = learned(asking_both(0), service).find(write_request(asking_both(0)))
    assert form is not None
    whole = {"sum": np.zeros((1, 2)), "b": np.zeros((1, 2))}
    first, then = form.respond(service, whole), form.respond(service, whole)
    assert isinstance(first, Writing) and first.write() == then
    other = {"sum": np.zeros((1, 2), np.float32), "b": np.zeros((1, 2))}  # as a hook may have left it
    converted = form.respond(service, other)
    assert isinstance(converted, Writing) and converted.write() == then
    with pytest.raises(ModelError, match="output 'b': is missing"):
        form.respond(service, {"sum": np.zeros((1, 2))})
    with pytest.raises(InvalidRequest):
        form.respond(service, InvalidRequest("no"))
    large = {"sum": np.zeros((1000, 2)), "b": np.zeros((1000, 2))}
    assert all(isinstance(form.respond(service, large), Writing) for _ in range(2))  # the bytes take longest


def test_a_model_that_was_replaced_answers_by_its_own_rules() -> None:
    class Triple(Double):
        def predict(self, batch: Any) -> Any:
            return {"y": 3 * batch["x"]}

    async def main() -> None:
        async with serving(Service(Double, executor="inline")) as rig:
            for _ in range(3):
                assert (await rig.infer(asking(1, 2))).outputs[0].array.tolist() == [[2, 4]]
            other = Service(Triple, executor="inline", name="double")
            await other.start()
            registry: Registry = rig.context.registry
            before, registry.services["double"] = registry.services["double"], other
            try:
                for _ in range(3):
                    assert (await rig.infer(asking(1, 2))).outputs[0].array.tolist() == [[3, 6]]
            finally:
                registry.services["double"] = before
                await other.stop()

    asyncio.run(main())
