"""What can be asked without changing anything: health, metadata, configuration, statistics, hardware."""

from typing import TYPE_CHECKING

from weir.errors import ModelNotReady
from weir.protocols.answers import Answer
from weir.protocols.describing import config, metadata, server_metadata
from weir.protocols.inferring import find
from weir.protocols.kserve.endpoint import Call, document
from weir.protocols.kserve.site import Site

if TYPE_CHECKING:
    from weir.manager.service import Service


class Pages:
    """The handlers; each answers one path."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._registry = site.registry

    async def live(self, call: Call) -> Answer:
        """Say that this process answers."""
        return document({"live": True})

    async def ready(self, call: Call) -> Answer:
        """Say whether every model takes requests."""
        if not self._registry.ready:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._registry.not_ready_reasons.items())
            raise ModelNotReady(f"not ready: {reasons}")
        return document({"ready": True})

    async def server(self, call: Call) -> Answer:
        """Say what this server is and what it offers."""
        return document(server_metadata(self._site.settings.server_name, self._site.extensions))

    async def models(self, call: Call) -> Answer:
        """Name the models."""
        return document({"models": list(self._registry.services)})

    async def model(self, call: Call) -> Answer:
        """Describe one model."""
        service = self._service(call)
        return document(metadata(service, [each for each in self._registry.versions(service.name) if each]))

    async def model_ready(self, call: Call) -> Answer:
        """Say whether one model takes requests."""
        service = self._service(call)
        if not service.ready:
            raise ModelNotReady(f"model {service.label!r} is not ready: {service.not_ready_reason}")
        return document({"name": service.name, "ready": True})

    async def config(self, call: Call) -> Answer:
        """Show the configuration of one model."""
        return document(config(self._service(call)))

    def _service(self, call: Call) -> "Service":
        return find(self._registry, call.path["model"], call.path.get("version", ""))
