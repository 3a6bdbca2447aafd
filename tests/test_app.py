"""What is refused before anything is started, and what does not end."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
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
from tests.rings import subcases
from tests.served import CLEAN, COLD, children_of, serving, still_running, until

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


READY = """
import threading
import weir, weir.app, weir.console
from tests.served_models import Square

class Ready(weir.app.App):
    async def run(self, ready, **options):
        await super().run(lambda: (ready(), self.end()), **options)

weir.console.App = Ready
"""
GOES_ON = f"""{READY}
weir.serve(Square, port=0, drain_timeout=1)
for each in threading.enumerate():
    if isinstance(each, threading.Timer):
        each.join()  # the last resort, if nobody has cancelled it
print("goes on", flush=True)
weir.app.END_LIMIT = 0.1
stuck = threading.Thread(target=threading.Event().wait)
stuck.start()
"""


def test_a_program_goes_on_after_its_server_and_ends_despite_what_hangs() -> None:
    command = [sys.executable, "-c", GOES_ON]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN, timeout=200, check=False)
    assert "goes on\n" in done.stdout, done.stderr
    assert "not everything ends" in done.stderr and done.returncode == 1


def test_a_receiver_of_metrics_that_hangs_cannot_hold_up_the_end() -> None:
    command = [sys.executable, "-c", f"{READY}\nweir.app.END_LIMIT = 0.1\nweir.serve(Square, port=0, drain_timeout=1)"]
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it connects, and nobody reads
        receiver = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {**CLEAN, "OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": receiver}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200, check=False)
    assert "not everything ends" in done.stderr and done.returncode == 1, done.stderr


ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.usefixtures("nothing_is_left")
SERVERS = {
    "uvicorn": ["uvicorn", "tests.hosted:app", "--fd", "{fd}"],
    "gunicorn": ["gunicorn", "tests.hosted:app", "-kuvicorn_worker.UvicornWorker", "-bfd://{fd}", "--workers=2"],
    "hypercorn": ["hypercorn", "tests.hosted:app", "--bind", "fd://{fd}"],
}


@contextmanager
def hosted(command: list[str], **variables: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Let a server take a listening socket over; connections made before it is ready wait there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        filled = [part.format(fd=listener.fileno()) for part in command]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **variables}
        command = [sys.executable, "-m", *filled]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()], env=env, process_group=0)
        port = listener.getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        # hypercorn and gunicorn start processes of their own, which outlive a parent that is killed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(200)


@pytest.mark.parametrize("server", SERVERS)
def test_a_real_server_serves_and_leaves_nothing_behind(server: str, tmp_path: Path) -> None:
    variables = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if server == "gunicorn" else {}
    with hosted(SERVERS[server], **variables) as (url, process):
        assert httpx.post(f"{url}/infer/square", content=b"3").json() == 9
        newer = server == "hypercorn"
        with httpx.Client(base_url=url, http1=not newer, http2=newer) as client:
            answer = client.post("/infer/square", content=b"4")
            assert (answer.http_version, answer.content) == ("HTTP/2" if newer else "HTTP/1.1", b"16")
            assert client.post("/inference/batch", json=[1, "a", 2]).json()[2] == {"output": 4}
            assert client.get("/health/ready").json()["ready"] is True
            assert b'weir_requests_total{code="200",frontend="http",model="square"' in client.get("/metrics").content
            refused = client.post("/infer/cube", json=1)
            assert (refused.status_code, refused.json()["error"]["type"]) == (404, "ModelNotFound")
        if server == "gunicorn":  # its processes show what all of them count
            for number in range(20):
                assert httpx.post(f"{url}/infer/square", content=str(number)).json() == number * number
            assert 'weir_workers{model="square",pid="' in httpx.get(f"{url}/metrics").text
            until(lambda: len(list(tmp_path.glob("weir/counter_*.db"))) == 2)  # the second one may start later
        family = children_of(process.pid)
        assert family
        process.send_signal(signal.SIGTERM)  # each process writes for the last time
        process.wait(200)
        assert not still_running(family)
    if server == "gunicorn":
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(tmp_path / "weir"))
        labels = {"model": "square", "frontend": "http", "code": "200"}
        assert registry.get_sample_value("weir_requests_total", labels) == 23
        assert len(list(tmp_path.glob("weir/counter_*.db"))) == 2


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    with hosted(["uvicorn", "tests.hosted:broken", "--fd", "{fd}"]) as (_, process):
        assert process.wait(200) != 0


def asgi_get(app: Any, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(get())


def test_settings_go_where_they_belong() -> None:
    class Mine(weir.Service):
        model = Doubles

    service = weir.Service(Square, name="mine", executor=FakeExecutor())
    app = weir.asgi(Square, "tests.hosted:Broken", service, Mine, max_batch_size=7, routes={"square": "/sq"})
    index = asgi_get(app, "/").json()
    assert [model["name"] for model in index["models"]] == ["square", "broken", "mine", "doubles"]
    assert "/sq" in index["models"][0]["paths"]
    assert "/metrics" in index["pages"]
    assert asgi_get(app, "/models/square").json()["settings"]["max_batch_size"] == 7
    assert asgi_get(weir.asgi(Square, metrics=False), "/metrics").status_code == 404
    before = TABLE[DeadlineExceeded]
    try:
        with TestClient(weir.asgi(Square, executor="inline", timeout_status=408)) as client:
            metrics = client.get("/metrics").text
        assert http_code(DeadlineExceeded("late")) == 408
        assert "weir_held_bytes 0.0" in metrics and "weir_held_refusals_total 0.0" in metrics
    finally:
        TABLE[DeadlineExceeded] = before


def test_callers_may_need_a_key_and_the_description_says_so(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k3y")
    app = weir.asgi(weir.Service(Square, executor="inline"), api_key_file=str(tmp_path / "keys"))
    for outer, root in ((app, ""), (Starlette(routes=[Mount("/ml", app=app)]), "/ml")):
        assert asgi_get(outer, f"{root}/models").status_code == asgi_get(outer, f"{root}/metrics").status_code == 401
        assert asgi_get(outer, f"{root}/models", {"Authorization": "Bearer k3y"}).status_code == 200
        assert asgi_get(outer, f"{root}/health/live").status_code == 200
    described = asgi_get(app, "/openapi.json", {"Authorization": "Bearer k3y"}).json()
    openapi_spec_validator.OpenAPIV31SpecValidator(described).validate()
    assert described["security"] == [{"key": []}]
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, operations in described["paths"].items():
        for operation in operations.values():
            is_open = path.endswith(("/health", "/health/live", "/health/ready"))
            assert (operation.get("security") == []) == is_open == ("401" not in operation["responses"])
    assert "security" not in asgi_get(weir.asgi(Square, executor="inline"), "/openapi.json").json()


async def test_an_application_can_be_mounted_in_another() -> None:
    service = weir.Service(Square, executor=FakeExecutor(lambda items: [item**2 for item in items]))
    outer = Starlette(routes=[Mount("/ml", app=weir.asgi(service))])
    async with service, httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://test") as client:
        assert (await client.post("/ml/infer/square", json=3)).json() == 9
        servers = (await client.get("/ml/openapi.json")).json()["servers"]
    assert servers == [{"url": "."}]  # /ml/, as the document is /ml/openapi.json


@subcases(
    ("settings", "says"),
    [
        ({"max_batch_sise": 3}, "max_batch_size"),
        ({"port": 80}, "port"),
        ({"max_body_size": 0}, "max_body_size"),
        ({"routes": {"square": "/health/x"}}, "reserved"),
    ],
)
def test_a_wrong_setting_is_refused_at_once(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(weir.SettingsError, match=says):
        weir.asgi(Square, **settings)


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
    with TestClient(Starlette(routes=[Mount("/m", weir.asgi(Doubles, executor="thread"))])) as client:
        refused = client.post("/m/infer/doubles", json=3)
    assert refused.status_code == 503
    assert "is not ready: not started; start it with" in refused.json()["error"]["message"]
    assert "lifespan=weir.lifespan(...)" in refused.json()["error"]["message"]


@subcases("fronts", ["1", "2"])
def test_a_server_works_where_uvloop_is_not_installed(fronts: str, tmp_path: Path) -> None:
    (tmp_path / "uvloop.py").write_text("raise ImportError")
    paths = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    items = list(range(1000))
    with serving("examples.square:Square", "--fronts", fronts, env={**COLD, "PYTHONPATH": paths}) as (served, client):
        assert client.post("/infer/square/batch", json=items).json()[-1] == {"output": 999**2}
        assert b"weir_requests_total" in client.get("/metrics").content
        served.until_logged("serving on asyncio's event loop: with uvloop")
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
