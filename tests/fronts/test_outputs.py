"""Large outputs are read where workers have written them: whole, apart, and for no longer than somebody needs them."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from tests.fronts.kit import ENCRYPTED, MODELS, Caller, Callers, binary, calling, fronts_of, workers_of
from tests.fronts.models import Large, Rows, letters
from tests.fronts.test_remote import submit
from tests.served import Served
from tests.waiting import turns, until

from weir import Service, WeirError
from weir.batching.request_state import RequestBase
from weir.catalog.registry import Registry
from weir.client import GrpcClient
from weir.fronts.dispatcher import Catalogue, ConnectedFront, FrontsShared
from weir.fronts.messages import Link, MemoryGone, PlacedOutput, reader_of_dispatcher
from weir.fronts.passing import socket_pair
from weir.fronts.places import MemoryReceiver, OutputReader
from weir.fronts.remote import Requests
from weir.messages import JSON, Dispatch, Form
from weir.protocols import HttpSettings
from weir.protocols.account import Account

RESULTS = "memfd:weir-results-"


# Without processes of fronts: both ends of one link.


class Asked(RequestBase):
    """A request in a front, and its end."""

    __slots__ = ("end", "number")

    def __init__(self, payload: Any) -> None:
        super().__init__(Form(60.0, content_type=JSON, accept=JSON), payload, time.monotonic())
        self.end: Any = None

    def finish(self, output: Any, dispatch: Dispatch) -> None:
        self.end = output

    def fail(self, error: WeirError) -> None:
        self.end = error


class Pair:
    """A dispatcher's side of a front, and what the front has of it."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        ours, theirs = socket.socketpair()
        self.sockets = socket_pair()
        catalogue = Catalogue(Registry([service]))
        catalogue.table()
        self.ended: list[str] = []
        shared = FrontsShared(catalogue, Account(HttpSettings()), [], None, time.monotonic, print)
        self.side = ConnectedFront(ours, self.sockets[0], shared, print, self.ended.append)
        self.service = service
        self.came: list[Any] = []
        self.link: Link[Any] = Link(theirs, loop, reader_of_dispatcher(), self._received, print)
        self.reader = OutputReader(MemoryReceiver(self.sockets[1]), self.link.put, loop)
        self.requests = Requests(self.link, self.reader)
        self.link.open()

    def _received(self, messages: list[Any]) -> None:
        self.came += messages
        for each in messages:
            if isinstance(each, PlacedOutput):
                self.requests.placed(each)
            elif isinstance(each, MemoryGone):
                self.reader.forget(each)
            elif hasattr(each, "numbers"):
                self.requests.answered(each)
            else:
                self.requests.ended(each)

    async def ask(self, payload: Any) -> Any:
        """Send a request and return its end."""
        request = Asked(payload)
        submit(self.requests, request)
        await until(lambda: request.end is not None)
        return request.end

    @property
    def held_bytes(self) -> int:
        """How much of the workers' arenas is not free."""
        return int(self.service.executor.gauges()["results_held_bytes"])

    def close(self) -> None:
        self.side.close()
        self.link.close()
        self.sockets[1].close()


@asynccontextmanager
async def paired(model: Any = Large, **settings: Any) -> AsyncIterator[Pair]:
    async with Service(model, **settings) as service:
        with closing(Pair(service, asyncio.get_running_loop())) as pair:
            yield pair


async def test_an_output_is_read_in_its_place_and_then_given_back() -> None:
    async with paired() as pair:
        for number in range(3):
            block = await pair.ask(b"%d" % number)
            assert json.loads(bytes(block.view)) == letters(number)
            assert pair.held_bytes == len(block.view)
            block.retain()
            block.release()
            block.release()
            await until(lambda: pair.held_bytes == 0)
        assert [type(each) for each in pair.came] == [PlacedOutput] * 3


async def test_arrays_are_views_of_the_place_and_give_it_back_with_the_last_one() -> None:
    async with paired(Rows) as pair:
        arrays = await pair.ask({"a": numpy.array([[7.0]], "f4")})
        row = arrays["row"]
        assert (row == 7.0).all() and row.shape == (1, 100_000) and arrays["text"].tolist() == [[b"7"]]
        assert not row.flags.writeable and pair.held_bytes > row.nbytes
        del arrays
        await turns(100)
        assert pair.held_bytes > row.nbytes
        del row
        await until(lambda: pair.held_bytes == 0)


async def test_an_output_whose_caller_or_whose_front_has_left_is_given_back() -> None:
    async with paired() as pair:
        request = Asked(b"1")
        submit(pair.requests, request)
        pair.requests.open.clear()  # as if it left while the response is on its way
        await until(lambda: bool(pair.came) and pair.held_bytes == 0)
        assert request.end is None
        block = await pair.ask(b"1")
        assert pair.held_bytes == len(block.view)
        pair.side.close()
        assert pair.held_bytes == 0


