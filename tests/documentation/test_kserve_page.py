"""The tables of paths, calls and client methods say what is so, over HTTP and gRPC."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.frontends.grpc.kit import INFERENCE, serving

from weir.catalog.registry import Registry
from weir.frontends.http.kserve_routes import PREFIX, kserve_endpoints
from weir.protocols import HttpSettings, KserveSettings
from weir.protocols.data_plane import EXTENSIONS, SHARED_MEMORY
from weir.protocols.kserve import CALLS, KserveContext
from weir.wire.kserve_grpc import methods

HTTP, GRPC = ((Path(__file__).parents[2] / f"docs/reference/{name}.md").read_text() for name in ("kserve-http", "grpc"))
VERSION = "/versions/{version}"


def rows(heading: str, page: str = HTTP) -> list[list[str]]:
    """Return the cells of the table under a heading."""
    section = page.partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_path_is_named() -> None:
    said = {(row[0], row[1].strip("`")) for row in rows("Paths")}
    manager: Any = object()
    site = KserveContext(
        Registry([]), HttpSettings(), settings=KserveSettings(allow_shared_memory=True), manager=manager
    )
    there = {(each.method, each.shown_path) for each in kserve_endpoints(site) if each.described is not None}
    there |= {("POST", f"{PREFIX}/models/{{model}}{version}/{call}") for version in ("", VERSION) for call in CALLS}
    assert said == {(method, path) for method, path in there if VERSION not in path}
    assert {path for _, path in there if VERSION in path} == {
        path.replace("/models/{model}", "/models/{model}" + VERSION) for _, path in said if "/models/{model}" in path
    }


def test_every_extension_is_named() -> None:
    assert sorted(re.findall(r"`([^`]+)`", " ".join(row[0] for row in rows("Extensions")))) == sorted(
        [*EXTENSIONS, SHARED_MEMORY]
    )


async def test_every_call_over_grpc_is_named_and_does_as_it_says() -> None:
    said = {row[0].strip("`"): row[2] for row in rows("Calls of", GRPC)}
    assert list(said) == [method.name for method in methods(INFERENCE)]
    async with serving() as rig:
        for method in methods(INFERENCE):
            if method.requests_stream:
                continue
            code = await rig.raw(method.path, b"").code()
            assert code is not grpc.StatusCode.INTERNAL, method.name
            if said[method.name] == "UNIMPLEMENTED":
                assert code is grpc.StatusCode.UNIMPLEMENTED, method.name


def methods_of(client: str) -> set[str]:
    """Return the public methods of a class, which is imported in a process of its own."""
    module, _, name = client.rpartition(".")
    code = f"from {module} import {name} as c; print(*[n for n in dir(c) if not n.startswith('_')])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["http", "http.aio", "grpc", "grpc.aio"])
def test_every_method_of_tritons_client_is_named(module: str) -> None:
    described = [row for page in (HTTP, GRPC)[: 1 + ("grpc" in module)] for row in rows("Methods of", page)]
    named = {name for row in described for name in re.findall(r"`(\w+)`", row[0])}
    assert methods_of(f"tritonclient.{module}.InferenceServerClient") <= named


def test_every_method_of_kserves_client_is_named() -> None:
    paragraph = HTTP.partition("For `kserve.InferenceRESTClient`")[2]
    assert methods_of("kserve.InferenceRESTClient") <= set(re.findall(r"`(\w+)`", paragraph))
