"""Writes the pages of the reference and the files of deploy/ that follow from the code: `python -m docs.generate`."""

import contextlib
import io
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
from docs import architecture, grafana

from weir import cli, errors
from weir.app import OF_ASGI
from weir.catalog.repository.folder import KEYS
from weir.catalog.repository.triton import FOREIGN, PLATFORMS, REFUSED, WARNED
from weir.embedding.metrics import PaddingMetrics, TextCounts
from weir.embedding.server_settings import TEXTS
from weir.frontends.http.pages import Held
from weir.manifests.monitoring import Queries, groups
from weir.manifests.yaml import documents
from weir.messages import Reason
from weir.profiling.items import ProfilingSettings
from weir.protocols.account import Account
from weir.protocols.settings import HttpSettings
from weir.protocols.status import TABLE, codes_of_type
from weir.settings import MODEL_PARTS, SERVER_PARTS, Declared, declared_by, declared_settings
from weir.telemetry.exposition import Exposition, TritonNames
from weir.telemetry.recorder import Metrics
from weir.wire.tensors import BINARY_ONLY, DTYPES

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = "<!-- Written by docs/generate.py from the code. -->"

PARTS = {
    "Model": "What belongs to one model.",
    "Batching": "How requests become batches.",
    "Workers": "How batches are run.",
    "Service": "How callers are treated.",
    "HTTP": "Where and how HTTP is served. These are settings of the server, not of a model.",
    "gRPC": "Where and how gRPC is served; its certificate is that of HTTP. These are settings of the server, not of a model.",
    "Frontends": "Frontends beside those that Weir has. These are settings of the server, not of a model.",
    "Open Inference Protocol": "What all frontends of that protocol share. These are settings of the server, not of a model.",
    "Access": "Who may call the server. These are settings of the server, not of a model.",
    "Control": "Who may control the server. These are settings of the server, not of a model.",
    "Repository": "Models in a folder, and what is loaded at the start. These are settings of the server, not of a model.",
    "Telemetry": "What the server tells about itself. These are settings of the server, not of a model.",
    "Process": "What concerns the server's own process. These are settings of the server, not of a model.",
    "Batch jobs": "Files of requests that run as bulk work. These are settings of the server, not of a model.",
}

TEXTS_INTRODUCTION = """## Texts

Those of `weir embed serve`, and keyword arguments of `weir.embedding.serve`; it has all others too, but those of Model and Repository. In a file, a model's
table says its `directory`.

Some of the others have defaults of their own here:"""

TEXT_PARTS = {
    "Text": "What is computed of a text.",
    "Computing": "The runtime, the devices and the precision.",
    "Callers": "What callers may ask for. These are settings of the server, not of a model.",
    "ZeroMQ": "Where and how ZeroMQ is served. These are settings of the server, not of a model.",
}

MEASUREMENT = "Of `weir profile`, and keyword arguments of `weir.profile`: they are in no file and no variable, as they concern no server."

SETTINGS = f"""# Settings

{WRITTEN}

Each setting is stated once, in the code, and can be given in five places. Low to high, the higher wins:

1. the default, below;
2. an attribute of the model's class (`max_batch_size = 32`), for those that concern one model;
3. a TOML file, given by `--config weir.toml` or the variable `WEIR_CONFIG`: `max_batch_size = 32` at the top for every
   model, or under `[models.NAME]` for one;
4. an environment variable: `WEIR_MAX_BATCH_SIZE=32`;
5. a flag of `weir serve`: `--max-batch-size 32`. What is on or off has two: `--metrics` and `--no-metrics`.

In Python they are keyword arguments of `Service`: `weir.Service(Square, max_batch_size=32)`.
A wrong value ends the start with one line that names where it was said, the value and the rule. Durations are in
seconds, sizes in bytes or rows, as said.
"""

ERRORS = f"""# Errors and codes

{WRITTEN}

Every error is a `weir.WeirError`. Over HTTP it is a JSON document, `{{"error": {{"type", "message", "model", "details"}}}}`,
with the code below. `retry_after`, in seconds, travels in `details`, and rounded up in the header `Retry-After`. A message
has at most 4096 characters, over gRPC at most 4096 bytes as the trailers carry it; the rest is cut off.
"""

