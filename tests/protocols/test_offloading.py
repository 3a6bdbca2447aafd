"""Long bodies are read in threads, at every frontend."""

import asyncio
import json
import threading
import weakref
from functools import partial
from pkgutil import resolve_name
from typing import Any

import grpc
import numpy as np
import pytest
from tests.frontends.grpc.kit import INFER, refuses, serving
from tests.frontends.http.fast.kit import ArenaExecutor, always, post, settled, site, statuses
from tests.frontends.http.models import Words
from tests.frontends.http.servers import SERVERS, running
from tests.frontends.websocket_kit import Sum
from tests.frontends.websocket_kit import serving as serving_sockets
from tests.protocols.kserve.models import Vector
from tests.rings import subcases
from tests.waiting import until

from weir.catalog.registry import Registry
from weir.errors import InvalidRequest, Overloaded, TooLarge
from weir.model import Model, Tensor
from weir.protocols import HttpSettings, entries, offloading
from weir.protocols.account import CLAIM, Account
from weir.protocols.offloading import LONG_BODY, LONG_RESPONSE, HeadMemo, off_loop, parsed, work_later
from weir.serving.service import Service
from weir.wire import kserve_grpc, tensors
from weir.wire.inference import InferenceRequest, InferenceResponse, TensorValue
from weir.wire.kserve_grpc import ModelInferRequest, bytes_to_read, bytes_to_write, message_bytes, write_request
from weir.wire.values import json_bytes
from weir.wire.websocket import ErrorMessage, read_response


def thread() -> str:
    return threading.current_thread().name


async def test_where_a_body_is_read_depends_on_its_length() -> None:
    assert await off_loop(LONG_BODY, thread) == thread()
    assert await off_loop(LONG_BODY + 1, thread) == "weir-read-long_0"
    assert await off_loop(1 << 20, thread) == "weir-read-long_0"
    assert await off_loop((1 << 20) + 1, thread) == "weir-read-large_0"
    assert await off_loop(LONG_RESPONSE, thread, writes=True) == thread()
    assert await off_loop(LONG_RESPONSE + 1, thread, writes=True) == "weir-write_0"


async def test_large_bodies_do_not_delay_long_ones() -> None:
    go_on = threading.Event()
    large = [asyncio.ensure_future(off_loop(16 << 20, go_on.wait)) for _ in range(20)]
    await asyncio.sleep(0)
    assert await off_loop(1 << 20, lambda: "read") == "read"
    assert not any(each.done() for each in large)
    go_on.set()
    assert await asyncio.gather(*large) == [True] * 20


@subcases(
    ("offered", "kept", "limits"),
    [
        ([b"a", b"b", b"a"], [b"a"], {}),
        ([b"a", b"a", b"b", b"b", b"c", b"c"], [b"b", b"c"], {"max_entries": 2}),
        ([2 * (b"%d" % number) * 150 for number in range(9) for _ in "ab"], [b"%d" % number * 300 for number in (6, 7, 8)], {"max_bytes": 1000}),
        ([b"a" * 5000] * 2, [], {}),  # it is not worth it
        ([b"a", b"b", b"c", b"a"], [], {"max_seen": 2}),
    ],
)  # fmt: skip
def test_heads_are_remembered_from_the_second_on_within_limits(
    offered: list[bytes], kept: list[bytes], limits: Any
) -> None:
    memo = HeadMemo[int](**limits)
    for _ in range(2):  # the second time, all has been forgotten
        for head in offered:
            memo.offer(head, 1)
        assert ([head for head in dict.fromkeys(offered) if memo.find(head)], len(memo)) == (kept, len(kept))
        memo.clear()
        assert not any(map(memo.find, offered))


async def test_errors_come_back() -> None:
    def read() -> None:
        raise InvalidRequest("no")

    def exhaust() -> None:
        raise MemoryError

    with pytest.raises(InvalidRequest, match="no"):
        await off_loop(1 << 20, read)
    for writes, what in ((False, "read a body"), (True, "write a response")):
        with pytest.raises(Overloaded, match=f"not enough memory available to {what} of 1048576 bytes"):
            await off_loop(1 << 20, exhaust, writes=writes)
    for work, end in ((read, InvalidRequest), (lambda: 3, int)):
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        work_later(1 << 20, work, found.set_result, account=Account(HttpSettings()))
        assert type(await found) is end


class Work:
    """What is to be worked on."""

    def __call__(self) -> None:
        pytest.fail("nobody waits for it")


