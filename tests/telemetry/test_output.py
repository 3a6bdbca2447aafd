"""Whatever becomes of those who read the log, the server answers, says how much is lost, and ends when it is told to."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.rings import spread, subcases
from tests.served import CLEAN, Served, until

from weir.telemetry import TelemetrySettings
from weir.telemetry.logs import get_logger, logging_to
from weir.telemetry.output import LOST, MOST_WAITING, Outlet, OutletHandler, write_all

MODELS = Path(__file__).parent / "noisy_models.py"
NOISY = f"{MODELS}:Noisy"


def lost_lines(url: str) -> float:
    shown = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in shown if line.startswith("weir_log_lines_lost_total{"))


def is_ready(client: httpx.Client, uds: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(uds))
        except OSError:  # there is no socket, or nobody listens on it yet
            return False
    return client.get("/health/ready").status_code == 200


def leave(served: Served) -> None:
    for stream in (served.process.stdout, served.process.stderr):
        assert stream is not None
        stream.close()


def stay(served: Served) -> None:
    """Read nothing more."""


WAYS = [
    (leave, ("--log-format", "json", "--access-log")),
    (stay, ("--log-format", "text")),
    (leave, ("--log-format", "text")),
    (stay, ("--log-file",)),
    (stay, ("--log-format", "json", "--access-log")),
    (leave, ("--log-file",)),
]


@pytest.mark.parametrize(("reader", "flags"), spread(WAYS, 2))
def test_readers_who_leave_or_stop_cost_lines_and_nothing_else(
    tmp_path: Path, reader: Callable[[Served], None], flags: tuple[str, ...]
) -> None:
    log_file = tmp_path / "weir.log"
    words = [*flags, log_file] if flags == ("--log-file",) else flags
    with Served(NOISY, *words) as served:
        served.until_ready()
        reader(served)
        with httpx.Client(base_url=served.url, timeout=60) as client:
            for number in range(60):  # far more than pipes and queues hold
                assert client.post("/infer/noisy", json=number).json() == number
                # A thread writes the file, and what it has not written beyond some bytes is lost.
                until(lambda: words is flags or log_file.stat().st_size > 100_000 * (number + 1))  # noqa: B023 - it is called in this turn
            assert client.get("/health/live").status_code == 200
        until(lambda: lost_lines(served.url) > 0)
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
    if flags == ("--log-file",):
        events = [json.loads(line)["event"] for line in log_file.read_text().splitlines()]
        assert len([event for event in events if event == "x" * 100_000]) == 60 and "stopped" in events


@pytest.mark.parametrize("log_format", spread(["json", "text"]))
def test_a_server_on_a_full_disk_serves(tmp_path: Path, log_format: str) -> None:
    uds = tmp_path / "socket"
    words = [sys.executable, "-m", "weir", "serve", NOISY, "--uds", str(uds), "--log-format", log_format]
    with (
        Path("/dev/full").open("wb") as full,
        subprocess.Popen(words, stdout=full, stderr=full, env=CLEAN) as server,
        client_of(uds, server) as client,
    ):
        assert client.post("/infer/noisy", json=1).json() == 1
        assert "weir_log_lines_lost_total" in client.get("/metrics").text


@pytest.mark.parametrize("closed", spread(["<&- >&- 2>&-", "<&-", ">&-", "2>&-"]))
def test_a_server_without_standard_descriptors_serves(tmp_path: Path, closed: str) -> None:
    uds = tmp_path / "socket"
    words = ["sh", "-c", f'exec "{sys.executable}" -m weir serve "{NOISY}" --uds "{uds}" {closed}']
    null = subprocess.DEVNULL
    with subprocess.Popen(words, env=CLEAN, stdout=null, stderr=null) as server, client_of(uds, server) as client:
        leads = [os.readlink(f"/proc/{server.pid}/fd/{number}").partition(":")[0] for number in range(3)]
        assert leads == ["/dev/null", "pipe", "pipe"]
        for number in range(5):
            assert client.post("/infer/noisy", json=number).json() == number


PROGRAM = """
import os, sys
import weir
from weir.client import HttpClient

with weir.running(sys.argv[1]) as server, HttpClient(server.address) as client:
    print("ready", flush=True)
    sys.stdin.readline()  # until nobody reads any more
    answers = [client.infer("noisy", number) for number in range(5)]
    os._exit(0 if answers == list(range(5)) else 1)