METRICS = f"""# Metrics

{WRITTEN}

`GET /metrics` answers in Prometheus' text format, or in OpenMetrics if asked for. `--no-metrics` switches counting off.
Counters end in `_total` there. The label `code` is the status for requests that came over HTTP or gRPC, and the name of the error
(or `ok`) for calls in Python. Where a model has versions, every metric of it has the label `version` beside `model`.

"""

DATATYPES = f"""# Datatypes of tensors

{WRITTEN}

Those of the Open Inference Protocol, as a model declares them. As raw bytes they are little-endian and row-major. In JSON, data is flat
or nested as the shape says. A number that does not fit (a fraction for an integer, one out of range) is refused, not rounded; NaN and
infinities have no word in JSON: they are written as `null` and refused when read.

"""

RANGES = {"f": "numbers", "b": "`true`, `false`", "O": "strings, as UTF-8"}


TEXT_METRICS = """
## Of texts

`weir embed serve` also shows what is counted in texts and tokens; `weir_requests` and `weir_batches` of its models count texts, whatever call they came with.

"""

TRITON_METRICS = """
## Triton's names

`--triton-metrics` shows what models have done under the names that Triton has too, with labels `model` and `version`, and `reason` (`REJECTED`, `CANCELED`,
`BACKEND`, `OTHER`) for failures. They have no type, for Triton's counters do not end in `_total`. They begin anew when a model is loaded anew.

"""


def settings_page() -> str:
    """Return the page of all settings."""
    declared = declared_settings().values()
    sections = [SETTINGS]
    for part in (*MODEL_PARTS, *SERVER_PARTS):
        rows = [_setting_row(each) for each in declared if each.part == part]
        sections.append(f"## {part}\n\n{PARTS[part]}\n\n" + _table(("flag", "default", "meaning", "rule"), rows))
    own = [(f"`{each.flag}`", each.found) for each in declared_settings(TEXTS).values() if each.found]
    sections.append(f"{TEXTS_INTRODUCTION}\n\n{_table(('flag', 'default'), own)}")
    of_texts = declared_settings(TEXTS).values()
    for part, text in TEXT_PARTS.items():
        rows = [_setting_row(each) for each in of_texts if each.part == part]
        sections.append(f"### {part}\n\n{text}\n\n" + _table(("flag", "default", "meaning", "rule"), rows))
    rows = [_setting_row(each) for each in declared_by(ProfilingSettings, "Measurement")]
    sections.append(f"## Measurement\n\n{MEASUREMENT}\n\n" + _table(("flag", "default", "meaning", "rule"), rows))
    return "\n".join(sections)


def _setting_row(declared: Declared) -> tuple[str, str, str, str]:
    rule = declared.rule[1] if declared.rule else ""
    metavar = f" {declared.metavar}" if declared.metavar else ""
    return f"`{declared.flag}{metavar}`", _default(declared.default), declared.help, rule


REPOSITORY = f"""# The model repository

{WRITTEN}

`MODEL/VERSION/FILE`, and beside the versions `MODEL/config.toml`, which may say ([how to](../how-to/serve-a-repository.md)):

KEYS
and every [setting](settings.md) of a model under its own name, such as `max_batch_size`, `policy` or `workers`. In `shape` the first dimension is the batch;
it may be left out, as in AMD's files: requests may leave it out too then, are one row, and get their answer without it.

## Files of Triton and AMD

`config.toml` may also have the keys of the AMD Inference Server, and `config.pbtxt`, or the `config` of a load call, those of Triton:

| key | read as |
| --- | --- |
| `platform`, `backend` | `platform` |
| `input`, `output` with `name`, `data_type`, `dims` | `inputs`, `outputs` |
| `reshape`, `optional` of these | of ONNX files: the shape that the file has for what requests send, and an input that the file has a value for |
| `format` of these | shown in the model's configuration |
| `allow_ragged_batch` of these | must be what the class says itself |
| `max_batch_size` | `max_batch_size`; 0 is `batch_dimension = "none"`: the model does not batch, and runs each request whole and alone |
| `instance_group` | `workers`, the sum of all `count`; `gpus`, `rate_limiter`, `passive`, `profile`, `secondary_devices` and `host_policy` are refused |
| `dynamic_batching` | `policy` size-or-delay of the largest `preferred_batch_size` (without one, of the largest batch), and `max_queue_delay`; `preserve_ordering` is always so |
| `model_transaction_policy` | `decoupled` must be what the class says itself (`streaming`) |
| `parameters` | `intra_op_thread_count` and `inter_op_thread_count` of ONNX files; of others a warning is logged |
| `version_policy` | `versions` |
| `default_model_filename` | `file` |

Of their platforms we know these by our names: PLATFORMS.
Nobody here runs FOREIGN.

Numbers may be texts and keys in camel case, as protocol buffers are written in JSON; what a server of ours answers at `/v2/models/NAME/config` can be sent
back. A field that says nothing, as its value is the default, is passed over. All that is wrong with the models of a repository is said at once.

Refused are:

REFUSED
Passed over with a warning are:

WARNED
"""


