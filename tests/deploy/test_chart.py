"""The objects that helm makes of the chart are valid, belong together, and run what its values state; wrong values are refused before that."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.deploy.containers import Container
from tests.deploy.kit import CHART, Object, command_of, image_of_docker, of_kind, pod_of, rendered, run_helm
from tests.deploy.schemas import check
from tests.documentation.pages import ROOT
from tests.rings import subcases

import weir
from weir.bench.vectors import reserve_ports
from weir.serving import END_LIMIT

TARGET = "models.py:Square"
KSERVE = ROOT / "deploy" / "kserve.yaml"
TOML = '[models.a]\ntarget = "models:Square"\nworkers = 3\n'
EVERYTHING: Object = {
    "models": [TARGET, "b:C"],
    "settings": {
        "max_batch_size": 32, "arena_bytes": 2_000_000_000, "timeout": 2.5, "metrics": True, "metrics_namespace": "ours", "route": ["/a", "/b"],
        "policy": "size-or-delay:size=32,delay=5ms", "device_group": "gpu 0", "tls_certfile": "/tls/cert", "load": ["all"], "workers": "1..3", "fronts": 2,
        "model_control": "on-demand", "liveness": "process",
    },
    "config": TOML, "grpcPort": 8001, "drainTimeout": 7.5, "startTimeout": 33, "apiKeySecret": "keys", "secrets": ["more"], "gpus": 2,
    "env": [{"name": "A", "value": "1"}], "nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "volumes": [{"name": "tls", "secret": {"secretName": "tls"}}], "volumeMounts": [{"name": "tls", "mountPath": "/tls"}],
    "image": {"repository": "registry.example.com/square", "tag": "1", "pullSecrets": ["pull"]}, "podLabels": {"team": "vision"},
    "autoscaling": {"enabled": True, "by": "keda", "targetLatency": 0.05, "targetWaitingRows": 9}, "monitoring": {"enabled": True, "labels": {"release": "mon"}},
    "service": {"annotations": {"a": "b"}}, "podAnnotations": {"a": "b"}, "probes": {"startup": {"failureThreshold": 40}},
    "podDisruptionBudget": {"maxUnavailable": "50%"}, "global": {"of": "a chart that this one is a part of"},
}  # fmt: skip
CASES: dict[str, Object] = {
    "plain": {"models": [TARGET]},
    "scaled": {"models": [TARGET], "autoscaling": {"enabled": True, "minReplicas": 2}, "podDisruptionBudget": {"enabled": False}},
    "everything": EVERYTHING,
}  # fmt: skip
KINDS = {
    "plain": ["Deployment", "PodDisruptionBudget", "Service"],
    "scaled": ["Deployment", "HorizontalPodAutoscaler", "Service"],
    "everything": ["ConfigMap", "Deployment", "PodDisruptionBudget", "PrometheusRule", "ScaledObject", "Service", "ServiceMonitor"],
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> dict[str, list[Object]]:
    return {name: rendered(values) for name, values in CASES.items()}


Made = dict[str, list[Object]]


def test_every_object_is_valid_and_finds_the_others(made: Made) -> None:
    for name, objects in made.items():
        assert sorted(each["kind"] for each in objects) == KINDS[name]
        for each in (*objects, pod_of(objects)):
            check(each)
        selector = {"app.kubernetes.io/name": "weir", "app.kubernetes.io/instance": "square"}
        (container,) = pod_of(objects)["spec"]["containers"]
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        service = of_kind(objects, "Service")
        assert {each["targetPort"]: each["port"] for each in service["spec"]["ports"]} == named
        assert selector.items() <= pod_of(objects)["metadata"]["labels"].items()
        assert selector.items() <= service["metadata"]["labels"].items()  # of which the ServiceMonitor takes the job
        for each in objects:
            if each["kind"] in ("Deployment", "PodDisruptionBudget", "ServiceMonitor"):
                assert each["spec"]["selector"] == {"matchLabels": selector}
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in pod_of(objects)["spec"]["volumes"]}


def test_settings_become_flags(made: Made) -> None:
    assert command_of(made["plain"]) == [
        "serve", TARGET, "--drain-timeout=30", "--host=0.0.0.0", "--liveness=models", "--log-format=json", "--port=8000", "--start-timeout=300",
    ]  # fmt: skip
    assert command_of(made["everything"]) == [
        "serve", TARGET, "b:C", "--config=/etc/weir/weir.toml", "--arena-bytes=2000000000", "--device-group=gpu 0", "--drain-timeout=7.5", "--fronts=2",
        "--grpc-port=8001", "--host=0.0.0.0", "--liveness=process", "--load=all", "--log-format=json", "--max-batch-size=32", "--metrics",
        "--metrics-namespace=ours", "--model-control=on-demand", "--policy=size-or-delay:size=32,delay=5ms", "--port=8000", "--route=/a", "--route=/b",
        "--start-timeout=33", "--timeout=2.5", "--tls-certfile=/tls/cert", "--workers=1..3",
    ]  # fmt: skip
    assert of_kind(made["everything"], "ConfigMap")["data"] == {"weir.toml": TOML}
    texts = rendered({"command": ["weir", "embed", "serve"], "settings": {"threads": 4}})
    # The server itself would start one for each CPU of the node.
    assert {"--workers=1", "--threads=4", "--bulk-workers=0"} < set(command_of(texts))


def test_a_pod_is_as_its_values_state(made: Made) -> None:
    pod = pod_of(made["everything"])
    (container,) = pod["spec"]["containers"]
    key = {"name": "keys", "key": "api-key"}
    assert container["image"] == "registry.example.com/square:1"
    assert container["env"] == [{"name": "WEIR_API_KEY", "valueFrom": {"secretKeyRef": key}}, EVERYTHING["env"][0]]
    assert container["envFrom"] == [{"secretRef": {"name": "more"}}]
    assert {key: pod["spec"][key] for key in ("nodeSelector", "tolerations")} == {
        key: EVERYTHING[key] for key in ("nodeSelector", "tolerations")
    }
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert container["startupProbe"]["failureThreshold"] == 40
    (endpoint,) = of_kind(made["everything"], "ServiceMonitor")["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["authorization"]) == ("https", {"credentials": key})
    assert "release" in of_kind(made["everything"], "ServiceMonitor")["metadata"]["labels"]
    assert pod_of(made["plain"])["metadata"]["annotations"]["prometheus.io/port"] == "8000"


@subcases(
    ("values", "cpu", "memory"),
    [
        ({}, "1", "1024Mi"), ({"settings": {"fronts": 1}}, "1", "1024Mi"), ({"settings": {"fronts": 4}}, "5", "1024Mi"),
        ({"settings": {"workers": 4}}, "4", "2560Mi"), ({"settings": {"workers": "0..2"}}, "2", "1536Mi"),
        ({"models": ["a:B", "c:D"], "settings": {"workers": 2}}, "4", "2560Mi"),
        ({"settings": {"model_memory": "1GiB"}, "resources": {"requests": {"cpu": "3"}, "limits": {"memory": "2Gi"}}}, "3", "2Gi"),
    ],
)  # fmt: skip
def test_a_pod_requests_what_its_workers_need(values: Object, cpu: str, memory: str) -> None:
    resources = pod_of(rendered({"models": [TARGET], **values}))["spec"]["containers"][0]["resources"]
    assert (resources["requests"]["cpu"], resources["limits"]["memory"]) == (cpu, memory)
    assert "cpu" not in resources["limits"]


@subcases(
    ("strategy", "written"),
    [
        ({}, {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}),
        (
            {"rollingUpdate": {"maxSurge": "0%", "maxUnavailable": "50%"}},
            {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "0%", "maxUnavailable": "50%"}},
        ),
        ({"type": "Recreate"}, {"type": "Recreate"}),
    ],
)
def test_pods_are_replaced_as_the_strategy_states(strategy: Object, written: Object) -> None:
    objects = rendered({"models": [TARGET], "gpus": 1, "strategy": strategy})
    check(of_kind(objects, "Deployment"))
    assert of_kind(objects, "Deployment")["spec"]["strategy"] == written


def test_a_changed_file_of_settings_replaces_the_pods() -> None:
    texts = (TOML, TOML, TOML + "max_batch_size = 8\n")
    first, same, other = (pod_of(rendered({"config": text}))["metadata"]["annotations"] for text in texts)
    assert first == same and first != other


def test_the_times_of_a_pod_fit_each_other(made: Made) -> None:
    of_kserve = list(yaml.safe_load_all(KSERVE.read_text()))
    for objects, drain, load in ((made["plain"], 30, 300), (made["everything"], 7.5, 33), (of_kserve, 30, 300)):
        pod = pod_of(objects)["spec"]
        (container,) = pod["containers"]
        before = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
        assert pod["terminationGracePeriodSeconds"] > before + drain + END_LIMIT
        startup, ready, live = (container[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
        assert startup["periodSeconds"] * startup["failureThreshold"] > load
        # A pod is out of its Service before it is restarted.
        assert ready["periodSeconds"] * ready["failureThreshold"] < live["periodSeconds"] * live["failureThreshold"]
        assert startup["httpGet"] == ready["httpGet"] == {**live["httpGet"], "path": "/health/ready"}
        assert live["httpGet"]["path"] == "/health/live"
        assert live["httpGet"]["scheme"] == ("HTTPS" if objects is made["everything"] else "HTTP")


def test_pods_run_without_rights_as_the_image_does(made: Made) -> None:
    assert "--uid 1000 " in (ROOT / "Dockerfile").read_text()
    for objects in (*made.values(), list(yaml.safe_load_all(KSERVE.read_text()))):
        pod = pod_of(objects)["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsUser"] == 1000 and pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        # What the image's server writes is kept elsewhere.
        _, variables = image_of_docker()
        assert {variables["XDG_CACHE_HOME"], "/tmp"} <= {each["mountPath"] for each in container["volumeMounts"]}
        assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False


def test_what_scales(made: Made) -> None:
    scaled = of_kind(made["everything"], "ScaledObject")["spec"]
    first, second = scaled["triggers"]
    assert (first["metricType"], first["metadata"]["threshold"]) == ("AverageValue", "9")
    assert (second["metricType"], second["metadata"]["threshold"]) == ("Value", "0.05")
    of_pods = of_kind(made["scaled"], "HorizontalPodAutoscaler")["spec"]
    assert (of_pods["minReplicas"], of_pods["maxReplicas"]) == (2, 10)
    for name in ("scaled", "everything"):  # an autoscaler's choice would be undone whenever the chart is applied again
        assert "replicas" not in of_kind(made[name], "Deployment")["spec"]
    alerts = of_kind(made["everything"], "PrometheusRule")["spec"]["groups"]
    assert [rule["alert"] for rule in alerts[-1]["rules"]] == ["WeirTooSlow"]


@subcases(
    ("values", "says"),
    [
        ({"settings": {"max_bach_size": 1}}, "additional properties 'max_bach_size' not allowed"),
        ({"settings": {"api_key": "s3cret"}}, "additional properties 'api_key' not allowed"),
        ({"settings": {"port": 1}}, "additional properties 'port' not allowed"),
        ({"settings": {"fronts": "auto"}}, "'/settings/fronts': got string, want integer"),
        ({"settings": {"ranges": {"a": 1}}}, "'/settings/ranges': got object, want"),
        ({"settings": {"model_memory": "4GiB"}}, "settings.model_memory=4GiB: state resources"),
        ({"replicas": 1.5}, "'/replicas': got number, want integer"),
        ({"strategy": {"type": "Replace"}}, "'/strategy/type': value must be one of 'RollingUpdate', 'Recreate'"),
        ({"strategy": {"rollingUpdate": {"maxSurge": "one"}}}, "'/strategy/rollingUpdate/maxSurge': 'one' does not match pattern"),
        ({"strategy": {"rollingUpdate": {"maxSurge": 0}}}, "strategy.rollingUpdate: maxSurge and maxUnavailable are both 0"),
        ({"replica": 2}, "additional properties 'replica' not allowed"),
        ({"models": "a:B"}, "'/models': got string, want array"),
        ({"grpcPort": 0}, "'/grpcPort': minimum: got 0, want 1"),
        ({"port": 0}, "'/port': minimum: got 0, want 1"),
        ({"config": 'workers = 2\napi_key = "s3cret"\n'}, "config: api_key: state it as a value or in settings"),
        ({"config": "[models.a]\n'drain_timeout' = 90\n"}, "config: drain_timeout: state it"),
        ({"autoscaling": {"by": "queue"}}, "'/autoscaling/by': value must be one of 'hpa', 'keda'"),
        ({"autoscaling": {"enabled": True, "targetLatency": 0.1}}, "autoscaling.targetLatency: only by=keda"),
        ({"autoscaling": {"minReplicas": 0}}, "'/autoscaling/minReplicas': minimum: got 0, want 1"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(values: Object, says: str) -> None:
    done = run_helm(values)
    assert done.returncode != 0 and says in done.stderr and "s3cret" not in done.stderr, done.stderr


def test_the_values_of_the_docs_are_taken() -> None:
    page = (ROOT / "docs" / "how-to" / "deploy-on-kubernetes.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    for block in blocks:
        rendered(yaml.safe_load(block))


def test_the_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    semantic = re.sub(r"\.?(a|b|rc|dev)(\d+)$", r"-\1.\2", weir.__version__)
    assert (chart["version"], chart["appVersion"]) == (semantic, weir.__version__)
    image = pod_of(rendered({}))["spec"]["containers"][0]["image"]
    assert image.endswith(f":{weir.__version__}")


@contextmanager
def started(objects: list[Object], folder: Path = Path(__file__).parent) -> Iterator[Container]:
    with Container(objects, folder) as container:
        container.until("ready")
        yield container
        assert container.terminate() == 0


def test_a_deployment_serves_on_the_ports_of_its_service_and_drains() -> None:
    with reserve_ports(2) as (port, rpc):
        values = {"models": [TARGET], "port": port, "grpcPort": rpc, "settings": {"workers": 2, "timeout": 7}}
        with started(rendered(values)) as container:
            names = ("readinessProbe", "livenessProbe", "startupProbe")
            assert [container.probe(name).status_code for name in names] == [200] * 3
            url = f"http://127.0.0.1:{port}"
            assert httpx.post(f"{url}/infer/square", json=3).json() == 9
            state = httpx.get(f"{url}/models/square").json()
            assert (len(state["workers"]), state["settings"]["timeout"]) == (2, 7.0)
            with grpc.insecure_channel(f"127.0.0.1:{rpc}") as channel:
                asked = health_pb2.HealthCheckRequest(service="square")
                health = health_pb2_grpc.HealthStub(channel).Check(asked)
                assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_an_inference_service_speaks_protocol_v2() -> None:
    objects = list(yaml.safe_load_all(KSERVE.read_text()))
    runtime, service = of_kind(objects, "ServingRuntime"), of_kind(objects, "InferenceService")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    with reserve_ports(1) as (port,):
        words, model["args"] = model["args"], ["models.py:Tensor", f"--name={service['metadata']['name']}"]
        assert words == ["square:Square"]
        (container,) = runtime["spec"]["containers"]
        container["args"] = [word.replace("--port=8080", f"--port={port}") for word in container["args"]]
        with started(objects):
            url = f"http://127.0.0.1:{port}/v2"
            assert httpx.get(f"{url}/health/ready").status_code == 200
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}
            # The name by which KServe's clients ask is that of the InferenceService.
            response = httpx.post(f"{url}/models/{service['metadata']['name']}/infer", json={"inputs": [tensor]})
            assert response.json()["outputs"][0]["data"] == [2.0, 5.0]
