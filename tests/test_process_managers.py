"""Weir under a process manager: supervisord starts it, and starts it anew when it was killed; the image's commands work."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tests.served import CLEAN, MODELS, still_running, weir_here

from weir.bench.vectors import reserve_ports

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = """
[supervisord]
nodaemon=true
logfile={folder}/supervisord.log
pidfile={folder}/supervisord.pid

[unix_http_server]
file={folder}/supervisor.sock

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl=unix://{folder}/supervisor.sock

[program:weir]
command={python} -m weir serve {models}:Square --port {port}
directory={folder}
startsecs=0
autorestart=unexpected
exitcodes=0,2
stopsignal=TERM
stopwaitsecs=45
"""


class Supervised:
    """A supervisord that looks after one `weir serve`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://localhost:{port}"
        self._file = folder / "supervisord.conf"
        self._file.write_text(CONFIGURATION.format(folder=folder, python=sys.executable, models=MODELS, port=port))
        command = [_found("supervisord"), "-c", str(self._file)]
        self.process = subprocess.Popen(command, env=CLEAN, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def control(self, *words: str) -> str:
        command = [_found("supervisorctl"), "-c", str(self._file), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200).stdout

    def ready(self) -> int:
        """Return the process id of the server, once it is ready."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health/ready").status_code == 200:
                    return int(self.control("pid", "weir"))
            except httpx.TransportError:
                time.sleep(0.05)  # it does not listen yet; nothing else can tell
        raise TimeoutError(self.control("status"))


def _found(program: str) -> str:
    path = shutil.which(program, path=str(Path(sys.executable).parent))
    assert path is not None
    return path


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    with reserve_ports(1) as (port,):
        running = Supervised(tmp_path_factory.mktemp("supervisor"), port)
        try:
            yield running
        finally:
            running.process.terminate()
            running.process.wait(200)


@pytest.fixture
def supervised(supervisor: Supervised) -> Supervised:
    """Return a supervisor whose server was started, whatever the test before it did."""
    supervisor.control("start", "weir")
    return supervisor


def test_supervisord_starts_a_killed_server_anew_and_its_workers_are_gone(supervised: Supervised) -> None:
    first = psutil.Process(supervised.ready())
    workers = first.children(recursive=True)
    first.send_signal(signal.SIGKILL)
    assert not still_running([first, *workers], 20.0)
    assert supervised.ready() != first.pid
    assert httpx.post(f"{supervised.url}/infer/square", json=3).json() == 9


def test_supervisord_stops_a_server_which_drains_and_ends_with_0(supervised: Supervised) -> None:
    supervised.ready()
    assert "weir: stopped" in supervised.control("stop", "weir")
    assert "STOPPED" in supervised.control("status", "weir")
    log = (supervised._file.parent / "supervisord.log").read_text()
    assert re.findall(r"stopped: weir \((.*)\)", log) == ["exit status 0"]


def _instruction(name: str, place: int = -1) -> list[str]:
    """Return the words of such an instruction of the Dockerfile, the last unless another place is said."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    words: list[str] = json.loads(re.findall(rf"^{name} .*?(\[.*\])$", text, re.MULTILINE)[place])
    return words


def test_the_image_of_texts_starts_a_server_of_texts() -> None:
    shown = weir_here(*_instruction("ENTRYPOINT", 0)[1:], *_instruction("CMD", 0), env={"COLUMNS": "300"})
    assert shown.returncode == 0 and "Serve text models until SIGTERM" in shown.stdout
    ports = re.findall(r"^EXPOSE (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert ports == ["8000", "5555 5556"]


def test_the_image_starts_weir_with_flags_that_it_has() -> None:
    shown = weir_here(*_instruction("ENTRYPOINT")[1:], *_instruction("CMD"))
    assert shown.returncode == 0 and "Serve models until SIGTERM" in shown.stdout


def test_the_image_knows_whether_its_server_lives(supervised: Supervised) -> None:
    supervised.ready()
    check = [sys.executable, *_instruction("HEALTHCHECK")[1:]]
    port = {**os.environ, "WEIR_PORT": supervised.url.rpartition(":")[2]}
    assert subprocess.run(check, check=False, env=port).returncode == 0
    supervised.control("stop", "weir")
    assert subprocess.run(check, check=False, env=port, stderr=subprocess.DEVNULL).returncode != 0


def test_the_image_is_given_all_that_its_installation_reads() -> None:
    given = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    text = (ROOT / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE) for word in shlex.split(line)[:-1]}
    assert copied == given
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} == copied
