"""One request and its answer, as the messages of gRPC have them."""

from typing import TYPE_CHECKING

from weir.errors import WeirError
from weir.protocols.grpc.call import Call
from weir.protocols.grpc.calls import DOOR, headers_of
from weir.protocols.inferring import find, told
from weir.protocols.kserve.site import Site
from weir.protocols.regions import Memory
from weir.telemetry.tracecontext import CURRENT, HEADER, Trace
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters
from weir.wire.kserve_grpc import Parsed, is_typed, read_request, write_response
from weir.wire.kserve_json import REGION

if TYPE_CHECKING:
    from weir.manager.service import Service


class Exchange:
    """One request and its answer: what the unary call and streams share."""

    __slots__ = ("_parsed", "_site", "call", "request", "service")

    def __init__(self, site: Site, parsed: Parsed, call: Call) -> None:
        """Read the request. Raises RequestErrors; the observers of its service hear of one that is malformed."""
        self._site = site
        self.call = call
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
        said = dict(headers_of(self.call)).get(HEADER.encode())
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
        return self._site.memory(self.call.peer, headers_of(self.call))
