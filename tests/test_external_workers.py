"""Workers in other languages and from elsewhere, attached to a real server."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from tests.rings import subcases
from tests.served import CLEAN, MODELS, Served, weir_here
from tests.served import serving as served_to_a_client

from weir.bench.vectors import reserve_ports

PERL_WORKER = Path(__file__).parents[1] / "examples" / "worker.pl"


@contextmanager
def program(*command: object) -> Iterator[subprocess.Popen[str]]:
    """A running program, killed at the end."""
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True, env=CLEAN)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def serving(address: str, *worker: object, workers: int = 1) -> Iterator[tuple[Served, list[subprocess.Popen[str]]]]:
    """A server with so many external workers, which wait for it."""
    flags = ("--name", "m", "--worker-socket", address, "--workers", workers)
    with ExitStack() as stack:
        served = stack.enter_context(Served("weir:External", *flags))
        served.until_logged("waits for workers")
        programs = [stack.enter_context(program(*worker, address)) for _ in range(workers)]
        yield served.until_ready(), programs


def ask(client: httpx.Client, body: str) -> tuple[int, object]:
    answer = client.post("/infer/m", content=body, headers={"content-type": "application/json"})
    return answer.status_code, answer.json()


def test_a_worker_in_perl(tmp_path: Path) -> None:
    def squares(client: httpx.Client) -> list[object]:
        return [answer for _, answer in many.map(lambda number: ask(client, str(number)), range(40))]

    with serving(f"unix:{tmp_path}/w.sock", "perl", PERL_WORKER, workers=2) as (served, programs):
        assert os.stat(tmp_path / "w.sock").st_mode & 0o777 == 0o600  # nobody else can attach
        with ThreadPoolExecutor(8) as many, httpx.Client(base_url=served.url, timeout=60) as client:
            assert squares(client) == [n * n for n in range(40)]
            code, refused = ask(client, '"x"')
            assert code == 422
            assert isinstance(refused, dict)
            assert refused["error"]["details"] == "not a number"
            programs[0].kill()
            programs[0].wait()
            assert squares(client) == [n * n for n in range(40)]
            reload = client.post("/v2/repository/models/m/load")
            assert reload.status_code == 400
            assert "worker_socket" in reload.json()["error"]
            assert squares(client) == [n * n for n in range(40)]
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(200) == 0


PICKY = """
import weir

class Picky(weir.Model):
    Input = int

    def predict(self, batch):
        if 13 in batch:
            raise ArithmeticError("no thirteen")
        return [x * x for x in batch]
"""


def test_a_model_of_weir_attaches_and_its_errors_keep_their_types(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(PICKY)
    command = (sys.executable, "-m", "weir", "worker", f"{tmp_path}/picky.py:Picky", "--connect")
    with (
        reserve_ports(1) as (port,),
        serving(f"tcp:127.0.0.1:{port}", *command) as (served, [worker]),
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        assert ask(client, "3") == (200, 9)
        for body, code, kind in (
            ("13", 500, "ModelError"),
            ('"x"', 422, "ValidationFailed"),
            ("{", 400, "InvalidRequest"),
        ):
            got, refused = ask(client, body)
            assert isinstance(refused, dict)
            assert (got, refused["error"]["type"]) == (code, kind)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(200) == 0


def test_a_worker_finds_its_server_again(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/w.sock"
    command = (sys.executable, "-m", "weir", "worker", f"{MODELS}:Square", "--connect")
    with program(*command, address) as worker:
        for _ in range(2):
            with served_to_a_client("weir:External", "--name", "m", "--worker-socket", address) as (_, client):
                assert ask(client, "4") == (200, 16)
        assert worker.poll() is None
        worker.send_signal(signal.SIGHUP)
        _, told = worker.communicate(timeout=200)
        assert "trying again" in told
        assert worker.returncode == 0


@subcases(
    ("arguments", "complaint"),
    [
        (("serve", "weir:External"), "worker_socket=None"),
        (("serve", "weir:External", "--worker-socket", "tcp:0.0.0.0:0"), "--allow-control"),
        (("serve", "weir:External", "--worker-socket", "x"), "must be unix:PATH or tcp:HOST:PORT"),
        (("serve", f"{MODELS}:Square", "--worker-socket", "unix:x"), "executor='process'"),
        (("worker", "examples.tensors:Affine", "--connect", "unix:x"), "run models of items only"),
        (("worker", f"{MODELS}:Square", "--connect", "9000"), "must be unix:PATH or tcp:HOST:PORT"),
    ],
)
def test_wrong_settings_take_one_line_to_say(arguments: tuple[str, ...], complaint: str) -> None:
    ended = weir_here(*arguments)
    assert ended.returncode == 2, ended.stderr
    assert complaint in ended.stderr
    assert ended.stderr.count("\n") == 1
