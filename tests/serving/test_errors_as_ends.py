"""An error ends its request, and is never its answer: in each executor, for one item and for many, in a chain, and in a stream."""

import asyncio
import os
import threading
from collections.abc import Generator
from typing import Any

import pytest
from tests.fakes import RecordingObserver

from weir import Last, Model, ModelError, Service
from weir.catalog.chains import Chain
from weir.messages import EventKind, Events
from weir.wire.frames import FrameParser, encode_events

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def only_in_worker(server: int) -> str:
    """Return a value, but not in the process `server`."""
    if os.getpid() == server:
        raise LookupError("this value is for workers only")
    return "made"


class OfWorkers:
    """Can be unpickled everywhere but in the process `server`."""

    def __init__(self, server: int) -> None:
        self.server = server

    def __reduce__(self) -> tuple[Any, ...]:
        return only_in_worker, (self.server,)


def refusal(text: str) -> ModelError:
    """Return an error, as what a pickled answer is made of."""
    return ModelError(text)


class Disguised:
    """Becomes an error when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refusal, ("in disguise",)


def answer_to(item: Any) -> Any:
    """Return what no server can read."""
    name, server = item
    if name == "lock":
        return threading.Lock()
    return OfWorkers(server) if name == "workers'" else Disguised()


class Unsendable(Model):
    """Answers with values that do not come back to the server."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return [answer_to(item) if isinstance(item, tuple) else item for item in batch]


class EndlesslyUnsendable(Model):
    """Goes on with values that do not come back, until nobody waits for them; then it writes into the named pipe `over`."""

    streaming = True

    def __init__(self, over: str) -> None:
        self.over = over

    def predict(self, batch: list[Any]) -> Generator[dict[int, Any], Any, None]:
        try:
            while True:
                yield {place: threading.Lock() for place in range(len(batch))}
        finally:
            with open(self.over, "w", encoding="utf-8") as over:
                over.write("over")


class LastIsUnsendable(Model):
    streaming = True

    def predict(self, batch: list[Any]) -> Generator[dict[int, Any], Any, None]:
        yield dict.fromkeys(range(len(batch)), "part")
        yield {place: Last(threading.Lock()) for place in range(len(batch))}


NAMES = ["lock", "workers'", "disguised"]


@pytest.mark.parametrize("name", NAMES)
async def test_an_answer_that_does_not_come_back_is_an_error(name: str) -> None:
    watch = RecordingObserver()
    async with Service(Unsendable, observers=[watch], max_batch_size=8) as service:
        with pytest.raises(ModelError):
            await service.infer((name, os.getpid()))
        mixed = await asyncio.gather(
            service.infer(1), service.infer((name, os.getpid())), service.infer(2), return_exceptions=True
        )
        assert [mixed[0], type(mixed[1]).__mro__[-5:], mixed[2]] == [1, ModelError.__mro__[-5:], 2]
        with pytest.raises(ModelError):
            await service.infer_many([1, (name, os.getpid())])
        many = await service.infer_many([1, (name, os.getpid())], return_errors=True)
        assert many[0] == 1 and isinstance(many[1], ModelError)
        assert [error for _, error, _ in watch.responses if error is not None]
        assert len(watch.failures) == 4


async def test_a_chain_does_not_go_on_with_an_error() -> None:
    async with (
        Service(Unsendable, name="first") as first,
        Service(Unsendable, name="second") as second,
        Chain(steps=[first, second]) as chain,
    ):
        with pytest.raises(ModelError, match="first"):
            await chain.infer(("lock", os.getpid()))


async def test_the_error_of_a_part_ends_its_stream_and_the_work_for_it(tmp_path: Any) -> None:
    os.mkfifo(over := tmp_path / "over")
    async with Service(EndlesslyUnsendable, params={"over": str(over)}) as service:
        with pytest.raises(ModelError, match="pickled"):
            [part async for part in service.infer_stream(1)]
        pipe, written = os.open(over, os.O_RDONLY | os.O_NONBLOCK), asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe, written.set)
        async with asyncio.timeout(60):
            await written.wait()
        asyncio.get_running_loop().remove_reader(pipe)
        os.close(pipe)
    async with Service(LastIsUnsendable) as service:
        parts = []
        with pytest.raises(ModelError, match="pickled"):
            async for part in service.infer_stream(1):
                parts.append(part)
        assert parts == ["part"]


def read(frame: bytearray) -> Events:
    (events,) = FrameParser().feed(frame)
    assert isinstance(events, Events)
    return events


@pytest.mark.parametrize("kinds", [None, [EventKind.DONE, EventKind.DONE], [EventKind.PART, EventKind.END]])
def test_events_say_of_an_error_that_it_is_one_whoever_makes_them(kinds: list[int] | None) -> None:
    error, other = ModelError("no"), EventKind.DONE if kinds is None else kinds[1]
    assert Events(1, [error, b"2"], kinds=kinds).kinds == [EventKind.ERROR, other]
    assert read(encode_events(Events(1, [threading.Lock(), b"2"], kinds=kinds))).kinds == [EventKind.ERROR, other]
    assert Events(1, [b"1", b"2"], kinds=kinds).kinds == kinds


def test_a_frame_that_is_too_long_is_an_error_for_each() -> None:
    events = read(encode_events(Events(1, [b"x" * 100, b"y" * 100]), max_frame_bytes=150))
    assert events.kinds == [EventKind.ERROR] * 2 and all(isinstance(output, ModelError) for output in events.outputs)
