"""All calls by their paths."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weir.errors import Overloaded, Unauthorized, WeirError
from weir.protocols.grpc import unsupported_calls
from weir.protocols.grpc.call import Call
from weir.protocols.grpc.calls import Answer, headers_of, in_task, parse, refuse, unary
from weir.protocols.grpc.controlling import Controlling
from weir.protocols.grpc.core import Handler
from weir.protocols.grpc.health import SERVICE as HEALTH
from weir.protocols.grpc.health import Health
from weir.protocols.grpc.inference import Inference
from weir.protocols.grpc.metadata_calls import Showing
from weir.protocols.grpc.reflection import VERSIONS, Reflection, service_of
from weir.protocols.grpc.streaming import Streaming
from weir.protocols.kserve.context import KServeContext
from weir.wire.protobuf import Method, methods

INFERENCE = "inference.GRPCInferenceService"
REPOSITORY = "inference.model_repository.ModelRepositoryService"
OWN = (INFERENCE, REPOSITORY)
OPEN = (
    *[method.path for method in methods(HEALTH)], *[f"/{INFERENCE}/{name}" for name in ("ServerLive", "ServerReady")]
)  # fmt: skip
# Calls of Watch at a time: of all who may call, and of those without the key of a server that asks for one, for load balancers have none.
_MOST_WATCHERS = 1000
_MOST_STRANGERS = 100
ALL = (*OWN, HEALTH, *map(service_of, VERSIONS))


class Services:
    """What answers each call: `handlers` are by its path. `most` requests of one stream may be under way."""

    def __init__(self, site: KServeContext, most: int, *, development: bool) -> None:
        self._inference = Inference(site, development=development)
        self._streaming = Streaming(site, most, development=development)
        self._health = Health(site.registry, OWN)
        self._development = development
        self._access = site.access
        answering = (Showing(site), Controlling(site), unsupported_calls)
        self.handlers: dict[str, Handler] = {
            method.path: unary(method, _answer(answering, method), development=development)
            for service in OWN
            for method in methods(service)
            if method.name not in ("ModelInfer", "ModelStreamInfer")
        }
        self.handlers[f"/{INFERENCE}/ModelInfer"] = self._inference.handler()
        self.handlers[f"/{INFERENCE}/ModelStreamInfer"] = self._streaming.handler()
        self._watching = {True: 0, False: 0}  # by whether they know the key
        self._add_health()
        for version in VERSIONS:
            self._add_reflection(version)

    def admit(self, path: str, call: Call) -> bool:
        """Tell whether a call may go on: what says whether the server lives may, and what comes with its key; else end it."""
        try:
            if self._access.required and path not in OPEN:
                self._access.require_http(headers_of(call))
        except Unauthorized as error:
            refuse(error, call, development=self._development)
            return False
        return True

    def refuse_with(self, error: WeirError, call: Call) -> None:
        """End a call with `error`."""
        refuse(error, call, development=self._development)

    def refuse(self) -> None:
        """Take no more requests; those under way go on."""
        self._inference.refusing = True
        self._streaming.refuse()
        self._health.refuse()

    def _add_health(self) -> None:
        check, watch = methods(HEALTH)
        self.handlers[check.path] = unary(check, self._health.Check, development=self._development)

        async def watching(call: Call, body: bytes) -> None:
            with self._watchers(self._knows_key(call)):
                async for answer in self._health.watch(parse(watch, body)):
                    await call.write(answer.SerializeToString())

        self.handlers[watch.path] = Handler(in_task(watching, development=self._development))

    @contextmanager
    def _watchers(self, knows_key: bool) -> Iterator[None]:
        """Count one more who watches. Raises Overloaded for one too many."""
        most = _MOST_WATCHERS if knows_key else _MOST_STRANGERS
        if self._watching[knows_key] >= most:
            raise Overloaded(f"{most} calls of Watch are under way; that is the limit", retry_after=1.0)
        self._watching[knows_key] += 1
        try:
            yield
        finally:
            self._watching[knows_key] -= 1

    def _knows_key(self, call: Call) -> bool:
        try:
            self._access.require_http(headers_of(call))
        except Unauthorized:
            return False
        return True

    def _add_reflection(self, version: str) -> None:
        (method,) = methods(service_of(version))
        reflection = Reflection(version, ALL)

        async def reflecting(call: Call, _: bytes) -> None:
            while (body := await call.read()) is not None:
                await call.write(reflection.answer(parse(method, body)).SerializeToString())

        self.handlers[method.path] = Handler(in_task(reflecting, development=self._development), takes_stream=True)


def _answer(answering: tuple[Any, ...], method: Method) -> Answer:
    answer: Answer = next(getattr(each, method.name) for each in answering if hasattr(each, method.name))
    return answer
