"""Writes the pages of the reference and the files of deploy/ that follow from the code: `python -m docs.generate`."""

import json
import re
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from docs import architecture, grafana

from weir import errors
from weir.app import OF_ASGI
from weir.catalog.repository.folder import KEYS
from weir.catalog.repository.triton import PLATFORMS, REFUSED, WARNED
from weir.catalog.sources import ON_DEMAND_SETTINGS
from weir.frontends.http.application import NumbersCollector, held, in_memory
from weir.fronts.server import FrontMetrics
from weir.messages import Reason
from weir.policy.residency import Residents, Room
from weir.protocols import HttpSettings
from weir.protocols.account import Account
from weir.settings import MODEL_PARTS, SERVER_PARTS, Declared, declared_settings
from weir.telemetry.exposition import Exposition, TritonNames
from weir.telemetry.recorder import Metrics
from weir.text_server.metrics import PaddingMetrics, TextCounts
from weir.text_server.server_settings import TEXTS
from weir.wire.status import TABLE, codes_of_type
from weir.wire.tensors import BINARY_ONLY, DTYPES

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = "<!-- Written by docs/generate.py from the code. -->"

TEXTS_INTRODUCTION = """## Texts

Of `weir embed serve` and `weir.embedding.serve`, which also have all settings above, except those of Model and Repository. These defaults differ:"""

TEXT_PARTS = ("Text", "Computing", "Callers", "Images", "ZeroMQ")

SETTINGS = f"""# Settings: flags, TOML, environment variables

{WRITTEN}

A setting can be given in five places; a later one wins:

1. the default;
2. an attribute of the model's class (`max_batch_size = 32`), for the parts Model, Batching, Workers and Service; the others belong to the server;
3. a TOML file, `--config weir.toml` or `WEIR_CONFIG`: `max_batch_size = 32` for every model, or under `[models.NAME]` for one;
4. an environment variable: `WEIR_MAX_BATCH_SIZE=32`; an empty one counts as unset, but those for keys, tokens and TLS must not be empty;
5. a flag: `--max-batch-size 32`. Switches have two: `--metrics` and `--no-metrics`.

In Python: `weir.Service(Square, max_batch_size=32)`. Durations are in seconds, sizes in bytes or rows.
"""

ERRORS = f"""# Errors: codes in HTTP and gRPC

{WRITTEN}

Every error is a `weir.WeirError`. Over HTTP it is `{{"error": {{"type", "message", "model", "details"}}}}`; `retry_after`, in seconds, is in `details`, and rounded up in
`Retry-After`. Messages are cut at 4096 characters.
"""

METRICS = f"""# Metrics

{WRITTEN}

`GET /metrics` returns Prometheus' format, or OpenMetrics on request; `--no-metrics` disables it. Counters end in `_total` there. Unless other labels are given, the
label is `model`, with `version` if the model has versions. `code` is a status, for calls in Python an error's name or `ok`.

`weir_requests` counts each request once. A response that memory has no room for counts as an error if it is refused at once, and as a success if later: a list, a
stream, or one that a thread or a front writes.

"""

DATATYPES = f"""# Datatypes: what tensors may hold

{WRITTEN}

Those of the Open Inference Protocol. Raw bytes are little-endian and row-major; JSON data is flat or nested. Numbers that do not fit are refused, not rounded; NaN and infinities
are written as `null` in JSON and refused when read.

"""

JSON = {
    "u": "integers",
    "i": "integers",
    "f": "numbers",
    "b": "`true`, `false`",
    "O": "strings, as UTF-8",
}


TEXT_METRICS = """
## Of texts

For `weir embed serve`, whose `weir_requests` and `weir_batches` count texts:

"""

TRITON_METRICS = """
## Triton's names

With `--triton-metrics`; labels `model`, `version`, and for failures `reason` (`REJECTED`, `CANCELED`, `BACKEND`, `OTHER`). They restart with each load.

"""


def settings_page() -> str:
    """Return the page of all settings."""
    declared = declared_settings().values()
    sections = [SETTINGS]
    for part in (*MODEL_PARTS, *SERVER_PARTS):
        sections.append(
            f"## {part}\n\n{_settings_table(each for each in declared if each.part == part)}"
        )
    found: dict[str, list[str]] = {}
    for each in declared_settings(TEXTS).values():
        if each.found:
            found.setdefault(each.found, []).append(f"`{each.flag}`")
    own = [(", ".join(flags), default) for default, flags in found.items()]
    sections.append(f"{TEXTS_INTRODUCTION}\n\n{_table(('flag', 'default'), own)}")
    of_texts = declared_settings(TEXTS).values()
    for part in TEXT_PARTS:
        sections.append(
            f"### {part}\n\n{_settings_table(each for each in of_texts if each.part == part)}"
        )
    return "\n".join(sections)


