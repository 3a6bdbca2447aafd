"""Starts the real command `weir` in a process of its own, for tests."""

import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Self
from unittest import mock

import httpx
import psutil
import pytest
from tests.template import TITLE
from typer.main import get_command

from weir.cli import command_line, main
from weir.commands import COMMANDS

# With `make test-fronts`, servers have two fronts unless their tests say how many.
TEST_FRONTS = bool(os.environ.get("TEST_FRONTS"))
MODELS = Path(__file__).parent / "served_models.py"
KNOWN = {"serve", "check", *COMMANDS}
# With it a program, and all that it starts, has an interpreter of its own, as users' programs have: see template.py.
COLD = {"PYTHONHASHSEED": "1"}
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("WEIR_")}


def in_shell(line: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `line` in a shell, as who pastes it does. Skips the test where it needs curl, and there is none."""
    if "curl " in line and shutil.which("curl") is None:
        pytest.skip("needs curl")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, **options)


def weir(
    *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `weir` to its end, in a process of its own."""
    words = [sys.executable, "-m", "weir", *map(str, arguments)]
    with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        done = subprocess.run(
            words, env={**CLEAN, **(env or {})}, cwd=cwd, stdout=out, stderr=errors, timeout=200, check=False
        )
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, done.returncode, out.read(), errors.read())


def start_weir(
    arguments: Sequence[str], env: dict[str, str], cwd: Path | None = None, stdout: int = PIPE, stderr: int = PIPE
) -> subprocess.Popen[str]:
    """Start `weir`."""
    words = [sys.executable, "-m", "weir", *arguments]
    return subprocess.Popen(words, stdout=stdout, stderr=stderr, text=True, env=env, cwd=cwd)


@cache
def described(command: str) -> Any:
    """Return the command line as one of its commands needs it, or all of them for none: to describe its options takes longer than to read them."""
    return get_command(command_line([command] if command else []))


def weir_here(
    *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `weir` to its end in this process, for what ends before anything is started: to start Python takes longer."""
    command = ["weir", *map(str, arguments)]
    with (
        redirect_stdout(io.StringIO()) as stdout,
        redirect_stderr(io.StringIO()) as stderr,
        mock.patch.dict(os.environ, {**CLEAN, **(env or {})}, clear=True),
        mock.patch.object(sys, "argv", command),
        mock.patch("weir.cli.command_line", lambda words: described(words[0] if words and words[0] in KNOWN else "")),
        mock.patch.object(sys, "path", list(sys.path)),
        chdir(cwd or Path.cwd()),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0  # as Python takes it
    assert isinstance(code, int)
    return subprocess.CompletedProcess(command, code, stdout.getvalue(), stderr.getvalue())


def target(name: str) -> str:
    """Return what serves the model of served_models.py that has that name."""
    return f"{MODELS}:{name}"


def still_running(processes: Iterable[psutil.Process], seconds: float = 60.0) -> list[psutil.Process]:
    """Return those that have not ended within `seconds`. One that has ended may be listed until its parent looks; where that is the
    system's first process, it may look only now and then."""
    alive, end = [], time.monotonic() + seconds
    for process in processes:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(1000.0 * max(0.0, end - time.monotonic())):
            alive.append(process)
        os.close(descriptor)
    return alive


def until(condition: Callable[[], Any], seconds: float = 200.0) -> Any:
    """Return what `condition` returns once it holds, of a server that tells nobody. Asked without a pause, it would take the processor from
    what it waits for."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"it did not come to hold within {seconds} s"
        time.sleep(0.01)
    return found


def buffered_bytes(*sides: str) -> int:
    """Return how many bytes the system takes at most of a connection of TCP where nobody reads, on these sides: "wmem", "rmem", or both."""
    limits = (Path(f"/proc/sys/net/ipv4/tcp_{side}").read_text().split()[2] for side in sides or ("wmem", "rmem"))
    return sum(map(int, limits))


def children_of(pid: int) -> list[psutil.Process]:
    """Return the processes that the process `pid` has started, and those that these have."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for each in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if TITLE not in each.cmdline():
                    found.append(each)
    return found


class Served:
    """A running `weir serve`, or another `command` that serves. After `with`, it and all its children are gone."""

    def __init__(
        self, *arguments: object, env: dict[str, str] | None = None, stderr: int = PIPE, command: str = "serve"
    ) -> None:
        fronts = ["--fronts", "2"] if TEST_FRONTS and "--fronts" not in arguments else []
        self.words = [*command.split(), *map(str, arguments), *fronts, "--port", "0"]
        self.process = start_weir(self.words, {**CLEAN, **(env or {})}, stderr=stderr)
        self.url = ""
        self.table = ""
        self.log = ""
        self.grpc = ""  # its address, once `until_grpc` has returned

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        children = self.children()
        self.process.kill()
        log = self.process.stderr
        rest = "" if log is None or log.closed else log.read()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        alive = still_running(children)
        assert not alive, f"workers outlive the server: {alive}"
        if kind is not None:
            sys.stderr.write(self.log + rest)

    def until_logged(self, pattern: str) -> re.Match[str]:
        """Wait for a log line that matches `pattern`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"it never logged {pattern!r}:\n{self.log}")

    def until_listening(self) -> Self:
        """Wait until it listens; the models may still be loading."""
        self.url = self.until_logged(r"listening.*?address=\S*?(http\S+:\d+)")[1]
        return self

    def until_ready(self) -> Self:
        """Wait for the last line that is printed, when all models are ready; for the log where it is JSON."""
        if "json" in self.words:
            line = self.until_logged('"event": "listening"').string
            self.url = json.loads(line)["address"]
            self.until_logged('"event": "ready"')
            return self
        self.until_printed(r"^Ready at ")
        self.url = re.findall(r"\bcurl .*?(https?://\S+?)/infer/", self.table)[0]
        return self

    def until_grpc(self) -> Self:
        """Wait until it listens for gRPC; to be asked before `until_ready`."""
        self.grpc = self.until_logged(r"listening.*address=\S*?grpc://(\S+:\d+)")[1]
        return self

    def until_printed(self, pattern: str) -> re.Match[str]:
        """Wait for a line on its output that matches `pattern`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.table += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"it was never ready: {self.process.stderr.read() if self.process.stderr else ''}")

    def children(self) -> list[psutil.Process]:
        """Return the processes that it has started."""
        return children_of(self.process.pid)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Return the exit code, when it has ended."""
        return self.process.wait(timeout=200)


@contextmanager
def serving(*arguments: object, env: dict[str, str] | None = None) -> Iterator[tuple[Served, httpx.Client]]:
    """Serve until the block ends, and give a client too."""
    with Served(*arguments, env=env) as served:
        served.until_ready()
        with httpx.Client(base_url=served.url, timeout=60) as client:
            yield served, client
