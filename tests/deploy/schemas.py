"""Whether objects are what the platforms take.

Kubernetes' own objects are checked by the schemas that Kubernetes publishes (package kubernetes-validate), KServe's by the models of its
client. No client on PyPI that the tests could load knows the objects of KEDA and of the Prometheus Operator, so their schemas stand here: the fields that we use,
with the types and the rules of the published custom resource definitions (KEDA 2.16, operator 0.80). They are closed: a field that is misspelt, or in the
wrong place, is refused.
"""

import re
from typing import Any

from jsonschema import Draft202012Validator
from tests.deploy.kit import Object
from tests.late import kserve, kubernetes, kubernetes_validate

# Of Kubernetes: the oldest in which preStop may sleep without a feature gate, and the newest known here.
VERSIONS = ("1.32", "1.37")

_TEXT = {"type": "string"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_PERIODS = "".join(f"(([0-9]+){unit})?" for unit in ("y", "w", "d", "h", "m", "s", "ms"))
_DURATION = {"type": "string", "pattern": f"^(0|{_PERIODS})$"}


def _closed(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_METADATA = _closed("name", name=_TEXT, namespace=_TEXT, labels=_TEXTS, annotations=_TEXTS)
_SELECTOR = _closed(matchLabels=_TEXTS)
_COUNT = {"type": "integer", "minimum": 0}
_WINDOW = "stabilizationWindowSeconds"
_RULES = _closed(_WINDOW, **{_WINDOW: {**_COUNT, "maximum": 3600}})
_SCRAPED = _closed(
    port=_TEXT, path=_TEXT, interval=_DURATION, scheme={"enum": ["http", "https"]},
    authorization=_closed(type=_TEXT, credentials=_closed("key", name=_TEXT, key=_TEXT)), tlsConfig=_closed(insecureSkipVerify={"type": "boolean"}),
)  # fmt: skip
_SPECS = {
    "ScaledObject": _closed(
        "scaleTargetRef triggers",
        scaleTargetRef=_closed("name", name=_TEXT, kind=_TEXT, apiVersion=_TEXT),
        minReplicaCount=_COUNT,
        maxReplicaCount=_COUNT,
        pollingInterval=_COUNT,
        advanced=_closed(horizontalPodAutoscalerConfig=_closed(behavior=_closed(scaleUp=_RULES, scaleDown=_RULES))),
        triggers=_list(
            _closed(
                "type metadata",
                type={"const": "prometheus"},
                metricType={"enum": ["AverageValue", "Value", "Utilization"]},
                # The scaler's own parameters, all of them texts.
                metadata=_closed(
                    "serverAddress query threshold",
                    serverAddress=_TEXT, query=_TEXT, threshold={"type": "string", "pattern": r"^[0-9.e-]+$"}, ignoreNullValues={"enum": ["true", "false"]},
                ),
            )
        ),
    ),
    "ServiceMonitor": _closed("selector endpoints", jobLabel=_TEXT, selector=_SELECTOR, endpoints=_list(_SCRAPED)),
    "PodMonitor": _closed("selector podMetricsEndpoints", jobLabel=_TEXT, selector=_SELECTOR, podMetricsEndpoints=_list(_SCRAPED)),
    "PrometheusRule": _closed(
        groups=_list(
            _closed(
                "name",
                name={"type": "string", "minLength": 1},
                rules=_list(
                    _closed("expr", record=_TEXT, alert=_TEXT, expr=_TEXT, **{"for": _DURATION}, labels=_TEXTS, annotations=_TEXTS)
                ),
            )
        )
    ),
}  # fmt: skip
_APIS = {"ScaledObject": "keda.sh/v1alpha1"}


def _schema(kind: str, spec: dict[str, Any]) -> Draft202012Validator:
    named = {"apiVersion": {"const": _APIS.get(kind, "monitoring.coreos.com/v1")}, "kind": {"const": kind}}
    return Draft202012Validator(_closed("apiVersion kind metadata spec", **named, metadata=_METADATA, spec=spec))


SCHEMAS = {kind: _schema(kind, spec) for kind, spec in _SPECS.items()}

_PRIMITIVES: dict[str, type | tuple[type, ...]] = {
    "str": str, "int": int, "bool": bool, "object": object, "ResourceQuantity": (str, int), "V1beta1MetricQuantity": (str, int),
}  # fmt: skip


def check(each: Object) -> None:
    """Raise an error that says where `each` is not what its platform takes."""
    if each["kind"] in SCHEMAS:
        SCHEMAS[each["kind"]].validate(each)
    elif "kserve.io" in each["apiVersion"]:
        version = each["apiVersion"].rpartition("/")[2]
        _check_model(f"{version[0].upper()}{version[1:]}{each['kind']}", each, each["kind"])
    else:
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)


def _check_model(kind: str, value: Any, path: str) -> None:
    """Check `value` against the class, list or table that clients made by the OpenAPI generator call `kind`."""
    if inner := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        assert isinstance(value, list), path
        for place, each in enumerate(value):
            _check_model(inner[1], each, f"{path}[{place}]")
    elif inner := re.fullmatch(r"[Dd]ict[(\[]str, (.+)[)\]]", kind):
        assert isinstance(value, dict), path
        for key, each in value.items():
            _check_model(inner[1], each, f"{path}.{key}")
    elif kind in _PRIMITIVES:
        assert isinstance(value, _PRIMITIVES[kind]) and not (kind == "int" and isinstance(value, bool)), path
    else:
        model = next(getattr(each, kind) for each in (kserve.models, kubernetes.client) if hasattr(each, kind))
        names = {written: name for name, written in model.attribute_map.items()}
        assert isinstance(value, dict), path
        for key, each in value.items():
            assert key in names, f"{path}.{key}: {kind} has no such field; there are {sorted(names)}"
            _check_model(model.openapi_types[names[key]], each, f"{path}.{key}")
        model(**{names[key]: each for key, each in value.items()})  # raises ValueError if something required is missing
