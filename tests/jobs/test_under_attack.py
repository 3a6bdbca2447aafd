"""A real server of batch jobs with little memory, and callers who upload, download and start jobs to end it: it lives, and answers others."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from starlette.testclient import TestClient
from tests.hosted import Square
from tests.served import Served, until

import weir
from weir.jobs import routes
from weir.jobs.running import JobRunner

MODELS = Path(__file__).with_name("models.py")
MB = 1 << 20
CLIENTS = 60


class Attacked:
    """A server of batch jobs, and connections to it."""

    def __init__(self, served: Served) -> None:
        url = urlsplit(served.url)
        self.address = (url.hostname or "", url.port or 0)
        self.process = psutil.Process(served.process.pid)
        self.client = httpx.Client(base_url=served.url, timeout=60.0)
        self.sockets: list[socket.socket] = []

    def most_memory(self) -> int:
        """Return the most bytes of memory that the server's process has had."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) << 10

    def send(self, request: bytes) -> socket.socket:
        """Send `request` on a connection of its own, which reads as little as may be."""
        client = socket.socket()
        self.sockets.append(client)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect(self.address)
        client.sendall(request)
        return client

    def upload(self, content: bytes) -> str:
        answer = self.client.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def begin(self, content: bytes) -> str:
        call = {"input_file_id": self.upload(content), "endpoint": "/infer/length", "completion_window": "1h"}
        return str(self.client.post("/v1/batches", json=call).json()["id"])

    def job(self, name: str) -> Any:
        return self.client.get(f"/v1/batches/{name}").json()

    def ended(self, name: str) -> Any:
        until(lambda: self.job(name)["status"] in ("completed", "failed"), 120.0)
        return self.job(name)


@contextmanager
def attacked(tmp_path: Path, *settings: object) -> Iterator[Attacked]:
    with Served(f"{MODELS}:Length", "--batch-dir", tmp_path / "jobs", *settings) as served:
        server = Attacked(served.until_ready())
        try:
            yield server
            assert served.process.poll() is None
        finally:
            server.client.close()
            for each in server.sockets:
                each.close()


def stalled(size: int, announced: int) -> bytes:
    """Return the beginning of an upload: `size` bytes of a file, of a body of `announced` bytes."""
    head = b"POST /v1/files HTTP/1.1\r\nHost: t\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n"
    return head % announced + b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * size


def line(number: int, size: int = 3) -> bytes:
    return json.dumps({"custom_id": f"{number}", "method": "POST", "url": "/infer/length", "body": "x" * size}).encode()


def test_uploads_and_downloads_under_way_keep_no_file_open(tmp_path: Path) -> None:
    with attacked(tmp_path) as server:
        file = server.upload(b"x" * 4 * MB)
        before = server.process.num_fds()
        for _ in range(CLIENTS):
            server.send(stalled(300_000, 10_000_000))
        until(lambda: len(list((tmp_path / "jobs" / "files").glob("*.part"))) == CLIENTS)
        for _ in range(CLIENTS):
            client = server.send(f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: t\r\n\r\n".encode())
            assert client.recv(12) == b"HTTP/1.1 200"
        assert server.process.num_fds() <= before + 2 * CLIENTS + 10
        assert server.client.get("/health/live").status_code == 200
        for each in server.sockets:
            each.close()
        until(lambda: not list((tmp_path / "jobs" / "files").glob("*.part")))


def test_uploads_that_stall_take_no_room_from_others(tmp_path: Path) -> None:
    with attacked(tmp_path, "--batch-max-bytes", 10_000_000) as server:
        for _ in range(8):
            server.send(stalled(300_000, 5_000_000))
        until(lambda: len(list((tmp_path / "jobs" / "files").glob("*.part"))) == 8)
        job = server.ended(server.begin(b"\n".join(map(line, range(50)))))
        assert (job["status"], job["request_counts"]["completed"]) == ("completed", 50)


def test_lines_of_jobs_take_no_more_memory_than_the_server_may_have(tmp_path: Path) -> None:
    body = 4 * MB
    more = "--max-body-size", body + 100, "--max-waiting-bytes", 32 * MB, "--arena-bytes", 0
    with attacked(tmp_path, *more) as server:
        files = [b"\n".join(line(number, body - 1000) for number in range(12)) for _ in range(4)]
        before = server.most_memory()
        for name in [server.begin(file) for file in files]:
            job = server.ended(name)
            assert (job["status"], job["request_counts"]["completed"]) == ("completed", 12)
        assert server.most_memory() - before < 100 * MB


def test_files_are_listed_while_the_thread_of_the_jobs_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[JobRunner]()

    class Kept(JobRunner):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(routes, "JobRunner", Kept)
    goes_on = threading.Event()
    with TestClient(weir.asgi(Square, executor="inline", batch_dir=str(tmp_path / "jobs"))) as client:
        try:
            assert client.portal is not None
            client.portal.start_task_soon(made[0].use, goes_on.wait)
            assert client.get("/v1/files").json()["data"] == []
        finally:
            goes_on.set()


def test_windows_and_boundaries_that_are_none_are_the_callers_fault(tmp_path: Path) -> None:
    with TestClient(weir.asgi(Square, executor="inline", batch_dir=str(tmp_path / "jobs"))) as client:
        for window in ("\u0661h", "1h\n", "\u0662\u0664h", "0h", "31d", "24"):
            call = {"input_file_id": "file-1", "endpoint": "/infer/square", "completion_window": window}
            answer = client.post("/v1/batches", json=call)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "completion_window")
        assert client.post("/v1/batches", content=b'{"a":' * 9000).status_code == 400
        answer = client.post("/v1/files", headers={"content-type": f"multipart/form-data; boundary={'b' * 300}"})
        assert (answer.status_code, "exceeds maximum of 256" in answer.text) == (400, True)
