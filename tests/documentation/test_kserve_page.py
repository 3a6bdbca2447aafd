"""The tables of paths and of client methods say what is so."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weir.catalog.registry import Registry
from weir.frontends.http.kserve_routes import PREFIX, kserve_endpoints
from weir.protocols import HttpSettings, KserveSettings
from weir.protocols.kserve import CALLS, KserveContext
from weir.protocols.kserve_metadata import EXTENSIONS, SHARED_MEMORY

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "kserve-http.md").read_text()
VERSION = "/versions/{version}"


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading."""
    section = PAGE.partition(f"## {heading}")[2].partition("\n## ")[0]
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


@pytest.mark.parametrize("module", ["tritonclient.http", "tritonclient.http.aio"])
def test_every_method_of_tritons_client_is_named(module: str) -> None:
    code = f"from {module} import InferenceServerClient as c; print(*[n for n in dir(c) if not n.startswith('_')])"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=True, text=True)
    named = {name for row in rows("Methods of") for name in re.findall(r"`(\w+)`", row[0])}
    assert set(found.stdout.split()) <= named


def test_every_method_of_kserves_client_is_named() -> None:
    code = "from kserve import InferenceRESTClient as c; print(*[n for n in dir(c) if not n.startswith('_')])"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=True, text=True)
    paragraph = PAGE.partition("Of `kserve.InferenceRESTClient`")[2]
    assert set(found.stdout.split()) <= set(re.findall(r"`(\w+)`", paragraph))
