"""A client needs no server: not to be imported, and not to be installed."""

import subprocess
import sys

import pytest

SERVERS = {
    "asyncio", "cloudpickle", "grpc", "httptools", "httpx", "prometheus_client", "pydantic", "rich", "scipy", "starlette", "structlog",
    "typer", "uvicorn", "uvloop", "weir.catalog", "weir.protocols", "weir.serving", "weir.tuning", "weir.workers", "websockets",
}  # fmt: skip

# What there is beside the standard library after `pip install --no-deps weir-serving` and `pip install numpy msgspec` with
# the transport's own dependencies.
COMMON = ("weir", "numpy", "msgspec", "typing_extensions")
HTTP = ("httpx", "httpcore", "anyio", "certifi", "h11", "idna", "sniffio")
NEEDS = {
    "HttpClient": HTTP,
    "AsyncHttpClient": HTTP,
    "GrpcClient": ("grpc", "google"),
    "WebSocketClient": (*HTTP, "websockets"),
}

HIDING = """
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {allowed!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)

sys.meta_path.insert(0, Hidden())
import weir.client
client = weir.client.{kind}("{address}")
{then}
"""


def run(script: str) -> str:
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_importing_the_clients_loads_no_server_and_no_transport() -> None:
    loaded = set(run("import sys, weir.client; print(*sys.modules)").split())
    assert not loaded & SERVERS


@pytest.mark.parametrize("kind", NEEDS)
def test_a_client_needs_numpy_msgspec_and_its_transport_alone(kind: str) -> None:
    address = "127.0.0.1:9" if "Grpc" in kind else "http://127.0.0.1:9"
    asked = (
        "import asyncio; print(asyncio.run(client.server_live()))" if "Async" in kind else "print(client.server_live())"
    )
    script = HIDING.format(allowed=(*COMMON, *NEEDS[kind]), kind=kind, address=address, then=asked)
    assert run(script) == "False\n"


def test_a_client_of_texts_over_http_needs_no_library_for_it() -> None:
    script = HIDING.partition("client = ")[0].format(allowed=COMMON)
    script += """
try:
    weir.client.EmbeddingClient("http://127.0.0.1:9")
except weir.client.Unreachable as error:
    print(type(error).__name__)
"""
    assert run(script) == "Unreachable\n"


@pytest.mark.parametrize(
    ("kind", "allowed", "said"),
    [
        (
            "HttpClient",
            (),
            "httpx, which is not installed; add Weir's extra 'client': pip install 'weir-serving[client]'",
        ),
        ("GrpcClient", (), "grpc, which is not installed; add Weir's extra 'grpc': pip install 'weir-serving[grpc]'"),
        ("WebSocketClient", HTTP, "websockets, which is not installed; pip install websockets"),
    ],
)
def test_a_library_that_is_missing_is_named_with_what_installs_it(
    kind: str, allowed: tuple[str, ...], said: str
) -> None:
    script = HIDING.partition("client = ")[0].format(allowed=(*COMMON, *allowed))
    script += f"""
try:
    from weir.client import {kind}
except ImportError as error:
    print(error)
"""
    assert run(script) == f"weir.client.{kind} needs {said}\n"
