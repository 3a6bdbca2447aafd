"""The calls over HTTP: the request for each, and how its response is read. Needs no library for HTTP."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from weir.client.calls import Decoder, Metadata, Program, Streaming, error_of_status
from weir.errors import NotFound, SettingsError, WeirError
from weir.wire import kserve_binary, kserve_json
from weir.wire.inference import ERROR_NAME, InferenceRequest, InferenceResponse, Parameter
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


class HttpCalls:
    """Calls whose steps are OutgoingRequests, answered by HttpReplys. With `binary`, tensors travel as raw bytes both ways."""

    def __init__(self, *, binary: bool = True) -> None:
        self._binary = binary

    def server_metadata(self) -> Program[Metadata]:
        """See Calls."""
        return (yield from _fetched(OutgoingRequest("GET", "/v2")))  # type: ignore[no-any-return]  # what JSON holds is Any

    def server_live(self) -> Program[bool]:
        """See Calls."""
        return (yield from _whether("/v2/health/live"))

    def server_ready(self) -> Program[bool]:
        """See Calls."""
        return (yield from _whether("/v2/health/ready"))

    def model_ready(self, name: str, version: str) -> Program[bool]:
        """See Calls."""
        return (yield from _whether(_model(name, version) + "/ready"))

    def model_metadata(self, name: str, version: str) -> Program[Metadata]:
        """See Calls."""
        return (yield from _fetched(OutgoingRequest("GET", _model(name, version))))  # type: ignore[no-any-return]  # what JSON holds is Any

    def models(self) -> Program[list[str]]:
        """See Calls."""
        answer = yield from _fetched(OutgoingRequest("GET", "/v2/models"))
        return list(answer["models"])

    def has_hardware(self, name: str, count: int) -> Program[bool]:
        """See Calls."""
        try:
            yield from _fetched(_posted("/v2/hardware", {"name": name, "num": count}))
        except NotFound:
            return False
        return True

    def load_model(self, name: str, config: Mapping[str, Any] | None) -> Program[None]:
        """See Calls."""
        parameters = {} if config is None else {"config": _dumps(dict(config)).decode()}
        yield from _fetched(_posted(f"/v2/repository/models/{quote(name, safe='')}/load", {"parameters": parameters}))

    def unload_model(self, name: str) -> Program[None]:
        """See Calls."""
        yield from _fetched(_posted(f"/v2/repository/models/{quote(name, safe='')}/unload", {}))

    def load_worker(self, name: str, parameters: Mapping[str, Parameter]) -> Program[str]:
        """See Calls."""
        request = _posted(f"/v2/workers/{quote(name, safe='')}/load", parameters)
        return checked((yield request)).body.decode()

    def unload_worker(self, endpoint: str) -> Program[None]:
        """See Calls."""
        yield from _fetched(_posted(f"/v2/workers/{quote(endpoint, safe='')}/unload", {}))

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
    """Return the error that `reply` stands for."""
    text, name = _text_of(reply.body), reply.headers.get(ERROR_NAME, "")
    return error_of_status(reply.status, text, name=name, retry_after=_seconds(reply.headers.get("retry-after", "")))


def _event_decoder() -> Decoder:
    parser = EventParser()

    def feed(data: bytes) -> Iterable[InferenceResponse]:
        for event in parser.feed(data):
            if event.name == "error":
                document = _loads(event.data)
                raise error_of_status(500, _text_of(event.data), name=str(document.get("type", "")))
            yield kserve_json.read_response(event.data)

    return feed


def _fetched(request: OutgoingRequest) -> Program[Any]:
    """Send `request` and return the JSON document of the response."""
    reply = checked((yield request))
    try:
        return _loads(reply.body) if reply.body else {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeirError(f"{request.path}: the response is not JSON ({error})") from error


def _whether(path: str) -> Program[bool]:
    """Return whether the response to GET `path` has status 200. Raises the error of 401 and 403."""
    reply = yield OutgoingRequest("GET", path)
    if reply.status in (401, 403):
        raise error_of(reply)
    return bool(reply.status == 200)


def _posted(path: str, document: Mapping[str, Any]) -> OutgoingRequest:
    return OutgoingRequest("POST", path, {"content-type": "application/json"}, _dumps(dict(document)))


def _model(name: str, version: str) -> str:
    return f"/v2/models/{quote(name, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")


def _text_of(body: bytes) -> str:
    """Return the text of an error's body in the protocol's form or in ours (docs/reference/errors.md), else the body itself."""
    try:
        error = _loads(body)["error"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return body[:1000].decode(errors="replace")
    return str(error.get("message", "")) if isinstance(error, dict) else str(error)


def _seconds(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def address_of(url: str) -> tuple[str, str | None]:
    """Return the base of all URLs, and the path of the Unix socket if `url` is unix:PATH. Raises SettingsError for unix: without
    a path."""
    if not url.startswith("unix:"):
        return url, None
    path = url.removeprefix("unix:").removeprefix("//")
    if not path:
        raise SettingsError(f"url={url!r}: must be http://HOST:PORT, https://HOST:PORT or unix:PATH")
    return "http://localhost", path
