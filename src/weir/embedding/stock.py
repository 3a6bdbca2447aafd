"""The configuration of a server in the words of bert-as-service, whose clients and dashboards look for them."""

from collections.abc import Mapping, Sequence
from typing import Any

from weir.embedding.recipe import Recipe
from weir.embedding.said import Said
from weir.embedding.status import STOCK_POOLING, STOCK_VERSION
from weir.embedding.zeromq.settings import ZeroMqSettings
from weir.manager.service import Service
from weir.protocols.settings import HttpSettings


def stock_fields(
    service: Service, said: Said, recipe: Recipe, *, http: HttpSettings, zeromq: ZeroMqSettings
) -> Mapping[str, Any]:
    """Return what `bert-serving-start` was told and its server says of itself, of the first model. What Weir has not is null, or empty:
    no sockets lie between its parts, and no TensorFlow computes."""
    text, computing = said.text, said.computing
    return {
        "status": 200,
        "model_dir": str(said.directory),
        "tuned_model_dir": None,
        "ckpt_name": None,
        "config_name": "config.json",
        "graph_tmp_dir": computing.cache,
        "cased_tokenization": text.cased,
        "pooling_layer": list(recipe.layers),
        "pooling_strategy": None if recipe.joined else STOCK_POOLING.get(recipe.pooling),
        "mask_cls_sep": recipe.mask_special,
        "no_special_token": not text.special_tokens,
        "no_position_embeddings": not recipe.positions,
        "fixed_embed_length": text.fixed_length,
        "show_tokens_to_client": zeromq.zmq_show_tokens,
        "port": zeromq.zmq_port,
        "port_in": zeromq.zmq_port,
        "port_out": _port_out(zeromq),
        "http_port": http.port,
        "http_max_connect": http.max_connections,
        "cors": " ".join(http.cors_origins),
        "num_worker": service.workers.workers,
        "num_process": service.workers.workers + 1,
        "num_concurrent_socket": 0,
        "max_batch_size": service.batching.max_batch_size,
        "priority_batch_size": service.batching.small_request_size,
        "prefetch_size": service.workers.pipeline_depth - 1,
        "cpu": computing.device_map == ["cpu"],
        "device_map": computing.device_map,
        "gpu_memory_fraction": computing.gpu_memory_fraction,
        "fp16": computing.precision == "fp16",
        "xla": computing.compile,
        "verbose": False,
        "tensorflow_version": None,
        "pyzmq_version": None,
        "zmq_version": None,
        "ventilator -> worker": [],
        "ventilator <-> sink": "",
        "worker -> sink": "",
    }


def client_fields(whose: str, clients: Sequence[Mapping[str, Any]], http: HttpSettings) -> dict[str, Any]:
    """Return what a client of bert-as-service says of itself, of the client `whose`; `clients` has those that are remembered. Nothing of
    it is pending here, as each call waits for its answer."""
    own = next((client for client in clients if client["identity"] == whose), None)
    return {
        "identity": whose,
        "num_request": 0 if own is None else own["num_request"],
        "num_pending_request": 0,
        "pending_request": [],
        "output_fmt": "list",
        "port": http.port,
        "port_out": http.port,
        "server_ip": http.host,
        "client_version": STOCK_VERSION,
        "timeout": -1,
        "status": 200,
    }


def _port_out(zeromq: ZeroMqSettings) -> int | None:
    if zeromq.zmq_port_out is not None or not zeromq.zmq_port:
        return zeromq.zmq_port_out
    return zeromq.zmq_port + 1
