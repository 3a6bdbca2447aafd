"""Ray Serve runs what the RayService says, and replaces a replica whose model can never load again. Run by `make test-ray`."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from weir.bench.vectors import reserve_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

HERE = Path(__file__).parent
PATIENCE = 150  # seconds; a Ray takes long to start on a busy machine
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local",
    "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
}  # fmt: skip


def serve_config(*words: object, port: int) -> dict[str, Any]:
    """Return the configuration of Ray Serve that `weir manifest` prints, for this machine: `port` is free here."""
    command = [sys.executable, "-m", "weir", "manifest", "rayservice", *map(str, words)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout
    config: dict[str, Any] = yaml.safe_load(yaml.safe_load(printed)["spec"]["serveConfigV2"])
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    return config


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """Runs a configuration as `serve run` does, with a Ray of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def start(config: dict[str, Any]) -> None:
        (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "ray.serve.scripts", "run", str(tmp_path / "serve.yaml")]
        with (tmp_path / "log").open("wb") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT, cwd=tmp_path))

    yield start
    for process in started:
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(200)
        finally:
            process.kill()
            _, alive = psutil.wait_procs(below, 30)
            for each in alive:
                each.kill()
        assert not alive, f"Ray leaves behind {alive}\n{(tmp_path / 'log').read_text()}"


def ask(port: int, path: str, body: bytes | None = None) -> tuple[int, Any]:
    """Return the status and the document of an answer; 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", body, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, None


def until(condition: Any, log: Path) -> Any:
    """Return what `condition` returns once it is true."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)  # Ray tells nobody outside what its controller has done
    return found


def test_ray_serve_takes_it_and_answers(run: Any, tmp_path: Path) -> None:
    with reserve_ports(1) as (port,):
        config = serve_config("models:Square", "--max-batch-size=8", "--route=/sq", "--cpu=500m", port=port)
        run(config)
        until(lambda: ask(port, "/health/ready")[0] == 200, tmp_path / "log")
        assert ask(port, "/infer/square", b"3") == (200, 9)
        assert ask(port, "/sq", b"4") == (200, 16)
        assert ask(port, "/v2/models/square")[1]["name"] == "square"
        assert ask(port, "/models/square")[1]["settings"]["max_batch_size"] == 8


def test_a_replica_is_replaced_when_its_model_can_never_load_again(run: Any, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"42")
    with reserve_ports(1) as (port,):
        config = serve_config("models:Weights", f"--param=weights={weights}", port=port)
        # Instead of ten: nobody waits for it here.
        config["applications"][0]["deployments"][0]["health_check_period_s"] = 0.5
        run(config)

        def worker() -> Any:
            status, state = ask(port, "/models/weights")
            return state["workers"][0] if status == 200 and state["ready"] else None

        first = until(worker, tmp_path / "log")
        replica = psutil.Process(first["pid"]).parent()
        assert replica is not None
        weights.unlink()
        psutil.Process(first["pid"]).kill()
        until(lambda: not replica.is_running(), tmp_path / "log")
        weights.write_bytes(b"42")
        second = until(worker, tmp_path / "log")
        assert psutil.Process(second["pid"]).parent() != replica
