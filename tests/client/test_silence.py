"""A stream's `timeout` is the longest wait for an answer, whatever the client, and whatever else arrives meanwhile."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from tests.client import kit
from tests.client.models import item

from weir import errors

KEEP_ALIVE = 0.05  # seconds, much less than the silence that is allowed
ALLOWED = 0.6
SILENT = r"no answer within 0\.6 s"


@pytest.fixture(scope="module")
def server() -> Iterator[kit.Running]:
    with kit.serving("--stream-keep-alive", KEEP_ALIVE) as running:
        yield running


def until(path: Path) -> dict[str, str]:
    return {"until": str(path)}


@pytest.mark.parametrize(("name", "answers"), [*((name, 0) for name in kit.REMOTE), *((name, 1) for name in kit.MAKE)])
def test_only_answers_end_a_silence(name: str, answers: int, server: kit.Running, tmp_path: Path) -> None:
    never = tmp_path / "never"
    with kit.asking(name, server, timeout=ALLOWED) as client:
        stream = client.stream("script", item([1] * answers + [until(never)]))
        try:
            for _ in range(answers):
                next(stream)
            with pytest.raises(errors.DeadlineExceeded, match=SILENT):
                next(stream)
        finally:
            never.touch()  # the model would wait for it


@pytest.mark.parametrize("name", kit.REMOTE)
def test_the_callers_own_work_is_no_silence(name: str, server: kit.Running, tmp_path: Path) -> None:
    with kit.asking(name, server, timeout=ALLOWED) as client:
        stream = client.stream("script", item([1, 2, until(tmp_path)]))
        next(stream)
        time.sleep(2 * ALLOWED)  # this stands for work that takes longer than an answer may
        assert len(list(stream)) == 1


@pytest.mark.parametrize("name", kit.REMOTE)
def test_a_server_that_is_stopped_holds_nobody(name: str, server: kit.Running, tmp_path: Path) -> None:
    never = tmp_path / "never"
    with kit.asking(name, server, timeout=ALLOWED) as client:
        stream = client.stream("script", item([1, until(never)]))
        next(stream)
        server.served.signal(signal.SIGSTOP)
        try:
            with pytest.raises(errors.DeadlineExceeded, match=SILENT):
                next(stream)
        finally:
            server.served.signal(signal.SIGCONT)
            never.touch()


# The core of gRPC does not end a call before the message that it is writing has left.
@pytest.mark.parametrize("name", [name for name in kit.REMOTE if not name.startswith("grpc")])
def test_a_server_that_does_not_read_holds_nobody(name: str, server: kit.Running) -> None:
    long = {"x": numpy.zeros((2_000_000, 2), numpy.float32)}
    with kit.asking(name, server, timeout=30.0) as client:
        assert client.infer("scale", {"x": long["x"][:1]})["y"].shape == (1, 2)
        server.served.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            for expected in (errors.DeadlineExceeded, errors.WeirError):  # then, a client may have to connect again
                with pytest.raises(expected):
                    client.infer("scale", long, timeout=ALLOWED)
            client.close()
            assert time.monotonic() - began < 20.0  # much less than the 30 s of the client
        finally:
            server.served.signal(signal.SIGCONT)
