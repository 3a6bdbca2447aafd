"""A stream's `timeout` is the longest wait for an answer, whatever the client, and whatever else arrives meanwhile."""

import signal
import time
from collections.abc import Iterator
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

KEEP_ALIVE = 0.05  # seconds, much less than the silence that is allowed
ALLOWED = 0.6
SILENT = r"no response within 0\.6 s"


@pytest.fixture(scope="module")
def server() -> Iterator[kit.Running]:
    with kit.serving("--stream-keep-alive", KEEP_ALIVE) as running:
        yield running


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
    ("name", "answers"), spread([*((name, 0) for name in kit.REMOTE), *((name, 1) for name in kit.MAKE)], 8)
)
def test_only_answers_end_a_silence(name: str, answers: int, server: kit.Running, tmp_path: Path) -> None:
    with kit.asking(name, server, timeout=ALLOWED) as client:
        stream, never = begun(client, tmp_path, answers=answers)
        try:
            with pytest.raises(errors.DeadlineExceeded, match=SILENT):
                next(stream)
        finally:
            never.touch()


@pytest.mark.parametrize("name", kit.REMOTE)
def test_the_callers_own_work_is_no_silence(name: str, server: kit.Running, tmp_path: Path) -> None:
    with kit.asking(name, server, timeout=ALLOWED) as client:
        stream, never = begun(client, tmp_path, 2)
        never.touch()
        time.sleep(2 * ALLOWED)  # this stands for work that takes longer than an answer may
        assert len(list(stream)) == 1


@pytest.mark.parametrize("name", kit.REMOTE)
def test_a_server_that_is_stopped_holds_nobody(name: str, server: kit.Running, tmp_path: Path) -> None:
    with kit.asking(name, server, timeout=ALLOWED) as client:
        stream, never = begun(client, tmp_path)
        server.served.signal(signal.SIGSTOP)
        try:
            with pytest.raises(errors.DeadlineExceeded, match=SILENT):
                next(stream)
        finally:
            server.served.signal(signal.SIGCONT)
            never.touch()


@pytest.mark.parametrize("name", kit.REMOTE)
def test_a_server_that_does_not_read_holds_nobody(name: str, server: kit.Running) -> None:
    long = {"x": numpy.zeros((2_000_000, 2), numpy.float32)}
    with kit.asking(name, server, timeout=3600.0) as client:  # which no test waits for
        assert client.infer("scale", {"x": long["x"][:1]})["y"].shape == (1, 2)
        server.served.signal(signal.SIGSTOP)
        try:
            for expected in (errors.DeadlineExceeded, errors.WeirError):  # then, a client may have to connect again
                with pytest.raises(expected):
                    client.infer("scale", long, timeout=ALLOWED)
            client.close()
        finally:
            server.served.signal(signal.SIGCONT)


@pytest.mark.parametrize("name", kit.REMOTE)
def test_a_stream_to_a_server_that_does_not_read_holds_nobody(name: str, server: kit.Running) -> None:
    long = item(["x" * 16_000_000])
    with kit.asking(name, server, timeout=ALLOWED) as client:
        assert client.server_live()
        server.served.signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises(errors.WeirError):
                    next(client.stream("script", long))
            client.close()
        finally:
            server.served.signal(signal.SIGCONT)


@pytest.mark.parametrize("name", [name for name in kit.REMOTE if name.startswith("grpc")])
def test_a_call_that_is_left_behind_takes_no_other_with_it(name: str, server: kit.Running, tmp_path: Path) -> None:
    """gRPC has one connection for all calls: those under way keep it, and the next call has another."""
    long = {"x": numpy.zeros((2_000_000, 2), numpy.float32)}
    with kit.asking(name, server, timeout=30.0) as client:
        under_way = client.stream("script", item([1, until(tmp_path / "now"), 2]))
        next(under_way)
        server.served.signal(signal.SIGSTOP)
        try:
            with pytest.raises(errors.DeadlineExceeded):
                client.infer("scale", long, timeout=ALLOWED)
        finally:
            server.served.signal(signal.SIGCONT)
        assert client.infer("scale", {"x": long["x"][:1]})["y"].shape == (1, 2)
        (tmp_path / "now").touch()
        assert len(list(under_way)) == 1


@pytest.mark.parametrize("name", [name for name in kit.REMOTE if name.startswith("grpc")])
def test_calls_that_nobody_reads_do_not_gather(name: str, server: kit.Running) -> None:
    long = {"x": numpy.zeros((2_000_000, 2), numpy.float32)}
    own = psutil.Process()
    with kit.asking(name, server, timeout=30.0) as client:
        client.server_live()
        server.served.signal(signal.SIGSTOP)
        try:
            sizes = list[int]()
            for _ in range(26):
                with pytest.raises(errors.WeirError):
                    client.infer("scale", long, timeout=0.05)
                sizes.append(own.memory_info().rss)
            # gRPC frees bodies when it likes, up to ten of them at once; of 24 calls all would have gathered.
            assert sizes[-1] - sizes[1] < 16 * long["x"].nbytes
        finally:
            server.served.signal(signal.SIGCONT)
