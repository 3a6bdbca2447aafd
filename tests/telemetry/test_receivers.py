"""VictoriaMetrics, a real receiver of OTLP, has what /metrics shows. `make test-otlp` takes it from Debian's package."""

import json
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from deploy.image import MACHINES, apt_in, run
from prometheus_client.openmetrics import parser as openmetrics
from tests.documentation.pages import ROOT
from tests.served import serving, until
from tests.telemetry.test_otlp import ROW, SIMPLE

from weir.bench.vectors import reserve_ports

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]  # the last value by name and labels
OF_RESOURCE = {"service.name", "service.instance.id", "service.version"} | {
    f"telemetry.sdk.{each}" for each in ("language", "name", "version")
}


def victoria_metrics(work: Path) -> Path:
    """Return the path of the program, which is unpacked once."""
    folder = ROOT / ".venvs" / "victoria-metrics"
    if not folder.exists():
        apt = apt_in(work, MACHINES[platform.machine()])
        subprocess.run([*apt, "download", "victoria-metrics"], cwd=work, check=True)
        (package,) = work.glob("*.deb")
        run("dpkg-deb", "--extract", package, work / "unpacked")
        folder.parent.mkdir(exist_ok=True)
        shutil.move(work / "unpacked", folder)  # which may be on another disk
    return folder / "usr/bin/victoria-metrics"


@contextmanager
def receiving(work: Path) -> Iterator[httpx.Client]:
    """Run VictoriaMetrics."""
    program = victoria_metrics(work)
    with reserve_ports(1) as (port,):
        flags = [f"-httpListenAddr=127.0.0.1:{port}", f"-storageDataPath={work / 'data'}", "-loggerLevel=ERROR"]
        with (
            subprocess.Popen([str(program), *flags]) as process,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
        ):
            try:
                until(lambda: answers(client))
                yield client
            finally:
                process.kill()


def answers(client: httpx.Client) -> bool:
    """Return whether the receiver listens."""
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def received(client: httpx.Client) -> Series:
    """Return what the receiver has."""
    client.get("/internal/force_flush")
    found: Series = {}
    for line in client.post("/api/v1/export", data={"match[]": '{__name__!=""}'}).text.splitlines():
        series = json.loads(line)
        labels = dict(series["metric"])
        assert labels["service.name"] == "weir"
        name = labels.pop("__name__")
        found[name, labels_of(labels)] = series["values"][-1]
    return found


def labels_of(labels: dict[str, str]) -> frozenset[tuple[str, str]]:
    """Return the labels without those of the resource; bounds are written as numbers."""
    return frozenset(
        (name, str(float(text)) if name == "le" else text) for name, text in labels.items() if name not in OF_RESOURCE
    )


def shown(text: str) -> Series:
    """Return what /metrics shows, but what the process has used. OTLP has no suffix of counters."""
    return {
        (sample.name.removesuffix("_total"), labels_of(sample.labels)): sample.value
        for family in openmetrics.text_string_to_metric_families(text)
        for sample in family.samples
        if not family.name.startswith(("process_", "weir_connections", "weir_policy_"))
    }


@pytest.mark.otlp
@pytest.mark.parametrize("fronts", ["1", "2"])
def test_a_real_receiver_has_what_is_shown(fronts: str, tmp_path: Path) -> None:
    with receiving(tmp_path) as receiver:
        env = {
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{receiver.base_url}/opentelemetry/v1/metrics",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
        }
        with serving(f"{SIMPLE}:Simple", "--fronts", fronts, env=env) as (_, client):
            good = [client.post("/infer/simple", json={"INPUT0": [ROW], "INPUT1": [ROW]}) for _ in range(5)]
            bad = client.post("/infer/simple", content=b"no JSON")
            assert [each.status_code for each in [*good, bad]] == [200] * 5 + [400]
            text = client.get("/metrics", headers={"accept": "application/openmetrics-text"}).text
            wanted = shown(text)
            until(
                lambda: received(receiver).get(
                    ("weir_requests", labels_of({"model": "simple", "frontend": "http", "code": "400"}))
                )
            )
            found = received(receiver)
    assert len(wanted) > 150
    assert {each: found.get(each) for each in wanted} == pytest.approx(wanted)
    names = {name for name, _ in found}
    assert {"process.uptime", "http.server.request.duration_bucket"} <= names
