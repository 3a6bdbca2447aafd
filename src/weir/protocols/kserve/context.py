"""What all frontends of the Open Inference Protocol share: the models, the access rules, the account of bytes and connections, and shared memory."""

from typing import TYPE_CHECKING

from weir.errors import Unsupported
from weir.protocols.access import Access, Control
from weir.protocols.account import Account
from weir.protocols.kserve.metadata import EXTENSIONS, SHARED_MEMORY
from weir.protocols.response import Headers
from weir.protocols.settings import HttpSettings, KserveSettings
from weir.protocols.shared_memory import Memory, Regions

if TYPE_CHECKING:
    from weir.catalog.manager import Manager
    from weir.serving.handle import Models


class KserveContext:
    """What a frontend of the Open Inference Protocol needs of its server.

    `registry` has the models. `access` decides who may call the server and `control` who may change it. `manager` loads and unloads models; it is None if
    the server's models cannot change.
    """

    def __init__(
        self,
        registry: "Models",
        http: HttpSettings,
        control: Control | None = None,
        *,
        settings: KserveSettings | None = None,
        manager: "Manager | None" = None,
        access: Access | None = None,
        account: Account | None = None,
    ) -> None:
        self.registry = registry
        self.http = http
        self.control = control or Control()
        self.access = access or Access()
        self.settings = settings or KserveSettings()
        self.account = account or Account(http)
        self.regions = Regions(allowed=self.settings.allow_shared_memory, max_read=http.max_body_size)
        self._manager = manager

    @property
    def manager(self) -> "Manager":
        """What loads and unloads models. Raises Unsupported if the server's models cannot change."""
        if self._manager is None:
            raise Unsupported("this server cannot load or unload models while it runs")
        return self._manager

    @property
    def has_manager(self) -> bool:
        """Whether models can be loaded and unloaded."""
        return self._manager is not None

    @property
    def failed(self) -> dict[str, str]:
        """Why this server is not live: the reason of each model that can no longer start a worker, by label. Empty unless `liveness` is "models"."""
        if self.http.liveness == "process":
            return {}
        return {service.facts.label: service.control.failed for service in self.registry.all if service.control.failed}

    @property
    def extensions(self) -> list[str]:
        """The extensions that the server's metadata lists."""
        offered = [each for each in EXTENSIONS if self.has_manager or not each.startswith("model_repository")]
        return sorted([*offered, SHARED_MEMORY]) if self.regions.allowed else offered

    def memory(self, peer: str | None, headers: Headers) -> Memory:
        """Return the shared memory for one request: only a caller who may control the server can use it."""
        return Memory(self.regions, lambda: self.control.require_http(peer, headers))