def _default(value: Any) -> str:
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value.value if isinstance(value, Enum) else value}`"


def errors_page() -> str:
    """Return the page of all errors: the tree, and the codes."""
    tree = (errors.__doc__ or "").split("\n\n")[1]
    rows = [
        (f"`{kind.__name__}`", str(codes_of_type(kind).http), codes_of_type(kind).grpc, _first_line(kind))
        for kind in _tree(errors.WeirError)
        if kind not in (errors.WeirError, errors.CapacityError, errors.SettingsError)
    ]
    rows.append(("any other exception", str(TABLE[BaseException].http), TABLE[BaseException].grpc, "Our own mistake."))
    text = (
        "`SettingsError` happens at start-up only. A caller sees no traceback, unless the server was started with "
        "`--development`; in process, the original exception is `__cause__` where its class can be imported, the `ModelError` is of "
        "that class too (`except ValueError` catches what the model raised as one), and an uncaught one shows the worker's "
        "traceback, which `remote_traceback` has. 499 is never sent, for the connection is gone: metrics show it.\n"
    )
    return f"{ERRORS}\n```text\n{tree}\n```\n\n{_table(('error', 'HTTP', 'gRPC', ''), rows)}\n{text}"


def _tree(kind: type[errors.WeirError]) -> Iterable[type[errors.WeirError]]:
    yield kind
    for child in kind.__subclasses__():
        if getattr(errors, child.__name__, None) is child:  # not one that was made of two, for a caller
            yield from _tree(child)


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def metrics_page() -> str:
    """Return the page of all metrics."""
    shown = [*Exposition(Metrics(), lambda door, error: "").collect(), *Held(Account(HttpSettings())).collect()]
    rows = [(f"`{family.name}`", family.type, _labels(family), family.documentation) for family in shown]
    reasons = ", ".join(f"`{reason.name.lower()}`" for reason in Reason)
    text = f"The values of `reason` are {reasons}; they add up to the number of batches. Beside these there are the usual\n`process_*` metrics.\n"
    usual = METRICS + _table(("metric", "type", "labels", ""), rows) + "\n" + text
    return usual + TEXT_METRICS + _text_metrics() + TRITON_METRICS + _triton_names()


def _text_metrics() -> str:
    families = [*TextCounts().collect(), *PaddingMetrics().collect()]
    rows = [(f"`{family.name}`", family.type, _labels(family), family.documentation) for family in families]
    return _table(("metric", "type", "labels", ""), rows)


def repository_page() -> str:
    """Return the page of what a model's file in a repository may say."""
    keys = _table(("key", "meaning"), [(f"`{key}`", meaning) for key, meaning in KEYS.items()])
    refused = _table(("key", "instead"), [(f"`{key}`", instead) for key, instead in REFUSED.items()])
    platforms = ", ".join(f"`{theirs}` (`{ours}`)" for theirs, ours in PLATFORMS.items())
    foreign = textwrap.fill(", ".join(f"`{each}`" for each in FOREIGN), 120, break_on_hyphens=False)
    warned = _table(("key", "why"), [(f"`{key}`", why) for key, why in WARNED.items()])
    text = REPOSITORY.replace("KEYS", keys).replace("REFUSED", refused).replace("WARNED", warned)
    return text.replace("PLATFORMS", platforms).replace("FOREIGN", foreign)


def _triton_names() -> str:
    families = TritonNames(Metrics(), list).collect()
    return _table(("metric", ""), [(f"`{family.name}`", family.documentation) for family in families])


def datatypes_page() -> str:
    """Return the page of all datatypes."""
    rows = [
        (f"`{name}`", _array_of(name), "4 + its length" if name == "BYTES" else str(dtype.itemsize), _json_of(name))
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
        return "numbers at `/infer`; in that protocol none: binary data only"
    kind = DTYPES[name].kind
    if kind not in "ui":
        return RANGES[kind]
    bounds = numpy.iinfo(DTYPES[name])
    return f"{bounds.min} to {bounds.max}"


def _labels(family: Any) -> str:
    return ", ".join(getattr(family, "_labelnames", ()))


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


# The manifests of deploy/, each printed by its command.
MANIFESTS = {
    "deploy/kubernetes.yaml": "kubernetes square:Square --image registry.example.com/square:1 --replicas 2..10 --grpc-port 8001 --monitor",
    "deploy/kubernetes-hpa.yaml": "kubernetes square:Square --image registry.example.com/square:1 --replicas 2..10 --autoscaler hpa",
    "deploy/rayservice.yaml": "rayservice square:Square --image registry.example.com/square-ray:1 --replicas 2..10",
    "deploy/kserve.yaml": "kserve square:Square --image registry.example.com/square:1 --replicas 2..10 --monitor",
}  # fmt: skip


def manifest(words: str) -> str:
    """Return what `weir manifest` prints, without the variables of whoever asks."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(sys, "argv", ["weir", "manifest", *shlex.split(words)]),
        mock.patch.dict(os.environ, clean, clear=True),
        contextlib.suppress(SystemExit),
    ):
        cli.main()
    return printed.getvalue()


def rules() -> str:
    """Return the rules of Prometheus for the job `weir`, as a file of its own."""
    head = "# Written by docs/generate.py: the rules that `weir manifest kubernetes --monitor` prints, for the job `weir`.\n"
    return head + documents([{"groups": groups(Queries("weir"), "weir")}])


KEYWORDS_HEAD = '''"""The settings as keyword arguments, for editors and type checkers. Written by docs/generate.py from their declarations."""

from typing import Any, TypedDict
'''


def keywords() -> str:
    """Return the module of the settings as keyword arguments."""
    catalog = declared_settings()
    # `executor` is an argument of its own where a service is made, and may be an object; `timeout` is one of InProcess.
    apart = ("executor", "timeout")
    common = [each for each in catalog.values() if each.part in KEYWORD_PARTS and each.name not in apart]
    executor, timeout = catalog["executor"]._replace(hint=Any), catalog["timeout"]
    params = catalog["params"]
    hosted = [each for each in catalog.values() if each.name in OF_ASGI]
    server = [each for each in catalog.values() if each not in common and each.name not in apart]
    classes = (
        ("CommonKeywords", "TypedDict", "What all of these have.", common),
        ("ServiceKeywords", "CommonKeywords", "The settings of weir.Service.", [timeout]),
        ("InProcessKeywords", "CommonKeywords", "The settings of weir.inprocess.", [executor, params]),
        ("AsgiKeywords", "ServiceKeywords", "The settings of weir.asgi.", [executor, params, *hosted]),
        ("ServerKeywords", "ServiceKeywords", "The settings of weir.serve and weir.running.", [executor, *server]),
    )
    return KEYWORDS_HEAD + "".join(
        f'''\n\nclass {name}({base}, total=False):\n    """{about}"""\n\n{"".join(map(_keyword, declared))}'''
        for name, base, about, declared in classes
    )


KEYWORD_PARTS = ("Batching", "Workers", "Service")


def _keyword(declared: Declared) -> str:
    hint = declared.hint.__name__ if isinstance(declared.hint, type) else str(declared.hint).replace("typing.", "")
    about = declared.help[0].upper() + declared.help[1:]
    return f'''    {declared.name}: {hint}\n    """{about}"""\n'''


PAGES: dict[str, Callable[[], str]] = {
    "src/weir/keywords.py": keywords,
    "docs/reference/settings.md": settings_page,
    "docs/reference/errors.md": errors_page,
    "docs/reference/metrics.md": metrics_page,
    "docs/reference/repository.md": repository_page,
    "docs/reference/datatypes.md": datatypes_page,
    architecture.PAGE: architecture.page,
    architecture.PICTURE: architecture.picture,
    **{path: partial(manifest, words) for path, words in MANIFESTS.items()},
    "deploy/prometheus/rules.yaml": rules,
    "deploy/grafana/weir.json": grafana.dashboard,
}


def main() -> None:
    """Write them all."""
    for path, make in PAGES.items():
        (ROOT / path).write_text(make())


if __name__ == "__main__":
    main()
