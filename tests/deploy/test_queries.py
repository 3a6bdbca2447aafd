"""Every query that we hand out is PromQL, and asks for metrics and labels that a real server has."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.containers import Container
from tests.deploy.kit import Object, rendered
from tests.documentation.pages import ROOT

from weir.bench.vectors import reserve_ports
from weir.frontends.http.application import NumbersCollector, held
from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.telemetry.exposition import Exposition
from weir.telemetry.recorder import Metrics

DASHBOARD = ROOT / "deploy" / "grafana" / "weir.json"
OF_PROMETHEUS = {"job", "instance", "namespace"}  # the labels that Prometheus itself adds
ENDINGS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "unknown": ("",)}


class Asked(NamedTuple):
    """A metric that a query asks for, with the labels by which it chooses or groups."""

    metric: str
    labels: frozenset[str]


def asked_by(query: str) -> Iterator[Asked]:
    """Yield what `query` asks for. Raises ValueError if it is no PromQL."""
    selectors: list[Any] = []
    grouped: set[str] = set()

    def visit(expression: Any) -> None:
        if isinstance(expression, promql.AggregateExpr) and expression.modifier is not None:
            grouped.update(expression.modifier.labels)
        vector = expression.vector_selector if isinstance(expression, promql.MatrixSelector) else expression
        if isinstance(vector, promql.VectorSelector):
            selectors.append(vector)

    promql.walk(promql.parse(query), visit)
    for selector in selectors:
        yield Asked(selector.name, frozenset({each.name for each in selector.matchers.matchers} | grouped))


def strings(value: Any, *keys: str) -> Iterator[str]:
    """Yield the texts that `value`, as YAML or JSON has it, holds under any of `keys`."""
    if isinstance(value, dict):
        yield from (each for key, each in value.items() if key in keys and isinstance(each, str))
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(inner, *keys)


def queries_of(path: Path) -> list[str]:
    if path.suffix == ".json":
        found = strings(json.loads(path.read_text()), "expr")
    else:
        found = strings(list(yaml.safe_load_all(path.read_text())), "expr", "query")
    return [each.replace("$__rate_interval", "1m") for each in found]  # Grafana puts a duration there


FILES = [
    each
    for each in sorted((ROOT / "deploy").rglob("*.*"))
    if each.suffix in (".yaml", ".json") and each.parent.name != "templates" and queries_of(each)
]


@pytest.fixture(scope="module")
def names() -> Iterator[set[str]]:
    """The names of all metrics at /metrics of what the chart starts."""
    with reserve_ports(1) as (port,):
        objects = rendered({"models": ["square.py:Square"], "port": port})
        with Container(objects, ROOT / "deploy" / "models") as pod:
            pod.until("ready")
            url = f"http://127.0.0.1:{port}"
            assert httpx.post(f"{url}/infer/square", json=3).json() == 9
            text = httpx.get(f"{url}/metrics").text
        families = list(text_string_to_metric_families(text))
        # The reader calls a family of one sample by its name in the text, where counters end in _total.
        yield {family.name.removesuffix(ending) + ending for family in families for ending in ENDINGS[family.type]}


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """The labels of each metric of Weir."""
    families = [
        *Exposition(Metrics(), lambda frontend, error: "").collect(),
        *NumbersCollector(lambda: held(Account(HttpSettings()))).collect(),
    ]
    return {
        family.name + ending: {*getattr(family, "_labelnames", ()), *(("le",) if ending == "_bucket" else ())}
        for family in families for ending in ENDINGS[family.type]
    }  # fmt: skip


def test_there_are_queries_in_all_files_that_ask_prometheus() -> None:
    names = {path.relative_to(ROOT / "deploy").as_posix() for path in FILES}
    assert {"kserve.yaml", "chart/rules.yaml", "grafana/weir.json"} <= names


def check_queries(queries: Iterable[str], names: set[str], labels: dict[str, set[str]]) -> None:
    """Assert that each of `queries` asks for metrics in `names`, or for those that rules record, and chooses by their labels."""
    rules = yaml.safe_load((ROOT / "deploy" / "chart" / "rules.yaml").read_text())
    recorded = {"up", *strings(rules, "record")}
    for query in queries:
        wanted = list(asked_by(query))
        assert wanted, query
        for each in wanted:
            assert each.metric in names | recorded, query
            chosen = {label for label in each.labels if label != "le" or each.metric.endswith("_bucket")}
            assert chosen - OF_PROMETHEUS <= labels.get(each.metric, {"le"}), query


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_queries_ask_for_what_a_server_has(path: Path, names: set[str], labels: dict[str, set[str]]) -> None:
    check_queries(queries_of(path), names, labels)


SCALED = {
    "models": ["a:B"], "autoscaling": {"enabled": True, "by": "keda", "targetLatency": 0.05}, "monitoring": {"enabled": True},
}  # fmt: skip


def test_queries_of_the_chart_ask_for_its_own_pods(names: set[str], labels: dict[str, set[str]]) -> None:
    queries = list(strings(rendered(SCALED), "expr", "query"))
    check_queries(queries, names, labels)
    assert all('job="square",namespace="team"' in query for query in queries)
    of_hpa: Object = {**SCALED, "autoscaling": {"enabled": True}}
    (metric,) = [each["spec"]["metrics"][0] for each in rendered(of_hpa) if each["kind"] == "HorizontalPodAutoscaler"]
    assert metric["pods"]["metric"]["name"] in names


def test_another_namespace_of_metrics_can_be_chosen() -> None:
    objects = rendered({**SCALED, "settings": {"metrics_namespace": "ours"}})
    asked = [each for query in strings(objects, "expr", "query") for each in asked_by(query)]
    assert {each.metric.partition("_")[0] for each in asked} == {"ours", "up"}


def test_the_dashboard_shows_every_metric_of_a_server(names: set[str]) -> None:
    def families(of: Iterable[str]) -> set[str]:
        return {re.sub(r"_(bucket|sum|count)$", "", name) for name in of if name.startswith("weir_")}

    shown = (each.metric for query in queries_of(DASHBOARD) for each in asked_by(query))
    assert families(names) - families(shown) == set(), "docs/grafana.py draws no panel of this metric"


def test_the_panels_of_the_dashboard_lie_beside_each_other() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or {each["refId"] for each in panel["targets"]}
    variables = {each["name"] for each in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__rate_interval", "__all"} <= variables
