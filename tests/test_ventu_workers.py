"""ventu's own worker code, as PyPI has it, attached to a real server. It needs libraries older than ours: an environment of its own."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.served import CLEAN, Served

VENTU = ("ventu==0.4.5", "pydantic<2", "spectree<0.4", "falcon<3")
WORKER = """
import sys
from pydantic import BaseModel
from ventu import Ventu

class Number(BaseModel):
    number: int
    class Config:
        schema_extra = {"example": {"number": 2}}

class Square(BaseModel):
    square: int
    class Config:
        schema_extra = {"example": [{"square": 4}]}

class Squares(Ventu):
    def batch_inference(self, batch):
        return [{"square": each.number ** 2} for each in batch]

kind, _, address = sys.argv[1].partition(":")
worker = Squares(Number, Square, use_msgpack=sys.argv[2] == "msgpack")
if kind == "unix":
    worker.run_unix(address)
else:
    worker.run_tcp(address.split(":")[0], int(address.split(":")[1]))
"""


@pytest.fixture(scope="module")
def ventu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python that has ventu."""
    folder = tmp_path_factory.mktemp("ventu")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *VENTU], check=True, env=CLEAN)
    (folder / "worker.py").write_text(WORKER)
    yield python


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_ventus_workers_attach_over_both_sockets(ventu: Path, tmp_path: Path) -> None:
    for address in (f"unix:{tmp_path}/w.sock", "tcp:127.0.0.1:0"):
        with Served("weir:External", "--name", "m", "--worker-socket", address, "--workers", "2") as served:
            where = served.until_logged(r"waits for workers at (\S+)")[1]
            command = [ventu, ventu.parents[2] / "worker.py", where, "json"]
            workers = [subprocess.Popen(command, env=CLEAN, stderr=subprocess.DEVNULL) for _ in range(2)]
            try:
                check(served.until_ready(), workers)
            finally:
                for worker in workers:
                    worker.kill()
                    worker.wait()


def check(served: Served, workers: list[subprocess.Popen[bytes]]) -> None:
    """Two workers answer, refuse items alone, and one of them is enough."""
    with httpx.Client(base_url=served.url, timeout=60) as client, ThreadPoolExecutor(8) as many:

        def ask(number: object) -> httpx.Response:
            return client.post("/infer/m", json={"number": number})

        answers = list(many.map(ask, [*range(50), "none"]))
        assert [answer.json() for answer in answers[:50]] == [{"square": number**2} for number in range(50)]
        assert answers[50].status_code == 422
        assert answers[50].json()["error"]["details"][0]["loc"] == ["number"]
        workers[0].kill()
        workers[0].wait()
        assert all(answer.status_code == 200 for answer in many.map(ask, range(50)))
