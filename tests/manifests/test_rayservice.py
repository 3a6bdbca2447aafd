"""The RayService is valid, says what it was told, and its application answers Ray's health checks. What Ray does with it: test_on_ray.py."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.documentation.pages import ROOT
from tests.manifests.kit import Object, of_kind, printed, refused
from tests.manifests.schemas import check

from weir.app import asgi
from weir.catalog.sources import ModelToServe
from weir.manifests import RAY
from weir.manifests.rayservice import _get as get

TARGET = "models:Square"


def config_of(objects: list[Object]) -> Any:
    return yaml.safe_load(of_kind(objects, "RayService")["spec"]["serveConfigV2"])


def test_it_is_valid_and_serves_what_was_configured(tmp_path: Path) -> None:
    model = f'[models.square]\ntarget = "{TARGET}"\nroute = "/sq"\ndrain_timeout = 60\n'
    (tmp_path / "weir.toml").write_text(f"max_batch_size = 8\n{model}")
    words = ["--param=depth=[1, 2]", "--explain", "--gpus=1", "--cpu=500m", "--namespace=team"]
    env = {"WEIR_PIPELINE_DEPTH": "2", "WEIR_MAX_BODY_SIZE": "5"}
    objects = printed("rayservice", "--config", tmp_path / "weir.toml", *words, env=env)
    check(objects[0])
    assert objects[0]["metadata"]["namespace"] == "team"
    (application,) = config_of(objects)["applications"]
    assert application["args"] == {
        "models": [
            {
                "target": TARGET, "name": "square", "params": {"depth": [1, 2]}, "routes": ["/sq"],
                "settings": {"drain_timeout": 60.0, "max_batch_size": 8, "pipeline_depth": 2},
            }
        ],
        "server": {"liveness": "models", "explain": True, "max_body_size": 5},
    }  # fmt: skip
    (deployment,) = application["deployments"]
    assert deployment["num_replicas"] == 1
    assert deployment["ray_actor_options"] == {"num_cpus": 0.5, "num_gpus": 1}
    assert deployment["max_ongoing_requests"] == 1024 + 8  # what its own queue and workers hold
    pod = objects[0]["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    assert 60 + 12 < deployment["graceful_shutdown_timeout_s"] < pod["terminationGracePeriodSeconds"]


def test_it_scales_as_ray_serve_does() -> None:
    objects = printed("rayservice", TARGET, "--replicas=2..5", "--max-batch-size=8", "--label=team=vision")
    check(objects[0])
    cluster = objects[0]["spec"]["rayClusterConfig"]
    (deployment,) = config_of(objects)["applications"][0]["deployments"]
    assert deployment["autoscaling_config"] == {"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 16}
    assert cluster["enableInTreeAutoscaling"] is True
    (group,) = cluster["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 5)
    assert group["template"]["metadata"]["labels"]["team"] == "vision"


def test_pods_have_the_code_and_the_key() -> None:
    objects = printed("rayservice", TARGET, "--secret=tokens", "--api-key-secret=keys", env={"WEIR_TIMEOUT": "5"})
    cluster = objects[0]["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        key = {"name": "WEIR_API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "api-key"}}}
        assert container["env"] == [{"name": "PYTHONPATH", "value": "/srv/models"}, key]
        assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
    assert config_of(objects)["applications"][0]["args"]["models"][0]["settings"]["timeout"] == 5.0


def test_the_image_has_the_version_of_ray_that_kuberay_is_given() -> None:
    assert re.findall(r"^ARG RAY=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE) == [RAY]
    assert printed("rayservice", TARGET)[0]["spec"]["rayClusterConfig"]["rayVersion"] == RAY


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "nothing to serve"),
        (["--model-repository=models"], "--model-repository: applies to a standalone server only"),
        ([TARGET, "--port=9000"], "--port: applies to a standalone server only"),
        ([TARGET, "--ray-version=latest"], "--ray-version='latest': must be a version"),
        ([TARGET, "--target-ongoing-requests=9"], "--target-ongoing-requests=9: nothing scales without a range"),
        ([TARGET, "--api-key=s3cret"], "--api-key: whoever reads a manifest"),
    ],
)
def test_what_ray_serve_cannot_have_is_refused(words: list[str], says: str) -> None:
    assert refused("rayservice", *words).startswith(says)


async def test_a_replica_is_as_healthy_as_its_server_is_live() -> None:
    model = ModelToServe("tests.manifests.models:Square", "sq", {}, [], {"executor": "inline", "max_batch_size": 2})
    app = asgi(model, liveness="models")
    assert await get(app, "/health/live") == (200, b'{"live":true}')
    assert (await get(app, "/health/ready"))[0] == 503  # nothing has started it
