"""A stream's `timeout` is the longest wait for an answer, whatever the client, and whatever else arrives meanwhile."""

import ctypes
import gc
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from tests.client import kit
from tests.client.models import item
from tests.rings import spread

from weir import errors

REMOTE = [name for name in kit.REMOTE if name != "http-json"]  # which waits as http does
KEEP_ALIVE = 0.05  # seconds, much less than the silence that is allowed
ALLOWED = 0.6
LONG = {"x": numpy.zeros((2_000_000, 2), numpy.float32)}
SILENT = r"no response within 0\.6 s"


@pytest.fixture(scope="module")
def server() -> Iterator[kit.Running]:
    with kit.serving("--stream-keep-alive", KEEP_ALIVE) as running:
        yield running


@contextmanager
def stopped(server: kit.Running) -> Iterator[None]:
    server.served.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.served.signal(signal.SIGCONT)


def until(path: Path) -> dict[str, str]:
    return {"until": str(path)}


def begun(client: Any, folder: Path, *script: Any, answers: int = 1) -> tuple[Iterator[Any], Path]:
    """Return a stream that has given `answers`, and then does as `script` says until a file is there, and that file.

    Another one is begun where a busy machine was silent for as long as it may be.
    """
    for attempt in count():
        never = folder / f"never {attempt}"
        stream = client.stream("script", item([1] * answers + [*script, until(never)]))
        try:
            for _ in range(answers):
                next(stream)
        except errors.DeadlineExceeded:
            never.touch()  # the model would wait for it
            assert attempt < 20
        else:
            break
    return stream, never


@pytest.mark.parametrize(
    ("name", "answers"), spread([*((name, 0) for name in REMOTE), *((name, 1) for name in kit.MAKE)], 8)
)
def test_only_answers_end_a_silence(name: str, answers: int, server: kit.Running, tmp_path: Path) -> None:
    with kit.asking(name, server, timeout=ALLOWED) as client:
        stream, never = begun(client, tmp_path, answers=answers)
        try:
            with pytest.raises(errors.DeadlineExceeded, match=SILENT):
                next(stream)
        finally:
            never.touch()


@pytest.mark.parametrize("name", REMOTE)
def test_the_callers_own_work_is_no_silence(name: str, server: kit.Running, tmp_path: Path) -> None:
    with kit.asking(name, server, timeout=ALLOWED) as client:
        stream, never = begun(client, tmp_path, 2)
        never.touch()
        time.sleep(2 * ALLOWED)  # this stands for work that takes longer than an answer may
        assert len(list(stream)) == 1


@pytest.mark.parametrize("name", REMOTE)
def test_a_server_that_is_stopped_holds_nobody(name: str, server: kit.Running, tmp_path: Path) -> None:
    with kit.asking(name, server, timeout=ALLOWED) as client:
        stream, never = begun(client, tmp_path)
        with stopped(server), pytest.raises(errors.DeadlineExceeded, match=SILENT):
            next(stream)
        never.touch()


@pytest.mark.parametrize("name", REMOTE)
def test_a_server_that_does_not_read_holds_nobody(name: str, server: kit.Running) -> None:
    long = item(["x" * 16_000_000])
    with kit.asking(name, server, timeout=3600.0) as client:  # which no test waits for
        assert client.infer("scale", {"x": LONG["x"][:1]})["y"].shape == (1, 2)
        with stopped(server):
            for expected in (errors.DeadlineExceeded, errors.WeirError):  # then, a client may have to connect again
                with pytest.raises(expected):
                    client.infer("scale", LONG, timeout=ALLOWED)
            with pytest.raises(errors.WeirError):
                next(client.stream("script", long, timeout=ALLOWED))
            client.close()


@pytest.mark.parametrize("name", [name for name in kit.REMOTE if name.startswith("grpc")])
def test_a_call_that_is_left_behind_takes_no_other_with_it(name: str, server: kit.Running, tmp_path: Path) -> None:
    """gRPC has one connection for all calls: those under way keep it, and the next call has another."""
    with kit.asking(name, server, timeout=30.0) as client:
        under_way = client.stream("script", item([1, until(tmp_path / "now"), 2]))
        next(under_way)
        with stopped(server), pytest.raises(errors.DeadlineExceeded):
            client.infer("scale", LONG, timeout=ALLOWED)
        assert client.infer("scale", {"x": LONG["x"][:1]})["y"].shape == (1, 2)
        (tmp_path / "now").touch()
        assert len(list(under_way)) == 1


@pytest.mark.parametrize("name", [name for name in kit.REMOTE if name.startswith("grpc")])
def test_calls_that_nobody_reads_do_not_gather(name: str, server: kit.Running) -> None:
    sizes, libc = list[int](), ctypes.CDLL(None)
    with kit.asking(name, server, timeout=30.0) as client:
        client.server_live()
        with stopped(server):
            for _ in range(26):
                with pytest.raises(errors.WeirError):
                    client.infer("scale", LONG, timeout=0.05)
                gc.collect()  # asyncio's and grpcio's errors are in cycles
                libc.malloc_trim(0)  # or else what is free would count, too
                sizes.append(psutil.Process().memory_info().rss)
    # gRPC frees bodies when it likes, up to ten of them at once; of 24 calls all would have gathered.
    assert sizes[-1] - sizes[1] < 16 * LONG["x"].nbytes
