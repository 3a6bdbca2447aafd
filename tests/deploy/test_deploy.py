"""The files of deploy/: the objects are valid, and compose starts what there is. That they are current is tested with the generated pages."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from jsonschema import Draft7Validator
from tests.deploy.kit import Object, image_of_docker
from tests.deploy.schemas import check
from tests.documentation.pages import ROOT
from tests.late import check_jsonschema, needs_kserve
from tests.served import CLEAN

from weir.bench.vectors import reserve_ports

DEPLOY = ROOT / "deploy"


def read(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=needs_kserve if path.stem == "kserve" else ())
        for path in sorted(DEPLOY.glob("*.yaml"))
    ],
)
def test_its_objects_are_valid(path: Path) -> None:
    if path.name == "compose.yaml":
        schema = Path(check_jsonschema.builtin_schemas.__file__).parent / "vendor" / "compose-spec.json"
        Draft7Validator(json.loads(schema.read_text())).validate(read(path.name))
        return
    objects: list[Object] = list(yaml.safe_load_all(path.read_text()))
    assert objects
    for each in objects:
        check(each)


def test_compose_starts_a_server_that_prometheus_finds() -> None:
    """Docker is not there to be asked, so the process is started as it would: the image's command and variables, and compose's words."""
    compose, prometheus = read("compose.yaml"), read("prometheus/prometheus.yaml")
    service = compose["services"]["weir"]
    (program, *entry), variables = image_of_docker()
    assert program == "weir" and variables["WEIR_PORT"] == "8000"
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"weir:{variables['WEIR_PORT']}"]}]
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert not [word for word in service["command"] if word.startswith("--drain-timeout")]
    assert service["stop_grace_period"] == "45s"  # 30 to drain, fifteen to end
    assert any(each.startswith("./models:/srv/models") for each in service["volumes"])
    with reserve_ports(1) as (port,):
        process = subprocess.Popen(
            [sys.executable, "-m", "weir", *entry, *service["command"]], cwd=DEPLOY / "models", stderr=subprocess.PIPE, text=True,
            env={**CLEAN, **variables, "WEIR_PORT": str(port)}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            next(line for line in process.stderr if json.loads(line)["event"] == "ready")  # the image has it log JSON
            url = f"http://127.0.0.1:{port}"
            assert httpx.post(f"{url}/infer/square", json=3).json() == 9
            assert "weir_waiting_rows" in httpx.get(f"{url}{job.get('metrics_path', '/metrics')}").text
            process.send_signal(signal.SIGTERM)
            assert process.wait(int(service["stop_grace_period"].removesuffix("s"))) == 0
        finally:
            process.kill()
            process.communicate()


def test_the_files_of_compose_are_there_and_name_each_other() -> None:
    services = read("compose.yaml")["services"]
    mounted = {}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])  # nothing listens beyond this machine
        for volume in service["volumes"]:
            here, there, *_ = volume.split(":")
            if here.startswith("."):
                assert (DEPLOY / here).exists()
                mounted[there] = DEPLOY / here
    assert mounted[read("prometheus/prometheus.yaml")["rule_files"][0]] == DEPLOY / "chart" / "rules.yaml"
    assert "--config.file=/etc/prometheus/prometheus.yaml" in services["prometheus"]["command"]
    (provider,) = read("grafana/provisioning/dashboards/weir.yaml")["providers"]
    dashboard = f"{provider['options']['path']}/weir.json"
    assert mounted[dashboard] == DEPLOY / "grafana" / "weir.json"
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
    (source,) = read("grafana/provisioning/datasources/weir.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and "127.0.0.1:9090:9090" in services["prometheus"]["ports"]
    assert source["jsonData"]["timeInterval"] == read("prometheus/prometheus.yaml")["global"]["scrape_interval"]


def test_rules_ask_for_the_job_of_prometheus() -> None:
    (job,) = read("prometheus/prometheus.yaml")["scrape_configs"]
    for group in read("chart/rules.yaml")["groups"]:
        for rule in group["rules"]:
            assert f'job="{job["job_name"]}"' in rule["expr"]