def _settings_table(declared: Iterable[Declared]) -> str:
    rows = ((f"`{_flag(each)}`", _default(each.default), _meaning(each)) for each in declared)
    return _table(("flag", "default", "meaning"), rows)


def _flag(declared: Declared) -> str:
    return (
        f"{declared.flag} {declared.metavar}" if "=" in (declared.metavar or "") else declared.flag
    )


def _meaning(declared: Declared) -> str:
    """Return the help text, with the choices that it does not name."""
    rule = declared.rule[1] if declared.rule else ""
    _, found, choices = rule.partition("must be one of ")
    unnamed = (
        found
        and any(choice not in declared.help for choice in choices.split(", "))
        and " or " not in choices
    )
    return f"{declared.help}: {choices}" if unnamed else declared.help


REPOSITORY = f"""# Repository: models in folders

{WRITTEN}

A model is a folder with versions, `MODEL/VERSION/FILE`, and an optional `MODEL/config.toml` ([how to](../how-to/serve-a-repository.md)):

KEYS
and every [setting](settings.md) of a model by its name.

## Files of Triton and AMD

`config.toml` may have the keys of the AMD Inference Server; `config.pbtxt` (extra `grpc`), or the `config` of a load call, those of Triton:

| key | read as |
| --- | --- |
| `platform`, `backend` | `platform` |
| `input`, `output` with `name`, `data_type`, `dims` | `inputs`, `outputs` |
| their `reshape`, `optional`, `format` | of ONNX files; `format` is only shown |
| their `allow_ragged_batch`; `model_transaction_policy` | must agree with the class |
| `max_batch_size` | `max_batch_size`; 0: requests run alone |
| `instance_group` | `workers`, the sum of `count`; `gpus` as `CUDA_VISIBLE_DEVICES` of each worker; `rate_limiter` warns; `passive`, `profile`, `secondary_devices`, `host_policy` are refused |
| `dynamic_batching` | size-or-delay of the largest `preferred_batch_size`, and `max_queue_delay` |
| its `default_queue_policy` | `max_queue_size`, in rows, and `timeout`, which includes computing; a request may always state a timeout; `timeout_action: DELAY` is refused |
| its `priority_queue_policy` | must be as `default_queue_policy`: all priorities share one bound and one timeout |
| `ensemble_scheduling` | `steps` of a chain, in an order in which each has its inputs |
| `model_warmup` | `examples` and `warmup_sizes`; `input_data_file` is refused |
| `parameters` | `intra_op_thread_count`, `inter_op_thread_count` of ONNX files; others warn |
| `version_policy` | `versions` |
| `default_model_filename` | `file` |

Platforms: PLATFORMS.

Numbers may be texts, keys in camel case.

Refused: REFUSED.

Ignored with a warning: WARNED.
"""


