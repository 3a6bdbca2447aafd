"""The objects are valid, belong together, and have the times that fit each other."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from tests.documentation.pages import ROOT
from tests.manifests.kit import Object, of_kind, pod_of, printed
from tests.manifests.schemas import check

from weir.errors import SettingsError
from weir.manifests import read_command, read_manifest
from weir.manifests.kubernetes import USER, documents

TARGET = "models:Square"
CASES = {
    "plain": [],
    "named": ["--object-name=one", "--namespace=team", "--label=team=vision", "--label=example.com/tier=", "--replicas=3"],
    "keda": ["--replicas=2..10", "--target-latency=0.05", "--monitor"],
    "everything": [
        "--replicas=1..4", "--target-waiting-rows=9", "--grpc-port=8001", "--tls-certfile=/tls/cert", "--api-key-secret=keys", "--secret=more", "--gpus=2",
        "--cpu=500m", "--memory=2Gi", "--monitor", "--metrics-namespace=ours", "--max-batch-size=32", "--workers=2", "--drain-timeout=7.5", "--start-timeout=33",
        "--node-selector=gpu=h100", "--toleration=nvidia.com/gpu:NoSchedule", "--toleration=team=vision",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> dict[tuple[str, str], list[Object]]:
    cases = [(kind, name, words) for kind in ("kubernetes", "kserve") for name, words in CASES.items()]
    return {(kind, name): printed(kind, TARGET, *words, env={"WEIR_TIMEOUT": "5"}) for kind, name, words in cases}


Made = dict[tuple[str, str], list[Object]]


def test_every_object_is_valid(made: Made) -> None:
    kinds = set()
    for objects in made.values():
        for each in objects:
            check(each)
            kinds.add(each["kind"])
        check(pod_of(objects))
    assert kinds == {
        "Deployment", "Service", "PodDisruptionBudget", "ScaledObject", "PodMonitor", "PrometheusRule", "ServingRuntime", "InferenceService",
    }  # fmt: skip


TOML = (
    '[models.a]\ntarget = "models:Square"\nworkers = 3\n[models.b]\ntarget = "models:Square"\nneeds_memory = "3GiB"\n'
)
ON_DEMAND = {"model_repository": "/m", "model_control": "on-demand", "model_memory": "15.5GiB"}


@pytest.mark.parametrize(
    ("flags", "stated", "cpu", "memory"),
    [
        ({}, {}, "1", "1Gi"), ({"fronts": "1"}, {}, "1", "1Gi"), ({"fronts": "4"}, {}, "5", "1Gi"),
        ({"workers": "4"}, {}, "4", "2560Mi"), ({"workers": "0..2"}, {"cpu": "3"}, "3", "1536Mi"),
        ({"workers": "4", "needs_memory": "100MB"}, {}, "4", "608Mi"),
        ({"workers": "8", "executor": "ray", "ray_address": "head:6379"}, {}, "1", "4Gi"),
        ({"config": TOML}, {}, "4", "5Gi"), ({"config": TOML}, {"memory": "2Gi"}, "4", "2Gi"), (ON_DEMAND, {}, "1", "16Gi"),
    ],
)  # fmt: skip
def test_a_pod_requests_what_its_workers_need(
    flags: dict[str, str], stated: dict[str, str], cpu: str, memory: str, tmp_path: Path
) -> None:
    texts = {name: [text] for name, text in flags.items() if name != "config"}
    (tmp_path / "weir.toml").write_text(flags.get("config", ""))
    targets = [] if "config" in flags or "model_repository" in flags else [TARGET]
    command = read_command(targets, texts, {}, str(tmp_path / "weir.toml"))
    manifest = read_manifest(command, {"image": ["own:1"], **{name: [text] for name, text in stated.items()}})
    assert (manifest.cpu, manifest.memory) == (cpu, memory)


def test_an_image_must_be_named() -> None:
    with pytest.raises(SettingsError, match=r"^--image: not stated; name an image"):
        read_manifest(read_command([TARGET], {}, {}, None), {})


@pytest.mark.parametrize("kind", ["kubernetes", "kserve"])
def test_a_changed_file_of_settings_replaces_the_pods(kind: str, tmp_path: Path) -> None:
    def annotations(text: str) -> Any:
        (tmp_path / "weir.toml").write_text(text)
        pod = pod_of(printed(kind, "--config=weir.toml", cwd=tmp_path))
        return (pod["spec"] if kind == "kserve" else pod["metadata"])["annotations"]

    first, same, other = annotations(TOML), annotations(TOML), annotations(TOML + "max_batch_size = 8\n")
    assert first == same and first != other


def test_pods_run_where_they_may(made: Made) -> None:
    for kind in ("kubernetes", "kserve"):
        pod = pod_of(made[kind, "everything"])["spec"]
        assert pod["nodeSelector"] == {"gpu": "h100"}
        assert pod["tolerations"] == [
            {"operator": "Exists", "key": "nvidia.com/gpu", "effect": "NoSchedule"},
            {"operator": "Equal", "key": "team", "value": "vision"},
        ]
        limits = {"memory": "2Gi", "nvidia.com/gpu": "2"}
        assert pod["containers"][0]["resources"] == {"requests": {"cpu": "500m", **limits}, "limits": limits}


def test_something_else_may_collect_the_metrics() -> None:
    for kind in ("kubernetes", "kserve"):
        objects = printed(kind, TARGET, "--replicas=1..2", "--no-monitor")
        assert "PodMonitor" not in [each["kind"] for each in objects]


def test_the_objects_find_each_other(made: Made) -> None:
    for (kind, name), objects in made.items():
        called = "one" if name == "named" else "square"
        labels = {"team": "vision", "example.com/tier": ""} if (kind, name) == ("kubernetes", "named") else {}
        assert all(labels.items() <= each["metadata"].get("labels", {}).items() for each in objects)
        assert {each["metadata"].get("namespace") for each in objects} == {"team" if name == "named" else None}
        if kind == "kserve":
            service, runtime = of_kind(objects, "InferenceService"), of_kind(objects, "ServingRuntime")
            assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]
            assert service["metadata"]["name"] == called
            formats = [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
            assert service["spec"]["predictor"]["model"]["modelFormat"]["name"] in formats
            assert service["spec"]["predictor"]["model"]["protocolVersion"] in runtime["spec"]["protocolVersions"]
            continue
        labels = pod_of(objects)["metadata"]["labels"]
        selector = of_kind(objects, "Deployment")["spec"]["selector"]["matchLabels"]
        assert selector.items() <= labels.items()
        assert of_kind(objects, "Service")["spec"]["selector"] == selector
        assert of_kind(objects, "PodDisruptionBudget")["spec"]["selector"] == {"matchLabels": selector}
        (container,) = pod_of(objects)["spec"]["containers"]
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        ports = of_kind(objects, "Service")["spec"]["ports"]
        assert {each["targetPort"]: each["port"] for each in ports} == named
        if name in ("keda", "everything"):
            assert of_kind(objects, "ScaledObject")["spec"]["scaleTargetRef"]["name"] == called
            assert "replicas" not in of_kind(objects, "Deployment")["spec"]
            monitor = of_kind(objects, "PodMonitor")["spec"]
            assert monitor["selector"]["matchLabels"].items() <= labels.items()
            assert labels[monitor["jobLabel"]] == called  # the queries ask for this job
            assert monitor["podMetricsEndpoints"][0]["port"] in named


def test_the_times_of_a_pod_fit_each_other(made: Made) -> None:
    for (_, name), objects in made.items():
        pod = pod_of(objects)["spec"]
        (container,) = pod["containers"]
        drain, load = (7.5, 33) if name == "everything" else (30, 300)
        before = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
        # docs/how-to/deploy.md: it ends by then, whatever hangs.
        assert pod["terminationGracePeriodSeconds"] > before + drain + 12
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] > load
        # A pod is out of its Service before it is restarted.
        ready, live = container["readinessProbe"], container["livenessProbe"]
        assert ready["periodSeconds"] * ready["failureThreshold"] < live["periodSeconds"] * live["failureThreshold"]
        assert startup["httpGet"] == ready["httpGet"] == {**live["httpGet"], "path": "/health/ready"}
        assert live["httpGet"]["path"] == "/health/live"
        assert live["httpGet"]["scheme"] == ("HTTPS" if name == "everything" else "HTTP")


def test_pods_run_without_rights_as_the_image_does(made: Made) -> None:
    assert f"--uid {USER} " in (ROOT / "Dockerfile").read_text()
    for objects in made.values():
        pod = pod_of(objects)["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsUser"] == USER and pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        # What the image's server writes is kept elsewhere.
        assert {each["mountPath"] for each in container["volumeMounts"]} == {"/home/weir/.cache", "/tmp"}
        assert {each["name"] for each in pod["volumes"]} == {each["name"] for each in container["volumeMounts"]}
        assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False


def test_what_scales(made: Made) -> None:
    scaled = of_kind(made["kubernetes", "keda"], "ScaledObject")["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (2, 10)
    first, second = scaled["triggers"]
    assert (first["metricType"], first["metadata"]["threshold"]) == ("AverageValue", "64")
    assert (second["metricType"], second["metadata"]["threshold"]) == ("Value", "0.05")
    predictor = of_kind(made["kserve", "everything"], "InferenceService")["spec"]["predictor"]
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (1, 4)
    assert [each["external"]["target"]["value"] for each in predictor["autoScaling"]["metrics"]] == ["9"]
    # A queue may hold what the workers take at once.
    objects = printed("kubernetes", TARGET, "--replicas=1..2", "--monitor", "--max-batch-size=32", "--workers=3")
    assert of_kind(objects, "ScaledObject")["spec"]["triggers"][0]["metadata"]["threshold"] == "96"


# What is written as YAML is read as what it was, by a reader of YAML 1.1 and by one of YAML 1.2.


TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text("-:#?&*!|>'\"%@`{}[],= \n\ty0x1.e_~", max_size=12)
# Readers make a text of surrogates of what no text can have; no setting holds one.
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def read_1_2(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


# What one reader or another takes for something else if it stands without quotes.
AMBIGUOUS = [
    "yes", "NO", "on", "off", "y", "N", "true", "null", "~", "", " a", "a ", "1", "-1", "0x1f", "1_000", "12:30:45", "2026-11-23", "1e3", "1.5", ".5",
    ".inf", "<<", "=", "a: b", "a #b", "#b", "- a", "-", "?", "a:", "{a}", "[a]", "*a", "&a", "!a", "%a", "@a", "`a", "|", ">", "'a'", '"', "\\", "a\nb",
    "a\n", "\n", "a\n\nb\n", "\u2028", "\x85", "\x7f", "\ufeff", "é", "日本", "🎉", "---", "...", "--- a", "--port=8000", "--host=::", "square:Square",
    "a--b", "1Gi", "50m", "key=value", "http://x:9090/a?b=c", "sum(x{a=\"b\"})\n",
]  # fmt: skip


@example([{text: [text, {text: text}] for text in AMBIGUOUS}])
@given(st.lists(PLAIN, min_size=1, max_size=3))
def test_what_is_written_is_read_back(objects: list[Any]) -> None:
    assert list(yaml.safe_load_all(documents(objects))) == objects
    assert [read_1_2(documents([each])) for each in objects] == objects
