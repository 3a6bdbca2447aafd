"""The calls over HTTP: the request for each, and how its response is read."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from weir.client.calls import Calls, Decoder, Program, Streaming, error_of_status
from weir.errors import WeirError
from weir.wire import kserve_binary, kserve_json
from weir.wire.data_plane import DATA_PLANE
from weir.wire.inference import ERROR_NAME, InferenceRequest, InferenceResponse
from weir.wire.sse import CONTENT_TYPE, EventParser

HEADER_LENGTH = "inference-header-content-length"

_dumps, _loads = msgspec.json.encode, msgspec.json.decode


class OutgoingRequest(NamedTuple):
    """An HTTP request to send."""

    method: str
    path: str
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes = b""


class HttpReply(NamedTuple):
    """The HTTP response. The names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpCalls(Calls):
    """Calls whose steps are OutgoingRequests, answered by HttpReplys. With `binary`, tensors travel as raw bytes both ways."""

    def __init__(self, *, binary: bool = True) -> None:
        self._binary = binary

    def call(self, name: str, body: Mapping[str, Any] | None = None, /, **path: str) -> Program[Any]:
        """See Calls."""
        call = DATA_PLANE[name]
        method, route = list(call.routes())[bool(path.get("version"))]
        filled = route.format(**{key: quote(value, safe="") for key, value in path.items()})
        if method == "GET":
            request = OutgoingRequest(method, filled)
        else:
            request = OutgoingRequest(method, filled, {"content-type": "application/json"}, _dumps(dict(body or {})))
        reply = yield request
        if call.asks:
            return {call.asks: _holds(method, reply)}
        checked(reply)
        if call.name == "load_worker":
            return reply.body.decode()
        try:
            return _loads(reply.body) if reply.body else {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WeirError(f"{filled}: the response is not JSON ({error})") from error

    def infer(self, request: InferenceRequest) -> Program[InferenceResponse]:
        """See Calls."""
        sent = with_binary_outputs(request) if self._binary else request
        reply = checked((yield self._posted(sent, "/infer", "*/*")))
        length = reply.headers.get(HEADER_LENGTH)
        if length is None:
            return kserve_json.read_response(reply.body)
        return kserve_binary.read_response(reply.body, int(length))

    def stream(self, request: InferenceRequest) -> Streaming:
        """See Calls. Each response is an event in JSON, so FP16 and BF16 cannot be outputs."""
        return Streaming(self._posted(request, "/infer_stream", CONTENT_TYPE), _event_decoder)

    def _posted(self, request: InferenceRequest, call: str, accept: str) -> OutgoingRequest:
        written = kserve_binary.write_request(request, lambda _: self._binary)
        headers = {"accept": accept, "content-type": "application/json"}
        if written.header_length is not None:
            headers |= {"content-type": "application/octet-stream", HEADER_LENGTH: str(written.header_length)}
        path = _model(request.model, request.version) + call
        return OutgoingRequest("POST", path, headers, b"".join(written.parts))


def with_binary_outputs(request: InferenceRequest) -> InferenceRequest:
    """Return `request` with the parameter that makes the server send every output as raw bytes."""
    parameters = {**request.parameters, "binary_data_output": True}
    return InferenceRequest(
        request.model,
        request.inputs,
        version=request.version,
        id=request.id,
        outputs=request.outputs,
        parameters=parameters,
    )


def checked(reply: HttpReply) -> HttpReply:
    """Return `reply` if its status is 200. Raises the error that it stands for otherwise."""
    if reply.status != 200:
        raise error_of(reply)
    return reply


def error_of(reply: HttpReply) -> WeirError:
    """Return the error that `reply` stands for, in the protocol's form, in ours (docs/reference/errors.md), or in that of /encode."""
    text, name = _text_of(reply.body)
    after = reply.headers.get("retry-after", "")
    name, seconds = reply.headers.get(ERROR_NAME, name), float(after) if after.isdigit() else None
    return error_of_status(reply.status, text, name=name, retry_after=seconds)


def _event_decoder() -> Decoder:
    parser = EventParser()

    def feed(data: bytes) -> Iterable[InferenceResponse]:
        for event in parser.feed(data):
            if event.name == "error":
                text, name = _text_of(event.data)
                raise error_of_status(500, text, name=name)
            yield kserve_json.read_response(event.data)

    return feed


def _holds(method: str, reply: HttpReply) -> bool:
    """Return what the reply to a question says. Status 404 is no; to a GET, so is every other error but 401 and 403, as servers differ in these."""
    if reply.status == 404 or (method == "GET" and reply.status not in (200, 401, 403)):
        return False
    checked(reply)
    return True


def _model(name: str, version: str) -> str:
    return f"/v2/models/{quote(name, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


def _text_of(body: bytes) -> tuple[str, str]:
    """Return the text and the class name in an error's body; where it has none, the body itself and ""."""
    try:
        document = _loads(body)
        error = document["error"] if "error" in document else document["description"]
        name = str(document.get("type", ""))
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return body[:1000].decode(errors="replace"), ""
    return (str(error.get("message", "")) if isinstance(error, dict) else str(error)), name
