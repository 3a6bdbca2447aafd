"""All calls by their paths."""

from typing import Any

import grpc

from weir.protocols.grpc import refusing
from weir.protocols.grpc.calls import Answer, Context, parse, refuse, unary
from weir.protocols.grpc.controlling import Controlling
from weir.protocols.grpc.health import SERVICE as HEALTH
from weir.protocols.grpc.health import Health
from weir.protocols.grpc.inference import Inference
from weir.protocols.grpc.reflection import VERSIONS, Reflection, service_of
from weir.protocols.grpc.showing import Showing
from weir.protocols.grpc.streaming import Streaming
from weir.protocols.kserve.site import Site
from weir.wire.protobuf import Method, methods

INFERENCE = "inference.GRPCInferenceService"
REPOSITORY = "inference.model_repository.ModelRepositoryService"
OWN = (INFERENCE, REPOSITORY)
ALL = (*OWN, HEALTH, *map(service_of, VERSIONS))


class Services:
    """Finds what answers a call. `most` requests of one stream may be under way."""

    def __init__(self, site: Site, most: int, *, development: bool) -> None:
        self._inference = Inference(site, development=development)
        self._streaming = Streaming(site, most, development=development)
        self._health = Health(site.registry, OWN)
        self._development = development
        answering = (Showing(site), Controlling(site), refusing)
        self._handlers = {
            method.path: unary(method, _answer(answering, method), development=development)
            for service in OWN
            for method in methods(service)
            if method.name not in ("ModelInfer", "ModelStreamInfer")
        }
        self._handlers[f"/{INFERENCE}/ModelInfer"] = self._inference.handler()
        self._handlers[f"/{INFERENCE}/ModelStreamInfer"] = self._streaming.handler()
        self._add_health()
        for version in VERSIONS:
            self._add_reflection(version)

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call; None for one that there is not, which gRPC refuses."""
        return self._handlers.get(handler_call_details.method)

    def refuse(self) -> None:
        """Take no more requests; those under way go on."""
        self._inference.refusing = True
        self._streaming.refuse()
        self._health.refuse()

    def _add_health(self) -> None:
        check, watch = methods(HEALTH)
        self._handlers[check.path] = unary(check, self._health.Check, development=self._development)

        async def watching(body: bytes, context: Context) -> Any:
            try:
                async for answer in self._health.watch(parse(watch, body)):
                    yield answer.SerializeToString()
            except Exception as error:
                await refuse(error, context, development=self._development)

        self._handlers[watch.path] = grpc.unary_stream_rpc_method_handler(watching)

    def _add_reflection(self, version: str) -> None:
        (method,) = methods(service_of(version))
        reflection = Reflection(version, ALL)

        async def reflecting(bodies: Any, context: Context) -> Any:
            try:
                async for body in bodies:
                    yield reflection.answer(parse(method, body)).SerializeToString()
            except Exception as error:
                await refuse(error, context, development=self._development)

        self._handlers[method.path] = grpc.stream_stream_rpc_method_handler(reflecting)


def _answer(answering: tuple[Any, ...], method: Method) -> Answer:
    answer: Answer = next(getattr(each, method.name) for each in answering if hasattr(each, method.name))
    return answer