async def test_outputs_that_a_front_has_not_read_leave_others_their_room() -> None:
    async with paired(arena_bytes=4 << 20, max_batch_size=1) as pair:
        first, second = [await pair.ask(b"%d" % number) for number in range(2)]
        assert pair.held_bytes < (4 << 20) // 4 and type(second) is bytes  # a copy
        assert json.loads(second) == letters(1)
        first.release()
        await until(lambda: pair.held_bytes == 0)
        third = await pair.ask(b"2")
        assert type(third) is not bytes and json.loads(bytes(third.view)) == letters(2)
        third.release()


async def test_a_worker_that_ends_takes_no_output_with_it() -> None:
    async with paired() as pair:
        block = await pair.ask(b"1")
        os.kill(pair.service.executor.states()[0].pid or 0, signal.SIGKILL)
        await until(lambda: pair.service.executor.gauges()["restarts"] == 1)
        pair.side.sweep()
        await until(lambda: isinstance(pair.came[-1], MemoryGone))
        assert json.loads(bytes(block.view)) == letters(1)
        block.release()
        again = await pair.ask(b"2")
        assert json.loads(bytes(again.view)) == letters(2)
        assert pair.came[-1].memory not in {each.memory for each in pair.came[:-1]}
        again.release()


async def test_a_front_that_cannot_map_an_arena_gets_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    async with paired() as pair:
        recv_fds = socket.recv_fds

        def without_descriptors(*arguments: Any) -> Any:
            data, descriptors, *rest = recv_fds(*arguments)
            for each in descriptors:
                os.close(each)
            return data, [], *rest

        monkeypatch.setattr(socket, "recv_fds", without_descriptors)
        for number in range(2):
            assert json.loads(await pair.ask(b"%d" % number)) == letters(number)
        assert pair.held_bytes == 0 and not pair.ended


# With real fronts.


@pytest.fixture(scope="module", params=["plain", "TLS"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    more = () if request.param == "plain" else ENCRYPTED
    with Served(f"{MODELS}:Large", f"{MODELS}:Rows", "--fronts", 2, "--workers", 2, *more) as running:
        yield running.until_ready()


def arenas_of(front: psutil.Process) -> set[str]:
    """Return the arenas of results that a front has mapped."""
    lines = Path(f"/proc/{front.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if RESULTS in line}


def is_large(caller: Caller, number: int) -> bool | None:
    status, body = caller.ask("/infer/large", b"%d" % number)
    return json.loads(body) == letters(number) if status == 200 else None


def row_of(caller: Caller, number: float) -> bytes:
    """Return the rows that the server answers for one number, in binary."""
    asked = binary(numpy.array([[number]], "<f4"), outputs=[{"name": "row", "parameters": {"binary_data": True}}])
    return caller.ask("/v2/models/rows/infer", *asked)[1][-400_000:]


def test_a_front_maps_the_arena_and_answers_what_one_front_would(served: Served) -> None:
    for front in fronts_of(served):
        with calling(served, front) as caller:
            assert is_large(caller, 3)
            assert arenas_of(front)
            for number in (1.5, 2.5):
                assert row_of(caller, number) == numpy.full(100_000, number, "<f4").tobytes()


def test_outputs_are_kept_apart_while_fronts_and_workers_are_killed(served: Served) -> None:
    with Callers(served, 4, is_large, on_one=20) as callers:
        for kill_front in (True, False, True, False):
            callers.lose((fronts_of if kill_front else workers_of)(served)[0], 40)
    assert callers.wrong == [] and all(callers.answered)


def test_a_client_that_reads_late_gets_its_own_output() -> None:
    with Served(f"{MODELS}:Large", "--fronts", 2, "--arena-bytes", 4 << 20) as served, ExitStack() as stack:
        served.until_ready()
        front, _ = fronts_of(served)
        late = [stack.enter_context(calling(served, front)) for _ in range(4)]
        for number, caller in enumerate(late):
            caller.send("/infer/large", b"%d" % number)
        other = stack.enter_context(calling(served, front))
        for number in range(10, 30):
            assert is_large(other, number)
        for number, caller in enumerate(late):
            assert json.loads(caller.answer()[2]) == letters(number)


def test_grpc_calls_get_large_tensors() -> None:
    with Served(f"{MODELS}:Rows", "--fronts", 2, "--grpc-port", 0) as served:
        with GrpcClient(served.until_grpc().until_ready().grpc) as client:
            for _ in range(3):
                found = client.infer("rows", {"a": numpy.array([[4.0]], "<f4")})
                assert (found["row"] == 4.0).all() and found["text"].tolist() == [[b"4"]]
        assert any(arenas_of(front) for front in fronts_of(served))
