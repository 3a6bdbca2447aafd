"""What the manifests' commands start serves on the ports that the objects name, drains in the time that they give, and is restarted when it must."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.manifests.containers import Container, wait_for
from tests.manifests.kit import Object, of_kind, printed

from weir.bench.vectors import reserve_ports

HERE = Path(__file__).parent


def port_of(objects: list[Object], name: str) -> int:
    """Return the port of the pod to which that of the Service leads."""
    (service,) = [each for each in of_kind(objects, "Service")["spec"]["ports"] if each["name"] == name]
    pod = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    (found,) = [each["containerPort"] for each in pod["ports"] if each["name"] == service["targetPort"]]
    assert isinstance(found, int)
    return found


def test_a_deployment_serves_on_the_ports_of_its_service_and_drains() -> None:
    with reserve_ports(2) as (http, rpc):
        objects = printed(
            "kubernetes",
            "models.py:Square",
            f"--port={http}",
            f"--grpc-port={rpc}",
            "--workers=2",
            env={"WEIR_TIMEOUT": "7"},
        )
        with Container(objects, HERE) as pod:
            pod.until("ready")
            assert [pod.probe(f"{name}Probe").status_code for name in ("startup", "readiness", "liveness")] == [
                200,
                200,
                200,
            ]
            url = f"http://127.0.0.1:{port_of(objects, 'http')}"
            assert httpx.post(f"{url}/infer/square", json=3).json() == 9
            state = httpx.get(f"{url}/models/square").json()
            assert (len(state["workers"]), state["settings"]["timeout"]) == (2, 7.0)
            with grpc.insecure_channel(f"127.0.0.1:{port_of(objects, 'grpc')}") as channel:
                health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="square"))
                assert health.status == health_pb2.HealthCheckResponse.SERVING
            assert pod.terminate() == 0


def test_an_inference_service_speaks_protocol_v2() -> None:
    with reserve_ports(1) as (http,):
        objects = printed("kserve", "models.py:Tensor", "--port", http)
        with Container(objects, HERE) as pod:
            pod.until("ready")
            assert pod.probe("readinessProbe").status_code == pod.probe("livenessProbe").status_code == 200
            url = f"http://127.0.0.1:{pod.spec['ports'][0]['containerPort']}/v2"
            # The name by which KServe's clients ask is that of the InferenceService.
            name = of_kind(objects, "InferenceService")["metadata"]["name"]
            assert httpx.get(f"{url}/health/ready").status_code == 200
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}
            answer = httpx.post(f"{url}/models/{name}/infer", json={"inputs": [tensor]}).json()
            assert answer["outputs"][0]["data"] == [2.0, 5.0]
            assert pod.terminate() == 0


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[tuple[Container, str, Path, Path]]:
    """A server whose model answers when a file is there: the container, its URL, that file, and the one that says that it was asked."""
    opened, begun = tmp_path / "gate", tmp_path / "begun"
    with reserve_ports(1) as (http,):
        params = [f"--param=gate={opened}", f"--param=begun={begun}"]
        with Container(
            printed("kubernetes", "models.py:Gate", f"--port={http}", "--drain-timeout=20", *params), HERE
        ) as pod:
            pod.until("ready")
            yield pod, f"http://127.0.0.1:{http}", opened, begun


def test_what_was_accepted_is_answered_within_the_grace_period(gate: tuple[Container, str, Path, Path]) -> None:
    pod, url, opened, begun = gate
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{url}/infer/gate", json=5, timeout=60)
        wait_for(begun)
        pod.process.send_signal(signal.SIGTERM)
        pod.until("draining")
        assert pod.probe("readinessProbe").status_code == 503  # no more requests come
        assert pod.probe("livenessProbe").status_code == 200  # but nobody kills it
        refused = httpx.post(f"{url}/infer/gate", json=6)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        opened.touch()
        assert asked.result().json() == 5
    assert pod.process.wait(200) == 0


def test_a_server_that_hangs_ends_before_it_would_be_killed(tmp_path: Path) -> None:
    with reserve_ports(1) as (http,):
        params = [f"--param=gate={tmp_path / 'never'}", f"--param=begun={tmp_path / 'begun'}"]
        objects = printed("kubernetes", "models.py:Gate", f"--port={http}", "--drain-timeout=0.1", *params)
        with Container(objects, HERE) as pod, ThreadPoolExecutor(1) as pool:
            pod.until("ready")
            asked = pool.submit(httpx.post, f"http://127.0.0.1:{http}/infer/gate", json=5, timeout=60)
            wait_for(tmp_path / "begun")
            pod.terminate()
            assert asked.result().status_code == 503


def weights(tmp_path: Path, port: int) -> list[Object]:
    return printed("kubernetes", "models.py:Weights", f"--port={port}", f"--param=weights={tmp_path / 'weights'}")


def test_a_pod_is_restarted_when_its_model_never_loads(tmp_path: Path) -> None:
    with reserve_ports(1) as (http,), Container(weights(tmp_path, http), HERE) as pod:
        pod.until("listening")
        assert pod.process.wait(200) == 1  # Kubernetes restarts what ends; there is nothing to probe


def test_a_pod_is_restarted_when_its_model_can_never_load_again(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"42")
    with reserve_ports(1) as (http,), Container(weights(tmp_path, http), HERE) as pod:
        pod.until("ready")
        url = f"http://127.0.0.1:{http}"
        (tmp_path / "weights").unlink()
        (worker,) = httpx.get(f"{url}/models/weights").json()["workers"]
        psutil.Process(worker["pid"]).kill()
        assert pod.probe("livenessProbe").status_code == 200  # it may yet come back
        while "5 times in a row" not in str(pod.until("worker")):
            pass
        live, ready = pod.probe("livenessProbe"), pod.probe("readinessProbe")
        assert (live.status_code, ready.status_code) == (503, 503)
        assert "weights" in live.json()["models"]
        (tmp_path / "weights").write_bytes(b"42")  # a disk that was away is back before the third probe
        pod.until("ready")