async def test_what_nobody_waits_for_is_let_go_of_before_its_turn() -> None:
    """One that sends a large body and leaves, again and again, would fill the memory with bodies that wait for the thread."""
    go_on = threading.Event()
    first = asyncio.ensure_future(off_loop(1 << 20, go_on.wait))
    await asyncio.sleep(0)
    job = Work()
    gone = weakref.ref(job)
    awaited = asyncio.ensure_future(off_loop(1 << 20, job))
    await asyncio.sleep(0)
    del job
    awaited.cancel()
    with pytest.raises(asyncio.CancelledError):
        await awaited
    assert gone() is None
    job = Work()
    gone = weakref.ref(job)
    cancel = work_later(1 << 20, job, lambda found: pytest.fail("it was cancelled"), account=Account(HttpSettings()))
    del job
    assert cancel()
    assert gone() is None
    ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    begun = threading.Event()
    cancel = work_later(1 << 20, begun.set, ended.set_result, account=Account(HttpSettings()))
    go_on.set()
    assert await first
    await asyncio.to_thread(begun.wait)
    assert not cancel()
    assert await ended is None


def threads_of(monkeypatch: pytest.MonkeyPatch, *places: str) -> list[str]:
    """Return the names of the threads in which the functions that are looked up in `places` are called from now on."""
    names: list[str] = []

    def noted(function: Any, *args: Any, **options: Any) -> Any:
        names.append(thread())
        return function(*args, **options)

    for place in places:
        monkeypatch.setattr(place, partial(noted, resolve_name(place)))
    return names


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the threads in which elements of tensors were written."""
    places = "wire.kserve_json.write_json", "protocols.entries.to_text", "frontends.grpc.inference.write_response"
    return threads_of(monkeypatch, *[f"weir.{place}" for place in places])


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the threads in which elements of tensors were read."""
    places = "wire.kserve_json.read_elements", "wire.kserve_grpc.read_typed", "protocols.entries.to_arrays"
    return threads_of(monkeypatch, *[f"weir.{place}" for place in places])


@pytest.mark.parametrize("kind", SERVERS)
def test_http(kind: str, readers: list[str], writers: list[str]) -> None:
    service = Service(Vector, executor="inline", max_queue_size=2 * MANY, max_batch_size=2 * MANY)
    with running(kind, Registry([service]), HttpSettings(port=0)) as server:

        def check(threads: list[str], is_long: bool) -> None:
            assert threads and all(name.startswith("weir-") == is_long for name in threads)
            threads.clear()

        for count in (MANY, 3):
            numbers = [float(place) for place in range(count)]
            twice = [2 * number for number in numbers]
            given = {"name": "x", "datatype": "FP32", "shape": [1, count]}
            size = {"parameters": {"binary_data_size": 4 * count}}
            header = json.dumps({"inputs": [given | size]}).encode()
            headers = {"Inference-Header-Content-Length": str(len(header))}
            for _ in range(3):  # a header that came before is not read again
                content = header + np.array(numbers, "<f4").tobytes()
                answer = server.client.post("/v2/models/vector/infer", content=content, headers=headers)
                assert [each["data"] for each in answer.json()["outputs"]] == [[sum(numbers)], twice]
            assert server.client.post("/v2/models/vector/generate", json={"x": numbers}).json()["twice"] == twice
            assert server.client.post("/infer/vector", json={"x": [numbers]}).json()["twice"] == [twice]
            assert len(writers) == 3 * 2 + 2 + 1
            check(writers, count == MANY)
        bodies: list[list[Any]] = [NESTED, [[1.0]], [*NESTED[:-1], ["a"]]]
        for data in bodies:
            readers.clear()
            given = {"inputs": [tensor(data, [len(data), 1])], "outputs": [{"name": "sum"}]}
            answer = server.client.post("/v2/models/vector/infer", json=given)
            if data[-1] == ["a"]:
                assert answer.status_code == 400 and 'has the element \\"a\\"' in answer.text
            else:
                assert answer.json()["outputs"][0]["data"] == [data[0][0]] * len(data)
            check(readers, len(data) > 1)
        answer = server.client.post("/infer/vector/batch", json=[{"x": [[float(place)]]} for place in range(1000)])
        assert [each["output"]["sum"] for each in answer.json()] == [[float(place)] for place in range(1000)]
        check(readers, True)


async def test_a_long_response_over_websocket_holds_back_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    writing, go_on, plain = threading.Event(), threading.Event(), tensors.write_json

    def held(*arguments: Any) -> Any:
        if thread().startswith("weir-write"):
            writing.set()
            assert go_on.wait(60)
        return plain(*arguments)

    monkeypatch.setattr("weir.wire.kserve_json.write_json", held)
    service = Service(Vector, executor="inline", max_queue_size=MANY, max_batch_size=MANY)
    async with serving_sockets(service) as server, server.connect(max_size=None) as client:
        for name, count in (("long", MANY), ("short", 2)):
            answer = {"model_name": "vector", "inputs": [tensor([[0.5] * count], [1, count])], "id": name}
            await client.send(json.dumps(answer))
        await asyncio.to_thread(writing.wait)
        assert server.server.account.held_bytes > 12 * MANY
        for name, count in (("short", 2), ("long", MANY)):
            end = read_response(await client.recv())
            assert isinstance(end, InferenceResponse) and (end.id, end.outputs[1].array.size) == (name, count)
            go_on.set()
        await until(lambda: not server.server.account.held_bytes)


