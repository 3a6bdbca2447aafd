"""The tables of calls and of client methods say what is so."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from tests.frontends.grpc.kit import INFERENCE, Rig, run

from weir.wire.kserve_grpc import methods

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGE = (REFERENCE / "grpc.md").read_text()
OVER_HTTP = (REFERENCE / "kserve-http.md").read_text()
UNIMPLEMENTED = "UNIMPLEMENTED"


def rows(heading: str, page: str = PAGE) -> list[list[str]]:
    """Return the cells of the table under a heading."""
    section = page.partition(f"## {heading}")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_call_is_named_and_does_as_it_says() -> None:
    said = {row[0].strip("`"): row[2] for row in rows("Calls of")}
    assert list(said) == [method.name for method in methods(INFERENCE)]

    async def test(rig: Rig) -> None:
        for method in methods(INFERENCE):
            if method.requests_stream:
                continue
            call = rig.raw(method.path, b"")
            code = await asyncio.ensure_future(call.code())
            assert code is not grpc.StatusCode.INTERNAL, method.name
            if said[method.name] == UNIMPLEMENTED:
                assert code is grpc.StatusCode.UNIMPLEMENTED, method.name

    run(test)


@pytest.mark.parametrize("module", ["tritonclient.grpc", "tritonclient.grpc.aio"])
def test_every_method_of_tritons_client_is_named(module: str) -> None:
    code = f"from {module} import InferenceServerClient as c; print(*[n for n in dir(c) if not n.startswith('_')])"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=True, text=True)
    described = [*rows("Methods of"), *rows("Methods of", OVER_HTTP)]
    named = {name for row in described for name in re.findall(r"`(\w+)`", row[0])}
    assert set(found.stdout.split()) <= named
