"""What the manifests' commands start serves on the ports that the objects name, drains in the time that they give, and is restarted when it must."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.manifests.containers import Container
from tests.manifests.kit import Object, of_kind, printed

from weir.bench.vectors import reserve_ports

PROBES = ("readinessProbe", "livenessProbe", "startupProbe")


class Pod(NamedTuple):
    """A container of a manifest, and where it listens."""

    objects: list[Object]
    container: Container
    url: str


@contextmanager
def started(model: str, *words: str, kind: str = "kubernetes", **env: str) -> Iterator[Pod]:
    """Run what the manifest of a model in models.py says, until the block ends."""
    with reserve_ports(1) as (port,):
        objects = printed(kind, f"models.py:{model}", f"--port={port}", *words, env=env)
        with Container(objects, Path(__file__).parent) as container:
            yield Pod(objects, container, f"http://127.0.0.1:{port}")


def probed(pod: Pod, count: int = 2) -> list[int]:
    """Return what the first of PROBES are answered."""
    return [pod.container.probe(name).status_code for name in PROBES[:count]]


def port_of(objects: list[Object], name: str) -> int:
    """Return the port of the pod to which that of the Service leads."""
    (service,) = [each for each in of_kind(objects, "Service")["spec"]["ports"] if each["name"] == name]
    pod = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    (found,) = [each["containerPort"] for each in pod["ports"] if each["name"] == service["targetPort"]]
    assert isinstance(found, int)
    return found


def test_a_deployment_serves_on_the_ports_of_its_service_and_drains() -> None:
    with (
        reserve_ports(1) as (rpc,),
        started("Square", f"--grpc-port={rpc}", "--workers=2", WEIR_TIMEOUT="7") as pod,
    ):
        pod.container.until("ready")
        assert probed(pod, 3) == [200] * 3
        url = f"http://127.0.0.1:{port_of(pod.objects, 'http')}"
        assert httpx.post(f"{url}/infer/square", json=3).json() == 9
        state = httpx.get(f"{url}/models/square").json()
        assert (len(state["workers"]), state["settings"]["timeout"]) == (2, 7.0)
        with grpc.insecure_channel(f"127.0.0.1:{port_of(pod.objects, 'grpc')}") as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="square"))
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert pod.container.terminate() == 0


def test_an_inference_service_speaks_protocol_v2() -> None:
    with started("Tensor", kind="kserve") as pod:
        pod.container.until("ready")
        assert probed(pod) == [200, 200]
        url = f"http://127.0.0.1:{pod.container.spec['ports'][0]['containerPort']}/v2"
        # The name by which KServe's clients ask is that of the InferenceService.
        name = of_kind(pod.objects, "InferenceService")["metadata"]["name"]
        assert httpx.get(f"{url}/health/ready").status_code == 200
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}
        answer = httpx.post(f"{url}/models/{name}/infer", json={"inputs": [tensor]}).json()
        assert answer["outputs"][0]["data"] == [2.0, 5.0]
        assert pod.container.terminate() == 0