def tensor(data: Any, shape: list[int], name: str = "x") -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": shape, "data": data}


COUNT = 20_000
MANY = LONG_RESPONSE // 8  # numbers of an answer that is long
NESTED = [[1.5]] * COUNT


class Longer(Model):
    """Answers with as many numbers, and as many texts, as it is asked for; `more` changes nothing."""

    inputs = (Tensor("count", "INT32", (-1, 1)), Tensor("more", "FP32", (-1, -1)))
    outputs = (Tensor("numbers", "INT32", (-1, -1)), Tensor("texts", "BYTES", (-1, -1)))

    def predict(self, batch: Any) -> Any:
        count = int(batch["count"].max())
        return {"numbers": np.full((1, count), 3, np.int32), "texts": np.full((1, count), b"3", object)}


def make_longer_request(count: int) -> bytes:
    counts, more = np.array([[count]], np.int32), np.zeros((1, 1), np.float32)
    tensors = [TensorValue("count", "INT32", counts), TensorValue("more", "FP32", more)]
    return write_request(InferenceRequest("longer", tensors))


def typed(count: int, given: int, shape: int | None = None, id: str = "") -> bytes:
    """Ask for `count` numbers with `given` numbers of which `shape` says something else."""
    request = ModelInferRequest(model_name="longer", id=id)
    request.inputs.add(name="count", datatype="INT32", shape=[1, 1]).contents.int_contents.append(count)
    more = request.inputs.add(name="more", datatype="FP32", shape=[1, given if shape is None else shape])
    more.contents.fp32_contents.extend([0.5] * given)
    body: bytes = request.SerializeToString()
    return body


async def test_grpc(readers: list[str], writers: list[str]) -> None:
    async with serving(Longer) as rig:
        account = rig.context.account
        for count in (1, 1, 1, COUNT, COUNT):  # of a known form, from the third on
            numbers, texts = kserve_grpc.read_response(await rig.raw(INFER, make_longer_request(count))).outputs
            assert (numbers.array == 3).all() and (texts.array == b"3").all() and texts.array.shape == (1, count)
        assert [name.startswith("weir-write") for name in writers] == [False] * 3 + [True] * 2
        for count, given in ((COUNT, 1), (1, COUNT)):
            answer = kserve_grpc.ModelInferResponse.FromString(await rig.raw(INFER, typed(count, given)))
            assert list(answer.outputs[0].contents.int_contents) == [3] * count
        wrong = rig.raw(INFER, typed(1, COUNT, shape=3))
        await refuses(wrong, grpc.StatusCode.INVALID_ARGUMENT, r"its shape \[1, 3\] takes 3")
        stream = rig.stream()
        for count, shape, name in ((COUNT, COUNT, "fine"), (1, 3, "wrong")):
            await stream.write(typed(count, COUNT, shape, name))
        await stream.done_writing()
        ends = [kserve_grpc.ModelStreamInferResponse.FromString(body) async for body in stream]
        assert {end.infer_response.id: bool(end.error_message) for end in ends} == {"fine": False, "wrong": True}
        account.take(account.max_bytes - 100_000)  # too little room for what is to be written
        late = rig.raw(INFER, make_longer_request(COUNT))
        await refuses(late, grpc.StatusCode.RESOURCE_EXHAUSTED, "max_waiting_bytes")
    assert [name.startswith("weir-write") for name in writers[5:]] == [True, False, True]
    assert [name.startswith("weir-read") for name in readers] == [False] * 2 + [True] * 8


def test_raw_numbers_of_an_answer_are_only_copied() -> None:
    numbers = TensorValue("numbers", "FP32", np.zeros(1 << 18, np.float32))
    texts = TensorValue("texts", "BYTES", np.full(1 << 10, b"text", object))
    there = TensorValue("there", "BYTES", texts.array, {"shared_memory_region": "r"})
    response = InferenceResponse("m", [numbers, texts, there])
    assert bytes_to_write(response) == (1 << 16) + 48 * (1 << 10)
    assert bytes_to_write(response, typed=True) == (1 << 22) + 48 * (1 << 10)
    assert 0.99 < message_bytes(response) / len(kserve_grpc.write_response(response)) < 1.05


