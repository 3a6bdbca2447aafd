"""What follows from the settings of texts, and which are refused."""

from typing import Any

import pytest
from tests.rings import subcases

from weir.errors import SettingsError
from weir.text_models import ComputingSettings, TextSettings
from weir.text_server.server_settings import CallerSettings


@subcases(("kind", "said", "rule"), [
    (TextSettings, {"pooling": "median"}, "pooling='median': must be one of none, max, mean"),
    (TextSettings, {"layers": [-1, -1]}, r"layers=\[-1, -1\]: must be counted from the end"),
    (TextSettings, {"layers": [1]}, r"layers=\[1\]: must be counted from the end"),
    (TextSettings, {"max_length": 2}, "max_length=2: must be 3 or more"),
    (TextSettings, {"dimensions": 0}, "dimensions=0: must be 1 or more"),
    (ComputingSettings, {"runtime": "jax"}, "runtime='jax': must be one of onnx, torch"),
    (ComputingSettings, {"precision": "bf16"}, "only torch computes in bf16"),
    (ComputingSettings, {"precision": "int8", "runtime": "torch"}, "only onnx computes in int8"),
    (ComputingSettings, {"device_map": ["cpu", "tpu"]}, r"device_map=\['cpu', 'tpu'\]: each must be auto, cpu, cuda"),
    *((ComputingSettings, {"device_map": [name]}, "each must be auto, cpu, cuda") for name in ("cuda:", "cuda:x", "")),
    (ComputingSettings, {"compile": True}, "only torch compiles"),
    (ComputingSettings, {"gpu_memory_fraction": 1.5}, "must be greater than 0 and at most 1"),
    (CallerSettings, {"max_texts": 0}, "max_texts=0: must be 1 or more"),
])  # fmt: skip
def test_what_cannot_be_is_refused(kind: Any, said: dict[str, Any], rule: str) -> None:
    with pytest.raises(SettingsError, match=rule):
        kind(**said)
