"""What the head of an inference request of the Open Inference Protocol asks for."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from weir.errors import InvalidRequest, MethodNotAllowed, Unsupported
from weir.messages import KSERVE
from weir.protocols.compression import accepted_coding, coding_of
from weir.protocols.metadata import find
from weir.protocols.native import check_length
from weir.protocols.response import Headers
from weir.protocols.settings import HttpSettings

if TYPE_CHECKING:
    from weir.catalog.registry import Registry
    from weir.protocols.kserve.layouts import Layout
    from weir.serving.service import Service
    from weir.wire.kserve_outline import BodyPeek

HEADER_LENGTH = b"inference-header-content-length"

# Clients of the protocol know no others; they are told so by Accept-Encoding headers that libraries send unasked.
CODINGS = ("gzip", "deflate")

# What the paths of inference end with, below those of a model and of each of its versions.
CALLS = ("infer", "generate", "infer_stream", "generate_stream")
_PATH = re.compile(rf"/v2/models/([^/]+)(?:/versions/([^/]+))?/({'|'.join(CALLS)})")


class InferAsk:
    """What the head of a request says.

    `header_length` is how many bytes of the body are JSON, before the binary tensors; None if all are, 0 if the body is one
    raw tensor.
    """

    __slots__ = (
        "accept", "accept_coding", "call", "coding", "content_type", "explain", "header_length", "headers", "key", "last_header",
        "layout", "lead", "outline", "plain", "priority", "request_id", "service", "small_json", "stream", "timeout",
        "traceparent", "version",
    )  # fmt: skip

    def __init__(self, service: "Service", version: str, call: str = "infer") -> None:
        self.service = service
        self.version = version  # that the path names, or ""
        self.call = call  # infer, generate, infer_stream or generate_stream
        self.stream = call.endswith("_stream")
        self.header_length: int | None = None
        self.coding = ""  # how the body is compressed
        self.accept_coding = ""  # how a large answer may be
        self.headers: Headers = []
        # What a request in the line starts from, before its body has been read.
        self.content_type = self.accept = KSERVE
        self.timeout: float = service.settings.timeout  # seconds
        self.priority = 0
        self.key: str | None = None
        self.explain = False
        self.request_id: bytes | None = None
        self.traceparent: str | None = None
        self.plain = False
        self.outline: BodyPeek | None = None  # reads what the line must know of a JSON body that the worker decodes
        self.small_json = False  # the body is a JSON document that `outline` reads, and has few bytes
        self.last_header = b""  # JSON of the last body with binary tensors, whose layout is made if it comes again
        self.layout: Layout | None = None
        self.lead = 0  # bytes before a body in shared memory, so that its tensors are aligned


def named_in(path: str) -> tuple[str, str, str] | None:
    """Return the name, the version ("": none) and the call in `path`, or None if it is no path of inference."""
    found = _PATH.fullmatch(path)
    return None if found is None else (found[1], found[2] or "", found[3])


def read_head(
    registry: "Registry", settings: HttpSettings, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]
) -> InferAsk | None:
    """Read the head of a request: `path` percent-decoded and without the query, `headers` with names in lower case.

    Returns None if the path is not one of inference. Raises RequestErrors naming the header, its value and the rule;
    ModelNotFound; MethodNotAllowed; TooLarge when Content-Length is over `max_body_size`; Unsupported for `infer` of a model that streams.
    """
    named = named_in(path)
    if named is None:
        return None
    if method != "POST":
        raise MethodNotAllowed(f"{method} {path}: takes POST only", details={"allow": ["POST"]})
    model, version, call = named
    ask = InferAsk(find(registry, model, version), version, call)
    ask.headers = list(headers)
    if ask.service.streaming and call == "infer":
        raise Unsupported(f"model {ask.service.label!r} streams its answers, and this call has one answer only")
    for name, value in ask.headers:
        if name == b"content-length":
            check_length(value, settings.max_body_size)
        elif name == HEADER_LENGTH:
            ask.header_length = _count(value)
        elif name == b"content-encoding":
            ask.coding = coding_of(value.decode("latin-1"))
        elif name == b"traceparent":
            ask.traceparent = value.decode("latin-1")
        elif name == b"accept-encoding":
            ask.accept_coding = accepted_coding(value.decode("latin-1"), CODINGS)
    return ask


def _count(value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        text = value[:40].decode("latin-1")
        raise InvalidRequest(f"Inference-Header-Content-Length {text!r}: must be a number of bytes")
    return int(value)
