"""What changes the server: models of the repository, workers, shared memory. Each call is checked by `Control` first."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from weir.errors import InvalidRequest, brief
from weir.protocols.grpc.call import Call
from weir.protocols.grpc.calls import headers_of
from weir.protocols.grpc.metadata_calls import filled
from weir.protocols.kserve.context import KServeContext
from weir.protocols.offloading import off_loop
from weir.protocols.repository import LoadArguments, is_of_repository, load_arguments
from weir.wire.inference import Parameter
from weir.wire.kserve_grpc import read_parameters


class Controlling:
    """The answers, one to each call of the same name."""

    def __init__(self, site: KServeContext) -> None:
        self._site = site

    # Models, as Triton has them.

    async def RepositoryIndex(self, asked: Any, call: Call) -> Any:
        """List the models that there are to be loaded, with their states. Anybody may ask."""
        states = self._site.manager.index(ready_only=asked.ready)
        return filled("RepositoryIndexResponse", {"models": [state._asdict() for state in states]})

    async def RepositoryModelLoad(self, asked: Any, call: Call) -> Any:
        """Load a model of the repository, or load it anew."""
        self._check(call)
        name = named(asked)
        said = await self._load_arguments(asked, repository_parameters(asked), {})
        await self._site.manager.load_model(name, **said._asdict())
        return filled("RepositoryModelLoadResponse", {"model_name": name, "isLoaded": True})

    async def RepositoryModelUnload(self, asked: Any, call: Call) -> Any:
        """Serve a model no longer."""
        self._check(call)
        name = named(asked)
        dependents = repository_parameters(asked).get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidRequest(f"parameter 'unload_dependents'={brief(dependents, 40)}: must be true or false")
        await self._site.manager.unload_model(name, unload_dependents=dependents)
        return filled("RepositoryModelUnloadResponse", {"model_name": name, "isUnloaded": True})

    # Models and workers, as the AMD Inference Server has them.

    async def ModelLoad(self, asked: Any, call: Call) -> Any:
        """Load a model of the repository, or load it anew."""
        self._check(call)
        parameters = read_parameters(asked.parameters)
        own = {name: value for name, value in parameters.items() if not is_of_repository(name)}
        repository = {name: value for name, value in parameters.items() if is_of_repository(name)}
        said = await self._load_arguments(asked, repository, own)
        await self._site.manager.load_model(asked.name, **said._asdict())
        return filled("ModelLoadResponse", {})

    async def ModelUnload(self, asked: Any, call: Call) -> Any:
        """Serve a model no longer."""
        self._check(call)
        await self._site.manager.unload_model(asked.name)
        return filled("ModelUnloadResponse", {})

    async def WorkerLoad(self, asked: Any, call: Call) -> Any:
        """Start a worker, or join one that runs with the same parameters; the answer is its endpoint."""
        self._check(call)
        endpoint = await self._site.manager.load_worker(asked.name, read_parameters(asked.parameters))
        return filled("WorkerLoadResponse", {"endpoint": endpoint})

    async def WorkerUnload(self, asked: Any, call: Call) -> Any:
        """Drain and end a worker of an endpoint; the last one takes the endpoint with it."""
        self._check(call)
        await self._site.manager.unload_worker(asked.name)
        return filled("WorkerUnloadResponse", {})

    # Shared memory.

    async def SystemSharedMemoryStatus(self, asked: Any, call: Call) -> Any:
        """List the regions, or show one."""
        self._check(call)
        regions = {each["name"]: each for each in self._site.regions.status(asked.name)}
        return filled("SystemSharedMemoryStatusResponse", {"regions": regions})

    async def SystemSharedMemoryRegister(self, asked: Any, call: Call) -> Any:
        """Open a region."""
        self._check(call)
        self._site.regions.register(asked.name, asked.key, asked.offset, asked.byte_size)
        return filled("SystemSharedMemoryRegisterResponse", {})

    async def SystemSharedMemoryUnregister(self, asked: Any, call: Call) -> Any:
        """Close a region, or all."""
        self._check(call)
        self._site.regions.unregister(asked.name)
        return filled("SystemSharedMemoryUnregisterResponse", {})

    async def _load_arguments(self, asked: Any, parameters: Mapping[str, Any], own: Mapping[str, Any]) -> LoadArguments:
        """Read them in a thread if the message is long: a configuration is a JSON document."""
        return await off_loop(asked.ByteSize(), partial(load_arguments, parameters, self._site.control, own))

    def _check(self, call: Call) -> None:
        self._site.control.require_http(call.peer, headers_of(call))


def named(asked: Any) -> str:
    """Return the name of the model to load or unload: KServe's clients write it where Triton's have the repository."""
    name: str = asked.model_name or asked.repository_name
    return name


def repository_parameters(asked: Any) -> dict[str, Parameter | bytes]:
    """Return the parameters of a call as a dict: files are bytes. MLServer's messages have none."""
    read: dict[str, Parameter | bytes] = {}
    for name, parameter in getattr(asked, "parameters", {}).items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(f"parameter {name!r}: has no value")
        read[name] = getattr(parameter, choice)
    return read
