"""Makes the gRPC door, if it is wanted and can be had."""

import logging

from weir.errors import SettingsError
from weir.protocols.door import Door
from weir.protocols.grpc.settings import GrpcSettings
from weir.protocols.kserve.context import KServeContext
from weir.protocols.settings import HttpSettings

_LIBRARIES = ("grpc", "google")


def make_door(site: KServeContext, settings: GrpcSettings, http: HttpSettings) -> Door | None:
    """Return the door, not open yet; None if no port is given. Raises SettingsError if grpcio is not installed.

    Where the core of the installed grpcio lacks what core.py is built on, gRPC runs over grpc.aio, with one warning.
    """
    if settings.grpc_port is None:
        return None
    try:
        from weir.protocols.grpc.call import lacking  # grpcio and protobuf are optional
        from weir.protocols.grpc.server import GrpcServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _LIBRARIES:
            raise
        raise SettingsError(
            f"grpc_port={settings.grpc_port}: needs grpcio and protobuf, which are not installed ({error}): "
            'pip install "weir-serving[grpc]"'
        ) from error
    if missing := lacking():
        import grpc

        from weir.protocols.grpc.aio import AioCore

        logging.getLogger("weir.grpc").warning(
            "grpcio %s has no %s in its core: gRPC runs over grpc.aio, which does more work for each call",
            grpc.__version__, ", ".join(missing),
        )  # fmt: skip
        return GrpcServer(site, settings, http, AioCore)
    from weir.protocols.grpc.core import Core

    return GrpcServer(site, settings, http, Core)
