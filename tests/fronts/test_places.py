"""Large bodies come to places in the models' arenas that the dispatcher lends: nothing is mixed up or lost, and all places come back."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from tests.fronts.kit import MODELS, Caller, Callers, binary, calling, fronts_of, metric, owners, texts_of
from tests.served import Served, until

from weir.fronts.messages import Granted, PlaceFree, WantPlace
from weir.fronts.passing import socket_pair
from weir.fronts.places import LentPlaces, MemoryReceiver
from weir.workers.arena import Arena, create_memory

ROW = 4 * 20_000


def body_of(*numbers: float) -> tuple[bytes, str]:
    """Return body and header of a request for the mean of rows that are full of one number each."""
    return binary(numpy.array(numbers, "<f4").repeat(20_000).reshape(-1, 20_000))


def means(caller: Caller, *numbers: float) -> list[float]:
    body, headers = body_of(*numbers)
    caller.send("/v2/models/mean/infer", body, headers=headers)
    return answer_means(caller)


def begun(caller: Caller, model: str, body: bytes, headers: str) -> bytes:
    """Send all of a request but the last bytes, which are returned."""
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    caller.socket.sendall(head.encode() + body[:-100])
    return body[-100:]


def free_bytes(served: Served) -> float:
    return metric(served, "weir_arena_free_bytes", model="mean")


def answer_means(caller: Caller) -> list[float]:
    """Return the means in the next response."""
    found = caller.answer()
    assert found[0] == 200, found
    data: list[float] = json.loads(found[2])["outputs"][0]["data"]
    return data


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(f"{MODELS}:Mean", "--fronts", 2) as running:
        yield running.until_ready()


def test_all_places_come_back_also_those_of_callers_that_leave(served: Served) -> None:
    before = free_bytes(served)
    for front in fronts_of(served):
        with calling(served, front) as caller:
            assert means(caller, 1.0, 2.0) == [1.0, 2.0]
            begun(caller, "mean", *body_of(1.0))
            until(lambda: free_bytes(served) < before)
    until(lambda: free_bytes(served) == before)


def test_the_places_of_a_front_that_is_killed_come_back(served: Served) -> None:
    before = free_bytes(served)
    first, second = fronts_of(served)
    with calling(served, first) as lost, calling(served, second) as kept:
        begun(lost, "mean", *body_of(1.0))
        rest = begun(kept, "mean", *body_of(5.0))
        until(lambda: free_bytes(served) <= before - 2 * ROW)
        first.kill()
        assert lost.answer()[0] == 0
        kept.socket.sendall(rest)
        assert answer_means(kept) == [5.0]
    until(lambda: len(fronts_of(served)) == 2)
    until(lambda: free_bytes(served) == before)


def test_bodies_are_kept_apart_while_fronts_are_killed(served: Served) -> None:
    def has_its_means(caller: Caller, number: int) -> bool | None:
        body, headers = body_of(number, number + 0.5)
        status, answered = caller.ask("/v2/models/mean/infer", body, headers)
        return json.loads(answered)["outputs"][0]["data"] == [number, number + 0.5] if status == 200 else None

    before, descriptors = free_bytes(served), psutil.Process(served.process.pid).num_fds()
    with Callers(served, 4, has_its_means, on_one=20) as callers:
        for _ in range(3):
            callers.lose(fronts_of(served)[0], 20)
    assert callers.wrong == [] and all(callers.answered)
    until(lambda: free_bytes(served) == before)
    # The connection that has just asked for the metrics may have counted.
    until(lambda: psutil.Process(served.process.pid).num_fds() <= descriptors)


def test_bodies_that_hardly_arrive_leave_others_their_room() -> None:
    """One that the arena never holds is refused."""
    with Served(f"{MODELS}:Mean", "--fronts", 2, "--arena-bytes", 4 * 65536) as served, ExitStack() as stack:
        served.until_ready()
        first, second = fronts_of(served)
        slow = [stack.enter_context(calling(served, front)) for front in (first, second) * 5]  # there is room for two
        rests = [begun(caller, "mean", *body_of(7.0 + index)) for index, caller in enumerate(slow)]
        with calling(served, second) as other:
            assert means(other, 3.0) == [3.0]
            assert owners(served, other) == [second.pid]
            body, headers = body_of(*range(4))
            assert other.call("/v2/models/mean/infer", body, headers=headers)[0] == 413
        for index, (caller, rest) in enumerate(zip(slow, rests, strict=True)):
            caller.socket.sendall(rest)
            assert answer_means(caller) == [7.0 + index]


def test_a_model_without_an_arena_still_gets_large_bodies() -> None:
    in_threads = Served(f"{MODELS}:Mean", "--fronts", 2, "--executor", "thread")
    with in_threads as served, Caller(served.until_ready().url) as caller:
        assert [means(caller, 1.0), means(caller, 2.0)] == [[1.0], [2.0]]


def test_a_reload_while_long_bodies_arrive_is_answered_by_the_new_model(tmp_path: Path) -> None:
    """A front has answered others itself before."""
    code = MODELS.read_text()
    file = tmp_path / "model.py"
    file.write_text(code)
    models = (f"{file}:Mean", f"{file}:Texts")
    with Served(*models, "--fronts", 2, env={"PYTHONDONTWRITEBYTECODE": "1"}) as served, ExitStack() as stack:
        front, _ = fronts_of(served.until_ready())
        numbers, texts = (stack.enter_context(calling(served, front)) for _ in range(2))
        for letter in (b"x", b"y"):
            body, headers = texts_of(letter * 100_000, b"", letter * 3)
            status, answered = texts.call("/v2/models/texts/infer", body, headers=headers)
            assert status == 200 and letter * 200_000 in answered and letter * 6 in answered
        assert means(numbers, 1.0) == [1.0]
        assert owners(served, texts) == owners(served, numbers) == [front.pid]
        rests = begun(numbers, "mean", *body_of(2.0)), begun(texts, "texts", *texts_of(b"x" * 100_000))
        file.write_text(code.replace("mean(axis=1)}", "mean(axis=1) + 100}").replace('+ batch["a"]', '+ b"new"'))
        with Caller(served.url) as control:
            assert all(control.call(f"/v2/repository/models/{each}/load")[0] == 200 for each in ("mean", "texts"))
        for caller, rest in zip((numbers, texts), rests, strict=True):
            caller.socket.sendall(rest)
        assert answer_means(numbers) == [102.0]
        assert b"x" * 100_000 + b"new" in texts.answer()[2]
        assert means(numbers, 3.0) == [103.0]


def test_a_place_that_is_used_comes_back_when_its_model_has_gone() -> None:
    """Its arena is not mapped any more then."""
    sent: list[Any] = []
    arena = Arena(create_memory("test", 1 << 20), 1 << 20)
    dispatcher, front = socket_pair()
    with dispatcher, front:
        front.setblocking(False)
        socket.send_fds(dispatcher, [struct.pack("<qq", 1, arena.size_bytes)], [arena.fd])
        places = LentPlaces(1, 1, sent.append, MemoryReceiver(front))
        places.ask(1000, lambda has_place: None)
        places.granted(Granted(1, 64 << 10, 0))
        place = places.reserve(1000)
        assert place is not None
        places.close()
        place.release()
    arena.close()
    assert sent == [WantPlace(1, 64 << 10), PlaceFree(1, 0)]
