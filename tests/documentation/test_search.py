"""The site's search finds the right page for the words that people type."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from docs.site import BUILD, ROOT

PYTHON = ROOT / ".venvs" / "docs" / "bin" / "python"
WANTED = {
    "troubleshooting": "how-to/troubleshooting", "graceful shutdown": "how-to/run-under-a-process-manager",
    "batch timeout": "reference/policies", "max wait": "reference/policies", "autoscaling": "how-to/autoscale-workers",
    "python client": "how-to/call-a-server", "request size limit": "how-to/overload-and-deadlines",
    "async": "how-to/use-weir-in-python", "warm-up": "reference/model", "environment variables": "reference/settings",
    "memory leak": "how-to/troubleshooting", "worker restarts": "how-to/troubleshooting",
    "vllm": "reference/infinity", "helm": "how-to/deploy-on-kubernetes", "docker": "how-to/run-under-a-process-manager",
    "openai": "how-to/use-embedding-clients", "429": "how-to/overload-and-deadlines", "install": "install", "hot-reload": "how-to/load-models", "openapi": "reference/http",
    "rate limit": "how-to/api-keys-and-rate-limits", "load-test": "how-to/load-test", "embeddings": "how-to/serve-embeddings",
    "opentelemetry": "how-to/trace-requests", "fastapi": "how-to/use-web-frameworks",
}  # fmt: skip


@pytest.mark.skipif(
    not PYTHON.exists() or shutil.which("node") is None, reason="needs node, and what `make docs` installs"
)
def test_search_finds_the_right_page_first() -> None:
    subprocess.run([PYTHON, "-m", "docs.site"], cwd=ROOT, check=True, capture_output=True)
    script = Path(__file__).with_name("search.mjs")
    done = subprocess.run(["node", script, BUILD / "site", *WANTED], check=True, capture_output=True, text=True)
    first = {
        words: places[0].partition(".html")[0] if places else "" for words, places in json.loads(done.stdout).items()
    }
    assert first == WANTED
