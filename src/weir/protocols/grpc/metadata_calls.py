"""What can be asked without changing anything: health, metadata, configuration, statistics, hardware."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import ParseDict

from weir.errors import ModelNotFound
from weir.profiling.machine import find_hardware
from weir.protocols.grpc.call import Call
from weir.protocols.kserve.context import KServeContext
from weir.protocols.metadata import config, device_count, find, metadata, server_metadata, statistics
from weir.wire.protobuf import POOL, message

if TYPE_CHECKING:
    from weir.serving.service import Service

_PREFIX = "inference."


def filled(name: str, said: Mapping[str, Any]) -> Any:
    """Return the message of that name with what is `said`, by the names of its fields."""
    return ParseDict(dict(said), message(_PREFIX + name)(), descriptor_pool=POOL)


class Showing:
    """The answers, one to each call of the same name."""

    def __init__(self, site: KServeContext) -> None:
        self._site = site
        self._registry = site.registry

    async def ServerLive(self, asked: Any, call: Call) -> Any:
        """Say that this process answers, and that its models can start workers, where liveness counts them."""
        return filled("ServerLiveResponse", {"live": not self._site.failed})

    async def ServerReady(self, asked: Any, call: Call) -> Any:
        """Say whether every model takes requests."""
        return filled("ServerReadyResponse", {"ready": self._registry.ready})

    async def ModelReady(self, asked: Any, call: Call) -> Any:
        """Say whether one model takes requests; one that there is not does not."""
        try:
            ready = self._registry.get(asked.name, asked.version).ready
        except ModelNotFound:
            ready = False
        return filled("ModelReadyResponse", {"ready": ready})

    async def ServerMetadata(self, asked: Any, call: Call) -> Any:
        """Say what this server is and what it offers."""
        return filled("ServerMetadataResponse", server_metadata(self._site.settings.server_name, self._site.extensions))

    async def ModelMetadata(self, asked: Any, call: Call) -> Any:
        """Describe one model."""
        service = self._service(asked)
        versions = [each for each in self._registry.versions(service.name) if each]
        return filled("ModelMetadataResponse", metadata(service, versions))

    async def ModelConfig(self, asked: Any, call: Call) -> Any:
        """Show the configuration of one model."""
        return filled("ModelConfigResponse", {"config": config(self._service(asked))})

    async def ModelStatistics(self, asked: Any, call: Call) -> Any:
        """Count what one model, in one version or all, or every model, has done."""
        found = [statistics(service) for service in self._asked_for(asked)]
        return filled("ModelStatisticsResponse", {"model_stats": found})

    async def ModelList(self, asked: Any, call: Call) -> Any:
        """Name the models."""
        return filled("ModelListResponse", {"models": list(self._registry.services)})

    async def HasHardware(self, asked: Any, call: Call) -> Any:
        """Say whether there are as many devices of a kind as asked for, or one."""
        found = device_count(find_hardware(), asked.name)
        return filled("HasHardwareResponse", {"found": found >= max(1, asked.num)})

    def _service(self, asked: Any) -> "Service":
        return find(self._registry, asked.name, asked.version)

    def _asked_for(self, asked: Any) -> "list[Service]":
        if not asked.name:
            return self._registry.all
        if asked.version:
            return [self._service(asked)]
        return list(self._registry.versions(self._service(asked).name).values())
