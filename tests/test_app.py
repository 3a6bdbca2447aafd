"""What is refused before anything is started, and what does not end."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient
from tests.hosted import Square
from tests.late import openapi_spec_validator
from tests.served import CLEAN, MODELS, still_running, until

import weir
from weir.catalog.loading import make_service
from weir.catalog.sources import ModelToServe
from weir.errors import DeadlineExceeded, SettingsError
from weir.testing import FakeExecutor
from weir.wire.status import TABLE, http_code


def test_refused_parameters_show_no_secrets() -> None:
    params = {"size": 3, "api_key": "hunter2"}
    with pytest.raises(SettingsError, match=r"params=.'size': 3, 'api_key': '[*]{3}'.: got an unexpected") as caught:
        make_service(ModelToServe("tests.served_models:Square", "square", params, [], {}), [])
    assert "hunter2" not in str(caught.value)


HANGING = """
import asyncio, sys
import weir.app
from weir.app import App, run
from weir.settings import read_settings
from weir.telemetry.logs import logging_to

weir.app.END_LIMIT = 0.1

class Hangs(App):
    async def _drain(self):
        await asyncio.Event().wait()

settings = read_settings([sys.argv[1]], {"port": ["0"], "drain_timeout": ["0.1"]}, {})
with logging_to(settings.telemetry):
    run(Hangs(settings), lambda: print("ready", flush=True))
"""


def test_a_server_that_does_not_end_leaves_behind_what_hangs_and_says_so() -> None:
    command = [sys.executable, "-c", HANGING, f"{MODELS}:Square"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=CLEAN
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "not everything ends" in log
    assert re.search(r"processes=\d", log)


GOES_ON = """
import threading
import weir, weir.app, weir.console
from tests.served_models import Square

class Ready(weir.app.App):
    async def run(self, ready, **options):
        await super().run(lambda: (ready(), self.end()), **options)

weir.console.App = Ready
weir.serve(Square, port=0, drain_timeout=1)
for each in threading.enumerate():
    if isinstance(each, threading.Timer):
        each.join()  # the last resort, if nobody has cancelled it