def test_raw_tensors_of_grpc_are_not_long() -> None:
    raw = ModelInferRequest(raw_input_contents=[bytes(1 << 20)])
    raw.inputs.add(name="x", datatype="FP32", shape=[1, 1 << 18])
    assert bytes_to_read(raw.SerializeToString()) < 100
    raw.inputs[0].datatype = "BYTES"
    assert bytes_to_read(raw.SerializeToString()) > 1 << 20
    many = ModelInferRequest(raw_input_contents=[b""] * 20_000).SerializeToString()
    assert bytes_to_read(many) == len(many)
    assert bytes_to_read(b"\xff" * 10_000) == 10_000


async def test_websockets(readers: list[str]) -> None:
    async with serving_sockets(Service(Sum, executor="thread")) as server, server.connect(max_size=None) as client:
        for name, data in (("fine", [[0.5] * COUNT]), ("wrong", [[0.5] * (COUNT - 1) + ["a"]])):
            answer = {"model_name": "sum", "inputs": [tensor(data, [1, COUNT])]}
            await client.send(json.dumps({**answer, "id": name}))
        ends = [read_response(await client.recv()) for _ in range(2)]
        fine = next(end for end in ends if isinstance(end, InferenceResponse))
        wrong = next(end for end in ends if isinstance(end, ErrorMessage))
        assert (fine.id, fine.outputs[0].array.tolist()) == ("fine", [COUNT / 2])
        assert (wrong.id, wrong.status) == ("wrong", 400)
    assert sorted(readers) == sorted([thread(), *["weir-read-long_0"] * 2])  # the answer was read here


async def test_who_leaves_while_the_body_is_read_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on, plain = threading.Event(), threading.Event(), entries.item_entry

    def held(*arguments: Any) -> Any:
        reading.set()
        assert go_on.wait(60)
        return plain(*arguments)

    monkeypatch.setattr("weir.frontends.http.fast.inference.item_entry", held)
    executor = ArenaExecutor()
    async with site(executor, model=Words) as here:
        transport = here.connect()
        transport.receive(post(b'"' + b"x" * LONG_BODY + b'"'))
        await asyncio.to_thread(reading.wait)
        transport.abort()
        await settled()
        go_on.set()
        await off_loop(LONG_BODY + 1, thread)  # behind it in the same thread
        await settled()
        assert not here.observer.dispatches and not transport.sent
        other = here.connect()
        other.receive(post(b'"a b"'))
        await settled()
        executor.respond_next(always(b"9"))
        await settled()
        assert statuses(other.sent) == [200]


def test_a_forked_process_has_threads_of_its_own() -> None:
    before = dict(offloading._threads)
    try:
        offloading._forget()
        assert all(offloading._threads[name] is not threads for name, threads in before.items())
        asyncio.run(off_loop(1 << 20, thread))
    finally:
        for threads in offloading._threads.values():
            threads.shutdown()
        offloading._threads.update(before)


async def test_a_refused_body_is_freed_in_the_thread() -> None:
    """The traceback of an error holds the frames that raised it, and they hold what was decoded."""

    class Tree:
        """What a body was decoded to."""

    freed: list[str] = []

    def read() -> None:
        tree = Tree()
        weakref.finalize(tree, lambda: freed.append(thread()))
        try:
            raise ValueError("inner")
        except ValueError:
            raise InvalidRequest("no") from None

    with pytest.raises(InvalidRequest):
        await off_loop(1 << 20, read)
    assert freed == ["weir-read-long_0"]


async def test_what_a_body_may_become_is_charged_while_it_is_read() -> None:
    body = b"[" + b"[]," * LONG_BODY + b"[]]"
    account = Account(HttpSettings(max_waiting_bytes=100 * len(body)))

    def refused() -> None:
        pytest.fail("it has no room")

    with account.claim() as claim:
        CLAIM.set(claim)
        held = await parsed(body, lambda: account.total_bytes)
        assert held == json_bytes(body) // 4 > 10 * len(body)
        assert account.total_bytes == 0
        assert await parsed(b"[1]", lambda: account.total_bytes) == 0
        with pytest.raises(TooLarge, match=f"a body of {12 * len(body)} bytes and its values take .*max_waiting_bytes"):
            await parsed(body * 12, refused)
        account.take(95 * len(body))
        with pytest.raises(Overloaded, match=f"the values of a body of {len(body)} bytes.*max_waiting_bytes"):
            await parsed(body, refused)
        account.give(95 * len(body))
    assert account.refused == 2


def test_what_threads_read_leaves_less_room_for_others() -> None:
    account = Account(HttpSettings(max_waiting_bytes=1000))
    charged = account.take_values(2000, 10)
    assert account.total_bytes == charged == 500
    with pytest.raises(Overloaded, match="hold 500 bytes, 600 more would exceed 1000"):
        account.take(600)
    with pytest.raises(Overloaded):
        account.take_values(2400, 10)
    account.give_values(charged)
    account.take(600)
    assert account.total_bytes == account.held_bytes == 600
