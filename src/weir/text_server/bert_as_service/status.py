"""The server's configuration and statistics with the field names of bert-as-service, for its clients and dashboards, and some fields of Weir."""

import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from weir._version import __version__
from weir.protocols.settings import HttpSettings
from weir.serving.handle import ModelHandle
from weir.text_models.pooling import Pooling
from weir.text_server.metrics import TextClients
from weir.text_server.text_model import ServedTextModel, TextModelSpec
from weir.text_server.texts import Encodes

# The version of bert-as-service that is imitated; its clients compare it with their own version.
STOCK_VERSION = "1.10.0"

# The numbers of the poolings in bert-as-service's enumeration, as its answers have them.
STOCK_POOLING = {
    Pooling.NONE: 0, Pooling.MAX: 1, Pooling.MEAN: 2, Pooling.MEAN_MAX: 3, Pooling.CLS: 4, Pooling.SEP: 5, Pooling.POOLER: 6,
    Pooling.CLASSIFICATION: 7, Pooling.REGRESSION: 8,
}  # fmt: skip


class Status:
    """Describes a server of the text models `served`, by name. `more` returns further fields of the configuration, which go before these."""

    def __init__(
        self, served: Mapping[str, Encodes], clients: TextClients, more: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        self._served = served
        self._clients = clients
        self._more = more
        self._started = datetime.now().astimezone()

    def config(self, client: str = "") -> dict[str, Any]:
        """Return the server's configuration. `client` is the identity of the caller, which the answer repeats."""
        first = next(iter(self._served.values()))
        return {
            "client": client,
            "server_version": STOCK_VERSION,
            "weir_version": __version__,
            "python_version": platform.python_version(),
            "server_start_time": str(self._started),
            "server_current_time": str(datetime.now().astimezone()),
            "max_seq_len": first.max_length,
            "show_tokens_to_client": False,
            "models": {
                name: {"dimensions": each.dimensions, "max_seq_len": each.max_length}
                for name, each in self._served.items()
            },
            **self._more(),
        }

    def server_status(self, client: str = "") -> dict[str, Any]:
        """Return the configuration and, in the field `statistic`, the statistics of requests."""
        return {**self.config(client), "statistic": self._clients.statistics()}

    def client_status(self) -> dict[str, Any]:
        """Return the clients that are remembered, the one that sent the latest request first."""
        return {"num_active_client": self._clients.active, "clients": self._clients.table()}


ALL = 1.0  # the fraction of a GPU's memory for a worker without a limit


def stock_fields(
    service: ModelHandle,
    spec: TextModelSpec,
    model: ServedTextModel,
    http: HttpSettings,
    ports: tuple[int, int] | None,
    *,
    show_tokens: bool,
) -> Mapping[str, Any]:
    """Return the fields that bert-as-service shows of its server, for the first model. `ports` are those of ZeroMQ for requests and answers, if open.

    A field for something that Weir does not have is empty, with the type of the field: Weir has no sockets between its parts, and loads neither
    TensorFlow nor libzmq. Null stands for ports that are not open, for poolings without a number in bert-as-service, and for `tuned_model_dir`, which
    was null there unless it was set.
    """
    text, computing, recipe = spec.text, spec.computing, model.recipe
    port, port_out = ports or (None, None)
    return {
        "status": 200,
        "model_dir": str(spec.directory),
        "tuned_model_dir": None,
        "ckpt_name": model.weights_file.name,
        "config_name": "config.json",
        "graph_tmp_dir": str(model.cache),
        "cased_tokenization": model.cased,
        "pooling_layer": list(recipe.layers),
        "pooling_strategy": None if recipe.joined else STOCK_POOLING.get(recipe.pooling),
        "mask_cls_sep": recipe.mask_special,
        "no_special_token": not (text.special_tokens and text.word_special_tokens),
        "no_position_embeddings": not recipe.positions,
        "fixed_embed_length": text.fixed_length,
        "show_tokens_to_client": show_tokens,
        "port": port,
        "port_in": port,
        "port_out": port_out,
        "http_port": http.port,
        "http_max_connect": http.max_connections,
        "cors": " ".join(http.cors_origins),
        "num_worker": service.control.worker_count,
        "num_process": service.control.worker_count + 1,
        "num_concurrent_socket": 0,
        "max_batch_size": service.facts.batching.max_batch_size,
        "priority_batch_size": service.facts.batching.small_request_size,
        "prefetch_size": service.control.workers.pipeline_depth - 1,
        "cpu": computing.device_map == ["cpu"],
        "device_map": computing.device_map,
        "gpu_memory_fraction": computing.gpu_memory_fraction or ALL,
        "fp16": computing.precision == "fp16",
        "xla": computing.compile,
        "verbose": logging.getLogger("weir").isEnabledFor(logging.DEBUG),
        "tensorflow_version": [],
        "pyzmq_version": "",
        "zmq_version": "",
        "ventilator -> worker": [],
        "ventilator <-> sink": "",
        "worker -> sink": "",
    }


def client_fields(whose: str, clients: Sequence[Mapping[str, Any]], http: HttpSettings) -> dict[str, Any]:
    """Return the fields that a client of bert-as-service shows of itself, for the client `whose`. `clients` are those that are remembered.

    No request is pending, as an HTTP client waits for each answer.
    """
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
