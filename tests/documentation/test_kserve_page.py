"""The tables of paths, calls and client methods say what is so, over HTTP and gRPC."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
from tests.documentation.pages import ROOT, table
from tests.frontends.grpc.kit import INFERENCE, serving
from tests.late import needs_kserve

from weir.catalog.registry import Registry
from weir.frontends.http.kserve_routes import PREFIX, kserve_endpoints
from weir.protocols import HttpSettings, KserveSettings
from weir.protocols.data_plane import EXTENSIONS, SHARED_MEMORY
from weir.protocols.kserve import CALLS, KserveContext
from weir.wire.kserve_grpc import methods

HTTP, GRPC = ((ROOT / f"docs/reference/{name}.md").read_text() for name in ("kserve-http", "grpc"))
VERSION = "/versions/{version}"


def rows(heading: str, page: str = HTTP) -> list[list[str]]:
    return table(page, heading)[1:]


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


def methods_of(package: str, name: str, *files: str) -> set[str]:
    """Return the public methods of the classes that these files call so: to import the package takes seconds."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    trees = [ast.parse((Path(spec.origin).parent / file).read_text()) for file in files]
    classes = [each for tree in trees for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
    assert len(classes) == len(files)
    functions = (
        each for kind in classes for each in kind.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {each.name for each in functions if not each.name.startswith("_")}


def test_every_method_of_tritons_client_is_named() -> None:
    base = methods_of("tritonclient", "InferenceServerClientBase", "_client.py")
    for transport, pages in (("http", (HTTP,)), ("grpc", (HTTP, GRPC))):
        files = [f"{transport}/_client.py", f"{transport}/aio/__init__.py"]
        methods = base | methods_of("tritonclient", "InferenceServerClient", *files)
        assert methods <= {
            name for page in pages for row in rows("Methods of", page) for name in re.findall(r"`(\w+)`", row[0])
        }


@needs_kserve
def test_every_method_of_kserves_client_is_named() -> None:
    paragraph = HTTP.partition("For `kserve.InferenceRESTClient`")[2]
    assert methods_of("kserve", "InferenceRESTClient", "inference_client.py") <= set(re.findall(r"`(\w+)`", paragraph))
