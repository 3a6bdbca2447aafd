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
HTTP = ("httptools",)
NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys(("HttpClient", "AsyncHttpClient"), HTTP)
NEEDS |= {"GrpcClient": ("grpc", "google"), "WebSocketClient": (*HTTP, "websockets")}

HIDING = """
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {allowed!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)

sys.meta_path.insert(0, Hidden())
import weir.client
"""


def run(script: str) -> str:
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_importing_the_clients_loads_no_server_and_no_transport() -> None:
    assert not set(run("import sys, weir.client; print(*sys.modules)").split()) & SERVERS


def run_with(allowed: tuple[str, ...], script: str) -> str:
    """Return what `script` prints where nothing but `allowed` and the standard library can be imported."""
    return run(HIDING.format(allowed=(*COMMON, *allowed)) + script)


@pytest.mark.parametrize("kind", NEEDS)
def test_a_client_needs_numpy_msgspec_and_its_transport_alone(kind: str) -> None:
    address = "127.0.0.1:9" if "Grpc" in kind else "http://127.0.0.1:9"
    live = f'weir.client.{kind}("{address}").server_live()'
    asked = f"import asyncio; print(asyncio.run({live}))" if "Async" in kind else f"print({live})"
    assert run_with(NEEDS[kind], asked) == "False\n"


NAMED = """
try:
    {}
except {} as error:
    print(error)
"""


def test_a_client_of_texts_over_http_needs_no_other_library() -> None:
    made = 'weir.client.EmbeddingClient("http://127.0.0.1:9")'
    assert run_with(HTTP, NAMED.format(made, "weir.client.Unreachable")).startswith("http://127.0.0.1:9: no connection")


@pytest.mark.parametrize(
    ("kind", "allowed", "missing"),
    [
        ("HttpClient", (), "httptools, which is not installed; pip install httptools"),
        ("GrpcClient", (), "grpc, which is not installed; add Weir's extra 'grpc': pip install 'weir-serving[grpc]'"),
        ("WebSocketClient", HTTP, "websockets, which is not installed; pip install websockets"),
    ],
)
def test_a_library_that_is_missing_is_named_with_what_installs_it(
    kind: str, allowed: tuple[str, ...], missing: str
) -> None:
    script = NAMED.format(f"from weir.client import {kind}", "ImportError")
    assert run_with(allowed, script) == f"weir.client.{kind} needs {missing}\n"
