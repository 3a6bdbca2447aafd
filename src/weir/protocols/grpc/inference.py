"""ModelInfer: one request, one answer."""

from typing import TYPE_CHECKING, Any

import grpc

from weir.errors import Draining, WeirError
from weir.protocols.grpc.calls import DOOR, Context, Trailers, headers_of, refuse
from weir.protocols.inferring import find, infer, told
from weir.protocols.kserve.site import Site
from weir.protocols.regions import Memory
from weir.telemetry.tracecontext import CURRENT, HEADER, Trace
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters
from weir.wire.kserve_grpc import Parsed, is_typed, parse_request, read_request, write_response
from weir.wire.kserve_json import REGION

if TYPE_CHECKING:
    from weir.manager.service import Service


class Exchange:
    """One request and its answer: what the unary call and streams share."""

    __slots__ = ("_context", "_parsed", "_site", "request", "service")

    def __init__(self, site: Site, parsed: Parsed, context: Context) -> None:
        """Read the request. Raises RequestErrors; the observers of its service hear of one that is malformed."""
        self._site = site
        self._context = context
        self._parsed = parsed
        asked = parsed.message
        self.service: Service = find(site.registry, asked.model_name, asked.model_version)
        try:
            self.request: InferenceRequest = read_request(self._parsed, find=self._find)
        except WeirError as error:
            raise told(self.service, DOOR, error) from None

    def trace(self) -> Trace | None:
        """Return the trace of the request, within that of its caller; None if nobody traces."""
        if self.service.tracing is None:
            return None
        said = dict(headers_of(self._context)).get(HEADER.encode())
        trace = self.service.tracing.new(None if said is None else said.decode("latin-1"))
        CURRENT.set(trace)
        return trace

    def write(self, response: InferenceResponse) -> bytes:
        """Return the body of an answer; what its request wants in shared memory is put there."""
        asked = self.request.outputs
        if asked is not None and response.outputs and any(REGION in each.parameters for each in asked):
            self._memory.take_outputs(self.request, response)
        return write_response(response, typed=is_typed(self._parsed))

    def transferred(self, received_bytes: int, sent_bytes: int) -> None:
        """Tell the observers."""
        for observer in self.service.observers:
            observer.transferred(self.service.label, DOOR, received_bytes, sent_bytes)

    def _find(self, name: str, parameters: Parameters) -> memoryview | None:
        return self._memory.find(name, parameters) if REGION in parameters else None

    @property
    def _memory(self) -> Memory:
        return self._site.memory(self._context.peer(), headers_of(self._context))


class Inference:
    """The handler of ModelInfer. Set `refusing` when no more requests are taken."""

    def __init__(self, site: Site, *, development: bool) -> None:
        self._site = site
        self._development = development
        self.refusing = False

    def handler(self) -> Any:
        """Return what gRPC calls."""
        return grpc.unary_unary_rpc_method_handler(self._infer)

    async def _infer(self, body: bytes, context: Context) -> bytes:
        trailers: Trailers = ()
        try:
            if self.refusing:
                raise refusal()
            exchange = Exchange(self._site, parse_request(body), context)
            trace = exchange.trace()
            if trace is not None:
                trailers = ((HEADER, trace.traceparent),)
                context.set_trailing_metadata(trailers)
            limit = context.time_remaining()
            response = await infer(exchange.service, exchange.request, door=DOOR, timeout=limit, trace=trace)
            answer = exchange.write(response)
        except Exception as error:
            await refuse(error, context, trailers, development=self._development)
        exchange.transferred(len(body), len(answer))
        return answer


def refusal() -> Draining:
    """Return the error of whoever comes when no more are taken."""
    return Draining("the server is being stopped and takes no more requests", retry_after=1.0)
