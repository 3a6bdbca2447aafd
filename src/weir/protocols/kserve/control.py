"""What changes the server: models of the repository, workers, shared memory. Each call is checked by `Control` first."""

from functools import partial
from typing import Any

from weir.errors import InvalidRequest, brief
from weir.protocols.endpoint import Call
from weir.protocols.kserve.context import KServeContext
from weir.protocols.kserve.documents import count_of, document, flag_of, text_of
from weir.protocols.offloading import off_loop
from weir.protocols.repository import load_arguments
from weir.protocols.response import HttpResponse


class Changes:
    """The handlers; each answers one path."""

    def __init__(self, site: KServeContext) -> None:
        self._site = site

    # Models.

    async def index(self, call: Call) -> HttpResponse:
        """List the models that there are to be loaded, with their states. Anybody may ask."""
        states = self._site.manager.index(ready_only=flag_of(await call.document(), "ready"))
        return document([state._asdict() for state in states])

    async def load(self, call: Call) -> HttpResponse:
        """Load a model of the repository, or load it anew."""
        self._check(call)
        whole = await call.document()
        own = {name: value for name, value in whole.items() if name != "parameters"}  # AMD's client has them there
        read = partial(load_arguments, parameters_of(whole), self._site.control, own)
        said = await off_loop(len(call.body), read)  # a configuration is a document in a text of this one
        version = call.path.get("version", "")
        await self._site.manager.load_model(call.path["model"], version=version, **said._asdict())
        return document({})

    async def unload(self, call: Call) -> HttpResponse:
        """Serve a model no longer."""
        self._check(call)
        dependents = flag_of(parameters_of(await call.document()), "unload_dependents")
        version = call.path.get("version", "")
        await self._site.manager.unload_model(call.path["model"], version=version, unload_dependents=dependents)
        return document({})

    # Workers, as the AMD Inference Server has them.

    async def load_worker(self, call: Call) -> HttpResponse:
        """Start a worker, or join one that runs with the same parameters; the answer is its endpoint."""
        self._check(call)
        endpoint = await self._site.manager.load_worker(call.path["worker"], await call.document())
        return HttpResponse(200, [(b"content-type", b"text/plain; charset=utf-8")], endpoint.encode())

    async def unload_worker(self, call: Call) -> HttpResponse:
        """Drain and end a worker of an endpoint; the last one takes the endpoint with it."""
        self._check(call)
        await self._site.manager.unload_worker(call.path["worker"])
        return document({})

    # Shared memory.

    async def memory_status(self, call: Call) -> HttpResponse:
        """List the regions, or show one."""
        self._check(call)
        return document(self._site.regions.status(call.path.get("region", "")))

    async def register_memory(self, call: Call) -> HttpResponse:
        """Open a region."""
        self._check(call)
        said = await call.document()
        key, offset, size = text_of(said, "key"), count_of(said, "offset", 0), count_of(said, "byte_size")
        self._site.regions.register(call.path["region"], key, offset, size)
        return document({})

    async def unregister_memory(self, call: Call) -> HttpResponse:
        """Close a region, or all."""
        self._check(call)
        self._site.regions.unregister(call.path.get("region", ""))
        return document({})

    def _check(self, call: Call) -> None:
        self._site.control.require_http(call.peer, call.headers)


def parameters_of(said: dict[str, Any]) -> dict[str, Any]:
    """Return the object `parameters` of a document; {} if there is none, or null. Raises InvalidRequest."""
    parameters = said.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidRequest(f"parameters={brief(parameters)}: must be an object")
    return parameters
