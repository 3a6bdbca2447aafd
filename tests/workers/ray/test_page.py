"""docs/how-to/scale-out.md and the example do what they show, on the nodes of a real Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.documentation.pages import ROOT, do
from tests.workers.ray.clusters import Nodes

pytestmark = pytest.mark.ray


def test_the_page_does_what_it_shows(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    do(ROOT / "docs/how-to/scale-out.md", tmp_path, {})


@pytest.mark.parametrize("own", [True, False], ids=["a Ray of its own", "the nodes"])
def test_the_example(nodes: Nodes, own: bool) -> None:
    arguments = [] if own else [nodes.address]
    environment = {**os.environ, "RAY_ADDRESS": ""}
    done = subprocess.run(
        [sys.executable, ROOT / "examples/ray/sentiment.py", *arguments],
        capture_output=True, text=True, env=environment, timeout=100, check=True,
    )  # fmt: skip
    assert done.stdout.count("is ready on") == 2
    assert "[1, -2, 1]" in done.stdout
    assert done.stdout.count("[1, -2, 1] after a worker was killed") == own
