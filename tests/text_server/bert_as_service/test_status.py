"""What a server says of itself has the fields of bert-as-service's, of their types: its clients and dashboards look for them."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.text_models import tiny

import weir.embedding

# Of each field its type there, where it is always set.
FIELDS: dict[type, str] = {
    str: """client server_version python_version server_start_time server_current_time model_dir ckpt_name config_name graph_tmp_dir cors
        pyzmq_version zmq_version""",
    int: """status max_seq_len pooling_strategy port port_in port_out http_port http_max_connect num_worker num_process
        num_concurrent_socket max_batch_size priority_batch_size prefetch_size""",
    bool: """cased_tokenization mask_cls_sep no_special_token no_position_embeddings fixed_embed_length show_tokens_to_client cpu fp16 xla
        verbose""",
    float: "gpu_memory_fraction",
    list: "pooling_layer device_map tensorflow_version",
    dict: "statistic",
}  # fmt: skip
SETTINGS: dict[str, Any] = {"port": 0, "executor": "thread", "threads": 1, "device_map": ["cpu"], "calibrate": False}


def of_wrong_types(state: dict[str, Any]) -> list[str]:
    return [name for kind, names in FIELDS.items() for name in names.split() if type(state[name]) is not kind]


def test_every_field_has_a_value_of_its_type_when_fresh_and_when_used(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with (
        weir.embedding.serve(tiny.model(tmp_path / "model"), zmq_port=0, cache=str(cache), **SETTINGS) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        fresh = http.get("/status/server").json()
        for _ in range(3):
            http.post("/encode", json={"texts": ["it", "do it"]})
        used = http.get("/status/server").json()
        ports = server.zmq_ports
    assert of_wrong_types(fresh) == of_wrong_types(used) == []
    assert [name for name, value in used.items() if value is None] == ["tuned_model_dir"]
    assert None not in used["statistic"].values() and used["statistic"]["avg_size_per_request"] == 2
    assert (used["port"], used["port_out"]) == (used["port_in"], used["port_out"]) == ports
    assert (used["ckpt_name"], used["graph_tmp_dir"]) == ("model.safetensors", str(cache))
    assert used["gpu_memory_fraction"] == 1.0


@pytest.mark.parametrize(("said", "expected"), [
    ({"cased": True, "gpu_memory_fraction": 0.5}, {"cased_tokenization": True, "gpu_memory_fraction": 0.5}),
    ({}, {"verbose": True}),  # as the program's logging is
    ({"pooling": "mean-sqrt"}, {"pooling_strategy": None, "port": None, "port_in": None, "port_out": None}),
])  # fmt: skip
def test_fields_are_what_was_declared(
    tmp_path: Path, said: dict[str, Any], expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "weir")
    model = tiny.model(tmp_path / "model")
    with weir.embedding.serve(model, cache=str(tmp_path / "cache"), **SETTINGS, **said) as server:
        state = httpx.get(f"{server.url}/status/server").json()
    assert {name: state[name] for name in expected} == expected
