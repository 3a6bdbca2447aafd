"""The Open Inference Protocol (KServe v2) over gRPC, with Triton's calls and those of the AMD Inference Server.

This module has the settings of gRPC and the function that makes the frontend. It loads neither grpcio nor protobuf; the others do:

server.py     the frontend: address, TLS, limits, draining
core.py       a server on grpcio's private core
aio.py        the same server on the public grpc.aio, which is used where the private core has changed; and a relay to another server
call.py       one call: bytes in, bytes out, errors as status codes
inference.py  ModelInfer and ModelStreamInfer
services.py   all other calls: health, metadata, repository, workers, shared memory, reflection, and calls that are refused

Sources: grpc_predict_v2.proto of the Open Inference Protocol (https://github.com/kserve/open-inference-protocol) and grpc_service.proto of Triton
(https://github.com/triton-inference-server/common, protobuf/).
"""

import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weir.config import AT_LEAST_ONE, POSITIVE, Checked, setting
from weir.errors import SettingsError, add_extra
from weir.frontends.frontend import Frontend
from weir.protocols import PORT, HttpSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weir.frontends.grpc.services import AddedCalls
    from weir.protocols.kserve import KserveContext


_LIBRARIES = ("grpc", "google")
# The core reads these variables when it is imported. It would log what strangers send, line breaks and control characters included, to stderr; and the
# sockets would be read by threads of its own, which wake the thread that waits for calls, for each call: that thread can read them itself.
CORE_VARIABLES = {"GRPC_VERBOSITY": "NONE", "GRPC_EXPERIMENTS": "-event_engine_listener"}


@dataclass(frozen=True)
class GrpcSettings(Checked):
    """The settings of gRPC. Durations are in seconds, sizes in bytes."""

    grpc_port: int | None = setting(None, "port for gRPC; 0 picks a free one (default: no gRPC)", rule=PORT)
    grpc_host: str | None = setting(
        None, "address for gRPC to listen on (default: that of HTTP); 0.0.0.0 includes IPv6"
    )
    grpc_max_message_size: int = setting(16 << 20, "largest message from a client, in bytes", rule=AT_LEAST_ONE)
    grpc_keepalive: float = setting(30.0, "seconds of silence after which a client is pinged", rule=POSITIVE)
    grpc_keepalive_timeout: float = setting(20.0, "seconds within which a client must answer a ping", rule=POSITIVE)
    grpc_stream_requests: int = setting(
        256, "running requests of one stream at which reading pauses", rule=AT_LEAST_ONE
    )


def make_frontend(
    context: "KserveContext",
    settings: GrpcSettings,
    http: HttpSettings,
    added: "Callable[[int], AddedCalls] | None" = None,
    kind: "Callable[[], Any] | None" = None,
) -> Frontend | None:
    """Return the gRPC frontend, not started; None if there is no port. The certificate is that of `http`.

    `added` takes the most requests of a stream that may be under way, and returns the calls that a product adds; it is not called without a port.
    `kind` returns another class than GrpcServer, derived from it.

    If the installed grpcio lacks a private name that core.py needs, gRPC runs over grpc.aio, and a warning is logged once. Raises SettingsError if grpcio
    is not installed.
    """
    if settings.grpc_port is None:
        return None
    try:
        with _core_variables():
            from weir.frontends.grpc.call import lacking  # grpcio and protobuf are optional
            from weir.frontends.grpc.server import GrpcServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _LIBRARIES:
            raise
        raise SettingsError(
            f"grpc_port={settings.grpc_port}: needs grpcio and protobuf, which are not installed ({error}); "
            f"{add_extra('grpc')}"
        ) from error
    make = GrpcServer if kind is None else kind()
    if missing := lacking():
        import grpc

        from weir.frontends.grpc.aio import AioCore

        logging.getLogger("weir.grpc").warning(
            "grpcio %s has no %s in its core: gRPC runs over grpc.aio, which does more work for each call",
            grpc.__version__,
            ", ".join(missing),
        )
        return make(context, settings, http, AioCore, added)
    from weir.frontends.grpc.core import Core

    return make(context, settings, http, Core, added)


@contextmanager
def _core_variables() -> "Iterator[None]":
    """Set CORE_VARIABLES for the block, which imports gRPC's core, but for those that are set."""
    added = CORE_VARIABLES.keys() - os.environ.keys()
    os.environ.update({name: CORE_VARIABLES[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