print("goes on", flush=True)
weir.app.END_LIMIT = 0.1
stuck = threading.Thread(target=threading.Event().wait)
stuck.start()
"""


def test_a_program_goes_on_after_its_server_and_ends_with_what_hangs_left_behind() -> None:
    command = [sys.executable, "-c", GOES_ON]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN, timeout=200, check=False)
    assert "goes on\n" in done.stdout, done.stderr
    assert "not everything ends" in done.stderr and done.returncode == 1


ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.usefixtures("nothing_is_left")
SERVERS = {
    "uvicorn": ["uvicorn", "tests.hosted:app", "--fd", "{fd}"],
    "gunicorn": [
        "gunicorn",
        "tests.hosted:app",
        "-k",
        "uvicorn_worker.UvicornWorker",
        "-b",
        "fd://{fd}",
        "--workers",
        "2",
    ],
    "hypercorn": ["hypercorn", "tests.hosted:app", "--bind", "fd://{fd}"],
}


@contextmanager
def hosted(command: list[str], **variables: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Let a server take a listening socket over; connections made before it is ready wait there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        filled = [part.format(fd=listener.fileno()) for part in command]
        path = os.pathsep.join([str(ROOT), *sys.path])
        process = subprocess.Popen(
            [sys.executable, "-m", *filled],
            pass_fds=[listener.fileno()],
            env={**os.environ, "PYTHONPATH": path, **variables},
            process_group=0,
        )
        port = listener.getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        # hypercorn and gunicorn start processes of their own, which outlive a parent that is killed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(200)


@pytest.mark.parametrize("server", SERVERS)
def test_a_real_server_serves_and_leaves_nothing_behind(server: str) -> None:
    with hosted(SERVERS[server]) as (url, process):
        with httpx.Client(base_url=url) as client:
            assert client.post("/infer/square", content=b"3").json() == 9
            assert client.post("/inference/batch", json=[1, "a", 2]).json()[2] == {"output": 4}
            assert client.get("/health/ready").json()["ready"] is True
            assert b'weir_requests_total{code="200",frontend="http",model="square"}' in client.get("/metrics").content
            refused = client.post("/infer/cube", json=1)
            assert (refused.status_code, refused.json()["error"]["type"]) == (404, "ModelNotFound")
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        process.send_signal(signal.SIGTERM)
        process.wait(200)
        assert not still_running(family)


def test_http_2() -> None:
    with (
        hosted(SERVERS["hypercorn"]) as (url, _),
        httpx.Client(http1=False, http2=True, base_url=url) as client,
    ):
        answer = client.post("/infer/square", content=b"3")
        assert (answer.http_version, answer.content) == ("HTTP/2", b"9")
        large = client.post("/infer/square", content=b" " * (17 << 20))
        assert (large.status_code, large.json()["error"]["type"]) == (413, "TooLarge")
        assert client.post("/infer/square", json=4).json() == 16


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    command = ["uvicorn", "tests.hosted:broken", "--fd", "{fd}"]
    with hosted(command) as (_, process):
        assert process.wait(200) != 0


def asgi_get(app: Any, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(get())


def test_settings_go_where_they_belong() -> None:
    app = weir.asgi(Square, "tests.hosted:Broken", max_batch_size=7, explain=True, routes={"square": "/sq"})
    index = asgi_get(app, "/").json()
    assert [model["name"] for model in index["models"]] == ["square", "broken"]
    assert "/sq" in index["models"][0]["paths"]
    assert "/metrics" in index["pages"]
    assert asgi_get(app, "/models/square").json()["settings"]["max_batch_size"] == 7


def test_a_service_is_taken_as_it_is() -> None:
    service = weir.Service(Square, name="mine", executor=FakeExecutor())
    app = weir.asgi(service, metrics=False)
    assert asgi_get(app, "/models/mine").json()["model"] == "mine"
    assert asgi_get(app, "/metrics").status_code == 404


def test_a_class_of_services_is_taken_too() -> None:
    class Mine(weir.Service):
        model = Square

    index = asgi_get(weir.asgi(Mine, executor="inline"), "/").json()
    assert index["models"][0]["name"] == "square"


def test_callers_may_need_a_key_there_too(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k3y")
    app = weir.asgi(weir.Service(Square, executor="inline"), api_key_file=str(tmp_path / "keys"))
    for outer, root in ((app, ""), (Starlette(routes=[Mount("/ml", app=app)]), "/ml")):
        assert asgi_get(outer, f"{root}/models").status_code == asgi_get(outer, f"{root}/metrics").status_code == 401
        assert asgi_get(outer, f"{root}/models", {"Authorization": "Bearer k3y"}).status_code == 200
        assert asgi_get(outer, f"{root}/health/live").status_code == 200


def test_the_description_says_that_a_key_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k3y")
    app = weir.asgi(weir.Service(Square, executor="inline"), api_key_file=str(tmp_path / "keys"))
    described = asgi_get(app, "/openapi.json", {"Authorization": "Bearer k3y"}).json()
    openapi_spec_validator.OpenAPIV31SpecValidator(described).validate()
    assert described["security"] == [{"key": []}]
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, operations in described["paths"].items():
        for operation in operations.values():
            is_open = path.endswith(("/health", "/health/live", "/health/ready"))
            assert (operation.get("security") == []) == is_open == ("401" not in operation["responses"])
    assert "security" not in asgi_get(weir.asgi(Square, executor="inline"), "/openapi.json").json()


def test_an_application_can_be_mounted_in_another() -> None:
    async def ask() -> tuple[Any, Any]:
        async with service, httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://test") as client:
            answer = await client.post("/ml/infer/square", json=3)
            described = await client.get("/ml/openapi.json")
            return answer.json(), described.json()["servers"]

    service = weir.Service(Square, executor=FakeExecutor(lambda items: [item**2 for item in items]))
    outer = Starlette(routes=[Mount("/ml", app=weir.asgi(service))])
    assert asyncio.run(ask()) == (9, [{"url": "."}])  # /ml/, as the document is /ml/openapi.json


def test_an_application_is_composed_as_a_server_is() -> None:
    before = TABLE[DeadlineExceeded]
    try:
        with TestClient(weir.asgi(Square, executor="inline", timeout_status=408)) as client:
            metrics = client.get("/metrics").text
        assert http_code(DeadlineExceeded("late")) == 408
        assert "weir_held_bytes 0.0" in metrics and "weir_held_refusals_total 0.0" in metrics
    finally:
        TABLE[DeadlineExceeded] = before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_batch_sise": 3}, "max_batch_size"), ({"port": 80}, "port"), ({"max_body_size": 0}, "max_body_size"),
        ({"routes": {"square": "/health/x"}}, "reserved"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_at_once(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(weir.SettingsError, match=says):
        weir.asgi(Square, **settings)


def test_the_processes_of_a_server_show_what_all_of_them_count(tmp_path: Path) -> None:
    with hosted(SERVERS["gunicorn"], PROMETHEUS_MULTIPROC_DIR=str(tmp_path)) as (url, process):
        for number in range(20):
            assert httpx.post(f"{url}/infer/square", content=str(number)).json() == number * number
        shown = httpx.get(f"{url}/metrics").text
        assert 'weir_workers{model="square",pid="' in shown
        until(lambda: len(list(tmp_path.glob("weir/counter_*.db"))) == 2)  # the second one may start later
        process.send_signal(signal.SIGTERM)  # each process writes for the last time
        process.wait(200)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path / "weir"))
    labels = {"model": "square", "frontend": "http", "code": "200"}
    assert registry.get_sample_value("weir_requests_total", labels) == 20
    assert len(list(tmp_path.glob("weir/counter_*.db"))) == 2


class Doubles(weir.Model):
    def predict(self, batch: list[int]) -> list[int]:
        return [2 * item for item in batch]


def test_a_web_application_runs_its_services_and_what_it_mounts() -> None:
    service, mounted = weir.Service(Doubles, executor="thread"), weir.asgi(Doubles, executor="thread")
    with pytest.raises(SettingsError, match=r"lifespan\(7\): must be a weir.Service, or what weir.asgi returned"):
        weir.lifespan(service, 7)

    async def double(request: Request) -> JSONResponse:
        return JSONResponse(await service.infer(4))

    app = Starlette(routes=[Route("/double", double), Mount("/m", mounted)], lifespan=weir.lifespan(service, mounted))
    with TestClient(app) as client:
        assert client.get("/double").json() == 8
        assert client.post("/m/infer/doubles", json=3).json() == 6
    assert not service.ready


def test_a_mounted_application_whose_lifespan_has_not_run_says_so() -> None:
    app = Starlette(routes=[Mount("/m", weir.asgi(Doubles, executor="thread"))])
    with TestClient(app) as client:
        refused = client.post("/m/infer/doubles", json=3)
    assert refused.status_code == 503
    assert "is not ready: not started; start it with" in refused.json()["error"]["message"]
    assert "lifespan=weir.lifespan(...)" in refused.json()["error"]["message"]