"""


def test_no_print_fails_in_the_workers_of_a_program_that_nobody_reads() -> None:
    words = [sys.executable, "-c", PROGRAM, NOISY]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=CLEAN, stdin=pipe, stdout=pipe, stderr=pipe) as program:
        assert program.stdin is not None and program.stdout is not None and program.stderr is not None
        assert program.stdout.readline() == b"ready\n"
        program.stdout.close()
        program.stderr.close()
        program.stdin.write(b"\n")
        program.stdin.flush()
        assert program.wait(timeout=200) == 0


def test_on_a_terminal_everybody_has_a_terminal_until_it_is_gone(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "weir", "serve", f"{MODELS}:Shown", "--port", "0"]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=CLEAN) as server:
        os.close(theirs)
        shown = b""
        while (found := re.search(rb"curl .*?(http\S+/infer/shown)", shown)) is None:
            shown += os.read(ours, 1 << 16)
        url = found[1].decode()
        assert httpx.post(url, json=1, timeout=30).json() == [True, True]
        while b"printed by the model\r\n" not in shown:
            shown += os.read(ours, 1 << 16)
        os.close(ours)
        for _ in range(3):
            assert httpx.post(url, json=1, timeout=30).json() == [True, True]
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=200) == 0
    assert b"\x1b" in shown and b"loading" in shown


def test_a_wrong_command_without_descriptors_has_its_exit_code() -> None:
    run = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" -m weir serve nothing:Here 2>&-'], env=CLEAN, check=False, timeout=200
    )
    assert run.returncode == 2


@subcases("rename", [True, False])
def test_a_log_file_that_was_renamed_or_removed_is_opened_again(tmp_path: Path, rename: bool) -> None:
    file, old = tmp_path / f"{rename}.log", tmp_path / "weir.log.1"
    with logging_to(TelemetrySettings(log_file=str(file), log_format="json"), stream=None, captures=False):
        get_logger("weir").info("before")
        until(lambda: file.read_text().count("\n") == 1)
        if rename:
            file.rename(old)
        else:
            file.unlink()
        get_logger("weir").info("after")
        until(file.exists)
    for path, event in ((file, "after"), *([(old, "before")] if rename else [])):
        assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == [event]


def test_an_outlet_drops_what_it_cannot_hold_and_goes_on_when_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOST, "stderr", 0)
    begun, go_on, written = threading.Event(), threading.Event(), []

    def write(data: bytes) -> None:
        begun.set()
        assert go_on.wait(60)
        written.append(data)

    outlet = Outlet("stderr", write, "stderr")
    outlet.put(b"first\n")
    assert begun.wait(60)
    outlet.put(bytes(MOST_WAITING - 1) + b"\n")
    outlet.put(b"too\nmany\n")
    assert LOST["stderr"] == 2
    go_on.set()
    assert outlet.close()
    assert b"".join(written) == b"first\n" + bytes(MOST_WAITING - 1) + b"\n"
    outlet.put(b"after the end\n")
    assert LOST["stderr"] == 3


def test_a_line_that_cannot_be_formatted_is_a_line_that_says_so() -> None:
    written: list[bytes] = []
    outlet = Outlet("stderr", written.append, "stderr")
    handler = OutletHandler(outlet, logging.Formatter("%(name)s %(message)s"))
    handler.handle(logging.LogRecord("library", logging.INFO, "its.py", 7, "%d", ("x",), None))
    assert outlet.close()
    assert b"".join(written).startswith(b"library a line of its.py, line 7, cannot be written: TypeError(")


def test_a_descriptor_that_another_program_made_non_blocking_is_waited_for() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    data = os.urandom(300_000)
    writing = threading.Thread(target=write_all, args=(write, data))
    writing.start()
    found = b""
    while len(found) < len(data):
        found += os.read(read, 1 << 20)
    writing.join()
    assert found == data
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_a_callers_text_forges_no_line_and_steers_no_terminal(tmp_path: Path, executor: str) -> None:
    text = "no\n2026-01-01 00:00:00 [error    ] forged [weir] worker=x/0\n2026-01-01 00:00:00 [error] forged\x1b[2J\r\x9b1A"
    log = tmp_path / "weir.log"
    with Served(f"{MODELS}:Forging", "--executor", executor, "--log-file", log) as served:
        served.until_ready()
        assert httpx.post(f"{served.url}/infer/forging", json=text, timeout=30).status_code == 500
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
        assert served.process.stderr is not None
        shown = served.log + served.process.stderr.read()
    assert shown.count("forged") >= 4
    assert not [line for line in shown.split("\n") if line.startswith("2026-01-01 00:00:00")]
    assert not {"\x1b", "\r", "\x9b"} & set(shown)
    assert all(json.loads(line)["level"] != "error" or "forged" not in json.loads(line)["event"]
               for line in log.read_text().splitlines())  # fmt: skip


@contextmanager
def client_of(uds: Path, server: "subprocess.Popen[bytes]") -> Iterator[httpx.Client]:
    """Give a client of the server when it is ready; end it afterwards."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://weir", timeout=60) as client:
        until(lambda: is_ready(client, uds), 60.0)
        yield client
    server.send_signal(signal.SIGTERM)
    assert server.wait(timeout=200) == 0