def _default(value: Any) -> str:
    if value is None or value in ([], {}):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value.value if isinstance(value, Enum) else value}`"


def errors_page() -> str:
    """Return the page of all errors: the tree, and the codes."""
    tree = (errors.__doc__ or "").split("\n\n")[1]
    rows = [
        (f"`{kind.__name__}`", str(codes_of_type(kind).http), codes_of_type(kind).grpc)
        for kind in _tree(errors.WeirError)
        if kind not in (errors.WeirError, errors.CapacityError, errors.SettingsError)
    ]
    rows.append(("any other exception", str(TABLE[BaseException].http), TABLE[BaseException].grpc))
    text = (
        "Callers see no traceback, unless the server runs with `--development`. In process, a `ModelError` is also of the original exception's class, where "
        "that can be imported, has it as `__cause__`, and the worker's traceback as `remote_traceback`. 499 is only counted: the connection is gone.\n"
    )
    return f"{ERRORS}\n```text\n{tree}\n```\n\n{_table(('error', 'HTTP', 'gRPC'), rows)}\n{text}"


def _tree(kind: type[errors.WeirError]) -> Iterable[type[errors.WeirError]]:
    yield kind
    for child in kind.__subclasses__():
        if (
            getattr(errors, child.__name__, None) is child
        ):  # not one that was made of two, for a caller
            yield from _tree(child)


def metrics_page() -> str:
    """Return the page of all metrics."""
    shown = [
        *Exposition(Metrics(), lambda frontend, error: "").collect(),
        *NumbersCollector(lambda: held(Account(HttpSettings()))).collect(),
        *FrontMetrics(list).collect(),
        *NumbersCollector(lambda: in_memory(Residents(Room()))).collect(),
    ]
    reasons = ", ".join(f"`{reason.name.lower()}`" for reason in Reason)
    text = f"`reason` is one of {reasons}. The usual `process_*` metrics are there, too, and [the models' own](../how-to/logs-and-metrics.md).\n"
    usual = METRICS + _metrics_tables(shown) + text
    return (
        usual
        + TEXT_METRICS
        + _metrics_tables([*TextCounts().collect(), *PaddingMetrics().collect()]).rstrip("\n")
        + "\n"
        + TRITON_METRICS
        + _triton_names()
    )


def _metrics_tables(families: list[Any]) -> str:
    """Return a table of counters, one of histograms, and one of gauges."""
    tables = []
    for kind in ("counter", "histogram", "gauge"):
        rows = [
            (f"`{each.name}`", _labels(each), each.documentation)
            for each in families
            if each.type == kind
        ]
        if rows:
            tables.append(_table((kind, "labels", ""), rows) + "\n")
    return "".join(tables)


def repository_page() -> str:
    """Return the page of what a model's file in a repository may say."""
    keys = _table(("key", "meaning"), [(f"`{key}`", meaning) for key, meaning in KEYS.items()])
    refused, warned = (", ".join(f"`{each}`" for each in names) for names in (REFUSED, WARNED))
    platforms = ", ".join(f"`{theirs}` (`{ours}`)" for theirs, ours in PLATFORMS.items())
    text = REPOSITORY.replace("KEYS", keys).replace("REFUSED", refused).replace("WARNED", warned)
    return text.replace("PLATFORMS", platforms)


def _triton_names() -> str:
    return (
        ", ".join(f"`{family.name}`" for family in TritonNames(Metrics(), list).collect()) + ".\n"
    )


def datatypes_page() -> str:
    """Return the page of all datatypes."""
    rows = [
        (
            f"`{name}`",
            _array_of(name),
            "4 + its length" if name == "BYTES" else str(dtype.itemsize),
            _json_of(name),
        )
        for name, dtype in DTYPES.items()
    ]
    return DATATYPES + _table(("datatype", "in `predict`", "bytes per element", "in JSON"), rows)


def _array_of(name: str) -> str:
    arrays = {
        "BYTES": "`object`, of `bytes`",
        "BF16": "`uint16`, the bits; a model may return numbers too, or `ml_dtypes.bfloat16`",
    }
    return arrays.get(name, f"`{DTYPES[name].name}`")


def _json_of(name: str) -> str:
    if name in BINARY_ONLY:
        return "numbers, but only at `/infer`"
    return JSON[DTYPES[name].kind]


def _labels(family: Any) -> str:
    labels = getattr(family, "_labelnames", ())
    return ("none" if not labels else "") if labels in ((), ("model",)) else ", ".join(labels)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


CHART = "deploy/chart"
# What a setting in the values of the chart would contradict, or publish.
OF_THE_CHART = {"api_key", "drain_timeout", "grpc_port", "port", "start_timeout", "uds"}


def chart_schema() -> str:
    """Return the schema of the chart's values: their types follow from the defaults, and the settings are those of all servers."""
    schema = _schema_of(yaml.safe_load((ROOT / CHART / "values.yaml").read_text()))
    values = schema["properties"]
    every = {
        **declared_settings(),
        **declared_settings(TEXTS),
    }  # but tables, which belong into `config`
    names = [name for name, each in sorted(every.items()) if not isinstance(each.default, dict)]
    settings: dict[str, Any] = {name: {} for name in names if name not in OF_THE_CHART}
    settings["fronts"] = {"type": "integer", "minimum": 1}  # "auto" would see all CPUs of the node
    values["settings"] = {
        "type": "object",
        "properties": settings,
        "additionalProperties": False,
        # What a flag can have.
        "allOf": [{"additionalProperties": {"type": ["array", "boolean", "number", "string"]}}],
    }
    values["models"]["items"] = {"type": "string"}
    values["global"] = {"type": "object"}  # which a chart that has this one as a part adds
    values["drainTimeout"] = values["startTimeout"] = {"type": "number", "minimum": 0}
    share = {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%$"}
    values["podDisruptionBudget"]["properties"]["maxUnavailable"] = share
    replacing = values["strategy"]["properties"]
    replacing["type"] = {"enum": ["RollingUpdate", "Recreate"]}
    replacing["rollingUpdate"]["properties"] = {"maxSurge": share, "maxUnavailable": share}
    values["port"] = {"type": "integer", "minimum": 1, "maximum": 65535}
    values["grpcPort"] = {**values["port"], "type": ["integer", "null"]}
    scaling = values["autoscaling"]["properties"]
    scaling["by"] = {"enum": ["hpa", "keda"]}
    for name in ("minReplicas", "maxReplicas", "targetWaitingRows"):
        scaling[name] = {"type": "integer", "minimum": 1}
    return (
        json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **schema}, indent=1)
        + "\n"
    )


def _schema_of(default: Any) -> dict[str, Any]:
    """Return the schema of values like `default`: tables that are not empty have no other keys, unless these are Kubernetes' own."""
    if isinstance(default, dict):
        inner = {key: _schema_of(value) for key, value in default.items()}
        closed = bool(inner) and not inner.keys() & {"periodSeconds", "runAsUser"}
        return {
            "type": "object",
            **({"properties": inner, "additionalProperties": False} if closed else {}),
        }
    if isinstance(default, int) and not isinstance(default, bool):
        return {"type": "integer", "minimum": 0}
    kinds = {bool: "boolean", str: "string", list: "array"}
    return {} if default is None else {"type": kinds[type(default)]}


KEYWORDS_HEAD = '''"""The settings as keyword arguments, for editors and type checkers alone. Written by docs/generate.py from their declarations."""

from typing import Any, TypedDict
'''


def keywords() -> str:
    """Return the stub of the settings as keyword arguments."""
    catalog = declared_settings()
    # `executor` is an argument of its own where a service is made, and may be an object; `timeout` is one of InProcess.
    apart = ("executor", "timeout")
    common = [
        each for each in catalog.values() if each.part in KEYWORD_PARTS and each.name not in apart
    ]
    executor, timeout = catalog["executor"]._replace(hint=Any), catalog["timeout"]
    params = catalog["params"]
    hosted = [each for each in catalog.values() if each.name in OF_ASGI]
    known = [*common, *hosted, params]
    server = [each for each in catalog.values() if each not in known and each.name not in apart]
    classes = (
        ("CommonKeywords", "TypedDict", "The keywords that all of these have.", common),
        ("ServiceKeywords", "CommonKeywords", "The settings of weir.Service.", [timeout]),
        (
            "InProcessKeywords",
            "CommonKeywords",
            "The settings of weir.inprocess.",
            [executor, params, *(catalog[name] for name in ON_DEMAND_SETTINGS)],
        ),
        (
            "AsgiKeywords",
            "ServiceKeywords",
            "The settings of weir.asgi.",
            [executor, params, *hosted],
        ),
        (
            "ServerKeywords",
            "AsgiKeywords",
            "The settings of weir.serve and weir.running.",
            server,
        ),
    )
    return KEYWORDS_HEAD + "".join(
        f'''\nclass {name}({base}, total=False):\n    """{about}"""\n\n{"".join(map(_keyword, declared))}'''
        for name, base, about, declared in classes
    )


KEYWORD_PARTS = ("Batching", "Workers", "Service")


def _keyword(declared: Declared) -> str:
    hint = (
        declared.hint.__name__
        if isinstance(declared.hint, type)
        else str(declared.hint).replace("typing.", "")
    )
    about = declared.help[0].upper() + declared.help[1:]
    return f'''    {declared.name}: {hint}\n    """{about}"""\n'''


HOME = "docs/index.md"
HOME_BEGIN, HOME_END = (
    "<!-- gain: written by docs/generate.py from the README -->",
    "<!-- end of gain -->",
)


def home() -> str:
    """Return the home page with what one gains, which `make bench` writes into the README."""
    readme = (ROOT / "README.md").read_text()
    gain = readme.partition("<!-- gain: written by `make bench` -->")[2].partition(HOME_END)[0]
    before, _, rest = (ROOT / HOME).read_text().partition(HOME_BEGIN)
    shown = gain.strip().replace("docs/benchmarks.md", "benchmarks.md")
    return f"{before}{HOME_BEGIN}\n{shown}\n{HOME_END}{rest.partition(HOME_END)[2]}"


SOURCE = " @ git+https://github.com/weir-serving/weir"  # make it "" with the first release on PyPI, and run this
INSTALLED = re.compile(r"\"(weir-serving[\w,\[\]]*)( @ [^\"]+)?\"")


def pages_that_install() -> list[str]:
    """Return the pages with a command that installs Weir."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [str(path.relative_to(ROOT)) for path in pages if INSTALLED.search(path.read_text())]


def with_source(path: str) -> str:
    """Return the page with commands that install Weir from where it is."""
    return INSTALLED.sub(rf'"\1{SOURCE}"', (ROOT / path).read_text())


PAGES: dict[str, Callable[[], str]] = {
    **{path: partial(with_source, path) for path in pages_that_install()},
    HOME: home,
    "src/weir/keywords.pyi": keywords,
    "docs/reference/settings.md": settings_page,
    "docs/reference/errors.md": errors_page,
    "docs/reference/metrics.md": metrics_page,
    "docs/reference/repository.md": repository_page,
    "docs/reference/datatypes.md": datatypes_page,
    architecture.PAGE: architecture.page,
    architecture.PICTURE: architecture.picture,
    f"{CHART}/values.schema.json": chart_schema,
    "deploy/grafana/weir.json": grafana.dashboard,
}


def main() -> None:
    """Write them all."""
    for path, make in PAGES.items():
        (ROOT / path).write_text(make())


if __name__ == "__main__":
    main()
