"""gRPC's standard health service.

Beside the server itself ("" and `inference.GRPCInferenceService`) each model has a name there, its own: a load balancer
can ask about one of them.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING, Any

from weir.errors import ModelNotFound
from weir.protocols.grpc.call import Call
from weir.wire.protobuf import message

if TYPE_CHECKING:
    from weir.catalog.registry import Registry

SERVICE = "grpc.health.v1.Health"

_UNKNOWN, _SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = range(4)

_Response = message("grpc.health.v1.HealthCheckResponse")


class Health:
    """Tells whether the models of `registry` take requests; `own` are the names that stand for the whole server.

    Those who watch hear of a change within `look_every` seconds.
    """

    def __init__(self, registry: "Registry", own: Iterable[str], *, look_every: float = 0.5) -> None:
        self._registry = registry
        self._own = {"", SERVICE, *own}
        self._refusing = asyncio.Event()
        self._look_every = look_every

    def refuse(self) -> None:
        """Say from now on that nothing is served; those who watch are told, and their calls end."""
        self._refusing.set()

    async def Check(self, asked: Any, call: Call) -> Any:
        """Say whether the server, or one model, takes requests. Raises ModelNotFound for a name that is neither."""
        status = self._status(asked.service)
        if status == _SERVICE_UNKNOWN:
            raise ModelNotFound(f"service {asked.service!r}: there is none of this name, nor a model")
        return _Response(status=status)

    async def watch(self, asked: Any) -> AsyncGenerator[Any, None]:
        """Yield how it is, and how it is whenever that changes."""
        said = _UNKNOWN
        while True:
            is_last, status = self._refusing.is_set(), self._status(asked.service)
            if status != said:
                said = status
                yield _Response(status=status)
            if is_last:  # not what may have happened while the answer was on its way
                return
            try:
                async with asyncio.timeout(self._look_every):
                    await self._refusing.wait()
            except TimeoutError:
                continue

    def _status(self, name: str) -> int:
        if self._refusing.is_set():
            return _NOT_SERVING
        if name in self._own:
            return _SERVING if self._registry.ready else _NOT_SERVING
        try:
            return _SERVING if self._registry.get(name).ready else _NOT_SERVING
        except ModelNotFound:
            return _SERVICE_UNKNOWN
