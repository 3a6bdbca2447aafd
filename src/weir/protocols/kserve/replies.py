"""What is written for the answer to an inference request, and for errors."""

from typing import NamedTuple

from weir.errors import WeirError
from weir.protocols.kserve.heads import HEADER_LENGTH
from weir.protocols.response import Headers, HttpResponse, encode_safely, error_headers, error_value
from weir.protocols.shared_memory import Memory
from weir.protocols.status import kserve_code
from weir.wire.inference import ERROR_NAME, InferenceRequest, InferenceResponse
from weir.wire.kserve_binary import binary_outputs, write_response

JSON_TYPE = (b"content-type", b"application/json")
BINARY_TYPE = (b"content-type", b"application/octet-stream")


class Reply(NamedTuple):
    """An answer whose body is in parts, so that arrays are sent from where they are."""

    headers: Headers
    parts: list[bytes | memoryview]

    def as_answer(self) -> HttpResponse:
        """Return it with the body in one piece."""
        return HttpResponse(200, self.headers, b"".join(self.parts))


def reply_to(request: InferenceRequest, response: InferenceResponse, memory: Memory) -> Reply:
    """Return what is written for `response`; outputs that `request` wants in shared memory, of which `memory` has hold, are put
    there.

    Raises InvalidRequest for an output that does not fit where it is wanted.
    """
    memory.take_outputs(response)
    written = write_response(response, binary_outputs(request))
    if written.header_length is None:
        return Reply([JSON_TYPE], written.parts)
    return Reply([BINARY_TYPE, (HEADER_LENGTH, b"%d" % written.header_length)], written.parts)


def error_answer(error: BaseException, *, development: bool = False) -> HttpResponse:
    """Return the answer for `error`: `{"error": text}` with its code, its name in a header, and Retry-After or Allow where they
    belong."""
    headers = error_headers(error)
    if isinstance(error, WeirError):
        headers.append((ERROR_NAME.encode(), type(error).__name__.encode()))
    return HttpResponse(kserve_code(error), headers, encode_safely({"error": _text_of(error, development=development)}))


def error_event(error: WeirError) -> bytes:
    """Return the data of an event that ends a stream: what the body would be, and `type`, for an event has no headers."""
    return encode_safely({"error": _text_of(error), "type": type(error).__name__})


def _text_of(error: BaseException, *, development: bool = False) -> str:
    value = error_value(error, None, development=development)
    text: str = value["message"]
    if development and isinstance(value["details"], dict) and "traceback" in value["details"]:
        text = f"{text}\n{value['details']['traceback']}"
    return text
