"""Makes the gRPC door, if it is wanted and can be had."""

from weir.errors import SettingsError
from weir.protocols.door import Door
from weir.protocols.grpc.settings import GrpcSettings
from weir.protocols.kserve.context import KServeContext
from weir.protocols.settings import HttpSettings

_LIBRARIES = ("grpc", "google")


def make_door(site: KServeContext, settings: GrpcSettings, http: HttpSettings) -> Door | None:
    """Return the door, not open yet; None if no port is given. Raises SettingsError if grpcio is not installed, or not one
    that will do."""
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

        raise SettingsError(
            f"grpc_port={settings.grpc_port}: grpcio {grpc.__version__} has no {', '.join(missing)} in its core, which this "
            "version of Weir builds on; install another grpcio, or a newer Weir"
        )
    return GrpcServer(site, settings, http)
