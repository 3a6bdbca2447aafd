"""One request and its answer, as the messages of gRPC have them."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from weir.errors import WeirError
from weir.protocols.exchange import Exchange
from weir.protocols.grpc.call import Call
from weir.protocols.grpc.calls import DOOR, headers_of
from weir.protocols.kserve.context import KServeContext
from weir.protocols.metadata import find
from weir.protocols.offloading import off_loop, written
from weir.protocols.shared_memory import Memory, wants_regions
from weir.telemetry.tracecontext import HEADER
from weir.wire.inference import InferenceRequest, InferenceResponse, Parameters
from weir.wire.kserve_grpc import (
    Parsed,
    bytes_to_read,
    bytes_to_write,
    is_typed,
    parse_request,
    read_request,
    write_response,
)
from weir.wire.kserve_json import REGION

Read = tuple[Parsed, InferenceRequest | WeirError]


def read(site: KServeContext, call: Call, body: bytes) -> Read:
    """Return the message in `body`, and the request that it is or what is wrong with it. Raises InvalidRequest if it is no message."""
    parsed = parse_request(body)

    def find_in_memory(name: str, parameters: Parameters) -> memoryview | None:
        return site.memory(call.peer, headers_of(call)).find(name, parameters) if REGION in parameters else None

    try:
        return parsed, read_request(parsed, find=find_in_memory)
    except WeirError as error:
        return parsed, error


async def read_long(site: KServeContext, call: Call, body: bytes) -> Read:
    """Return the same; what takes long is read in a thread."""
    return await off_loop(bytes_to_read(body), partial(read, site, call, body))


class Writing(NamedTuple):
    """An answer that is to be written: about how long that takes, as bytes of text, and what does it. It changes nothing that others see."""

    size_bytes: int
    write: Callable[[], bytes]

    @classmethod
    def of(cls, response: InferenceResponse, *, typed: bool = False) -> "Writing":
        """Return what writes `response`, its tensors `typed` or raw."""
        return cls(bytes_to_write(response, typed=typed), partial(write_response, response, typed=typed))


class GrpcExchange(Exchange):
    """One request and its answer as messages of gRPC: what the unary call and streams share."""

    __slots__ = ("_memory", "_parsed", "call", "request")

    def __init__(self, site: KServeContext, call: Call, parsed: Parsed, read: InferenceRequest | WeirError) -> None:
        """Take what was `read`. Raises RequestErrors; the observers of its service hear of a request that is malformed."""
        message = parsed.message
        service = find(site.registry, message.model_name, message.model_version)
        super().__init__(service, door=DOOR, timeout=call.time_remaining())
        if service.tracing is not None:
            caller_span = dict(headers_of(call)).get(HEADER.encode())
            self.traceparent = None if caller_span is None else caller_span.decode("latin-1")
        self.call = call
        self._parsed = parsed
        if isinstance(read, WeirError):
            raise self.refused(read) from None
        self.request = read
        self._memory: Memory | None = None
        if wants_regions(read):
            self._memory = site.memory(call.peer, headers_of(call))
            try:
                self._memory.hold(read)
            except WeirError as error:
                raise self.refused(error) from None

    def writing(self, response: InferenceResponse) -> "Writing":
        """Return what writes an answer; what its request wants in shared memory is put there at once."""
        if self._memory is not None and response.outputs:
            self._memory.take_outputs(response)
        return Writing.of(response, typed=is_typed(self._parsed))

    async def write(self, response: InferenceResponse) -> bytes:
        """Return the body of an answer, as `writing` does; a long one is written in a thread."""
        return await written(*self.writing(response))
