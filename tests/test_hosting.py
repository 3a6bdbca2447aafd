"""A server from a program: one that blocks, and one in a thread."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.catalog.repository.graphs import double as graph
from tests.served import CLEAN
from tests.serving.models import Square

import weir
from weir.client import HttpClient

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def halves(batch: list[Any]) -> list[Any]:
    return [x / 2 for x in batch]


@weir.model(max_batch_size=2)
def thirds(batch: list[Any]) -> list[Any]:
    return [x / 3 for x in batch]


def test_a_class_a_function_and_a_file_are_served_in_a_thread(tmp_path: Path) -> None:
    (tmp_path / "twice.onnx").write_bytes(graph("n", 3))
    cubes = weir.model(lambda batch: [x**3 for x in batch], Input=int)
    with weir.running(
        Square, halves, thirds, cubes, str(tmp_path / "twice.onnx"), executor="thread", max_batch_size=4
    ) as server:
        assert server.address.startswith("http://127.0.0.1:") and server.addresses == [server.address]
        with HttpClient(server.address) as client:
            assert client.infer("square", 3) == 9
            assert (client.infer("halves", 3), client.infer("thirds", 3)) == (1.5, 1)
            assert client.infer("function", 3) == 27
            with pytest.raises(weir.RequestError, match="int"):
                client.infer("function", "3")
            assert client.model_ready("twice")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(server.address)


def test_worker_processes_and_a_unix_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with weir.running(Square, workers=1, uds="weir.sock") as server, HttpClient(server.address) as client:
        assert (server.address, client.infer("square", 4)) == ("unix:weir.sock", 16)


def test_a_server_is_started_once_and_stopped_as_often_as_one_likes() -> None:
    server = weir.running(Square, executor="inline")
    server.stop()  # it has not been started
    server.start()
    with pytest.raises(weir.Conflict, match="already started once"):
        server.start()
    server.stop()
    server.stop()


def test_what_cannot_be_served_is_reported_before_anything_runs() -> None:
    with pytest.raises(weir.SettingsError, match="max_batch_size=0: must be 1 or more"):
        weir.running(Square, max_batch_size=0)
    with pytest.raises(weir.SettingsError, match="did you mean max_batch_size"):
        weir.running(Square, **{"max_batchsize": 2})  # type: ignore[arg-type]  # a mistake on purpose
    with pytest.raises(weir.SettingsError, match="nothing to serve"):
        weir.running()


def test_a_model_that_cannot_be_loaded_fails_the_start() -> None:
    class Broken(Square):
        def load(self) -> None:
            raise ValueError("no weights")

    with pytest.raises(weir.ModelError, match="no weights"):
        weir.running(Broken, executor="thread").start()


def test_variables_of_the_environment_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_UDS", "/nowhere/at/all")
    with weir.running(Square, executor="inline") as server:
        assert server.address.startswith("http://")


def test_serve_says_where_it_cannot_run() -> None:
    errors: list[str] = []

    def elsewhere() -> None:
        try:
            weir.serve(Square)
        except weir.Conflict as error:
            errors.append(error.message)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "in another thread, use weir.running" in errors[0]

    async def beside() -> None:
        weir.serve(Square)

    with pytest.raises(weir.Conflict, match="an event loop is already running in this thread"):
        asyncio.run(beside())


def test_a_script_serves_until_it_is_stopped(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import weir\n\n\nclass Square(weir.Model):\n    examples = [3]\n\n"
        "    def predict(self, batch):\n        return [x * x for x in batch]\n\n\n"
        "if __name__ == '__main__':\n    weir.serve(Square, workers=1, port=0)\n    print('ended')\n"
    )
    command = [sys.executable, "-u", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=CLEAN, cwd=tmp_path) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "curl" in line)
        address = line.split()[-1].removesuffix("/infer/square")
        assert line.startswith("  curl -d 3 ")
        with HttpClient(address) as client:
            assert client.infer("square", 5) == 25
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.read().strip().endswith("ended")
    assert process.returncode == 0
