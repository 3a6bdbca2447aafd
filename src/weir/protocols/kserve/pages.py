"""What can be asked without changing anything: health, metadata, configuration, statistics, hardware."""

from typing import TYPE_CHECKING

from weir.errors import ModelNotReady
from weir.profiling.machine import find_hardware
from weir.protocols.endpoint import Call
from weir.protocols.kserve.context import KServeContext
from weir.protocols.kserve.documents import count_of, document, text_of
from weir.protocols.kserve.replies import JSON_TYPE
from weir.protocols.metadata import config, device_count, find, metadata, server_metadata, statistics
from weir.protocols.response import HttpResponse, encode_safely

if TYPE_CHECKING:
    from weir.serving.service import Service


class Pages:
    """The handlers; each answers one path."""

    def __init__(self, site: KServeContext) -> None:
        self._site = site
        self._registry = site.registry

    async def live(self, call: Call) -> HttpResponse:
        """Say that this process answers, and that its models can start workers, where liveness counts them."""
        if self._site.failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._site.failed.items())
            raise ModelNotReady(f"not live: {reasons}")
        return document({"live": True})

    async def ready(self, call: Call) -> HttpResponse:
        """Say whether every model takes requests."""
        if not self._registry.ready:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._registry.not_ready_reasons.items())
            raise ModelNotReady(f"not ready: {reasons}")
        return document({"ready": True})

    async def server(self, call: Call) -> HttpResponse:
        """Say what this server is and what it offers."""
        return document(server_metadata(self._site.settings.server_name, self._site.extensions))

    async def models(self, call: Call) -> HttpResponse:
        """Name the models."""
        return document({"models": list(self._registry.services)})

    async def model(self, call: Call) -> HttpResponse:
        """Describe one model."""
        service = self._service(call)
        return document(metadata(service, [each for each in self._registry.versions(service.name) if each]))

    async def model_ready(self, call: Call) -> HttpResponse:
        """Say whether one model takes requests."""
        service = self._service(call)
        if not service.ready:
            raise ModelNotReady(f"model {service.label!r} is not ready: {service.not_ready_reason}")
        return document({"name": service.name, "ready": True})

    async def config(self, call: Call) -> HttpResponse:
        """Show the configuration of one model."""
        return document(config(self._service(call)))

    async def statistics(self, call: Call) -> HttpResponse:
        """Count what one model has done, or every model."""
        return document({"model_stats": [statistics(service) for service in self._asked_for(call)]})

    async def no_regions(self, call: Call) -> HttpResponse:
        """Say that there are no regions of a device's memory: there never are any."""
        return document([])

    async def nothing_to_do(self, call: Call) -> HttpResponse:
        """Take away regions of a device's memory, of which there are none."""
        return document({})

    async def hardware(self, call: Call) -> HttpResponse:
        """List the CPUs and GPUs of this machine."""
        return document({"hardware": [each.to_dict() for each in find_hardware()]})

    async def has_hardware(self, call: Call) -> HttpResponse:
        """Say whether there are as many devices of a kind or name as asked for, or one: 200, or 404."""
        said = await call.document()
        name, count = text_of(said, "name"), count_of(said, "num", 1)
        found = device_count(find_hardware(), name)
        if found < max(1, count):
            error = f"hardware {name!r:.80}: there are {found}, not {max(1, count)}"
            return HttpResponse(404, [JSON_TYPE], encode_safely({"error": error}))
        return document({"name": name, "num": found})

    def _asked_for(self, call: Call) -> "list[Service]":
        if "model" not in call.path:
            return self._registry.all
        if "version" in call.path:
            return [self._service(call)]
        return list(self._registry.versions(self._service(call).name).values())

    def _service(self, call: Call) -> "Service":
        return find(self._registry, call.path["model"], call.path.get("version", ""))
