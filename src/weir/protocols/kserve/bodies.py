"""Bodies of inference requests: JSON, JSON with binary tensors after it, or one raw tensor; some inputs in shared memory."""

from weir.errors import InvalidRequest
from weir.protocols.compression import decompress
from weir.protocols.kserve.heads import InferAsk
from weir.protocols.offloading import LONG_BODY
from weir.protocols.shared_memory import Memory
from weir.wire import kserve_binary, kserve_json
from weir.wire.inference import InferenceRequest
from weir.wire.kserve_json import Body

ZLIB = b"x"  # a zlib stream begins with it, and no JSON does


def inflated(body: Body, max_size: int) -> Body:
    """Return `body`, or, if it is a zlib stream that no header speaks of, what is in it: some clients send that."""
    return decompress(bytes(body), "deflate", max_size) if bytes(body[:1]) == ZLIB else body


def size_to_read(body: Body) -> int:
    """Return about how many bytes must be read of `body`: of a zlib stream it cannot be told, and it counts as a long one."""
    return len(body) if bytes(body[:1]) != ZLIB else max(len(body), LONG_BODY + 1)


def read_body(ask: InferAsk, body: Body, memory: Memory) -> InferenceRequest:
    """Return the request in `body`, decompressed. Its arrays may be views into it.

    Raises RequestErrors naming tensor, value and rule.
    """
    name, version = ask.service.name, ask.version
    if not len(body):
        raise InvalidRequest("body: is empty, must be an inference request")
    if ask.header_length is None:
        return kserve_json.read_request(body, name, version, find=memory.find)
    if not ask.header_length:
        return kserve_binary.read_raw_request(body, ask.service.inference.inputs(ask.service), name, version)
    return kserve_binary.read_request(body, ask.header_length, name, version, find=memory.find)
