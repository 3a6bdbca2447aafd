"""Inference over WebSocket: messages with ids, many under way on one connection, whose answers come as they end.

All other calls go over HTTP, to the same server.
"""

from collections.abc import Iterable
from typing import NamedTuple

from weir.client import failures
from weir.client.calls import Decoder, Streaming
from weir.client.http_calls import HttpCalls, asking_binary
from weir.client.programs import Program
from weir.client.values import FINAL
from weir.errors import Unsupported
from weir.wire.inference import InferenceRequest, InferenceResponse
from weir.wire.websocket import Failure, Message, write_request

Answer = InferenceResponse | Failure


class WebSocketRequest(NamedTuple):
    """A request to be sent. Its id is the connection's business; the answers are given back with the caller's own."""

    request: InferenceRequest
    binary: bool

    def message(self, id: str) -> Message:
        """Return what is sent, under that id."""
        asked = asking_binary(self.request) if self.binary else self.request
        sent = InferenceRequest(
            asked.model, asked.inputs, version=asked.version, id=id, outputs=asked.outputs, parameters=asked.parameters
        )
        return write_request(sent, binary=self.binary)


class WebSocketCalls(HttpCalls):
    """HttpCalls, but for inference, whose steps are Asked."""

    def infer(self, request: InferenceRequest) -> Program[InferenceResponse]:
        """See Calls."""
        (response,) = _read((yield WebSocketRequest(request, self._binary)), request.id)
        if response.parameters.get(FINAL) is False:
            raise Unsupported(f"model {request.model!r} streams its answers: ask it with stream")
        return response

    def stream(self, request: InferenceRequest) -> Streaming:
        """See Calls."""

        def decode(answer: Answer) -> Iterable[InferenceResponse]:
            (response,) = _read(answer, request.id)
            if response.outputs or not response.parameters.get(FINAL):
                yield response

        def decoder() -> Decoder:
            return decode

        return Streaming(WebSocketRequest(request, self._binary), decoder)


def is_last(answer: Answer) -> bool:
    """Tell whether no more answers to the same request follow."""
    return isinstance(answer, Failure) or answer.parameters.get(FINAL) is not False


def _read(answer: Answer, id: str) -> tuple[InferenceResponse]:
    if isinstance(answer, Failure):
        raise failures.of_status(answer.status, answer.error, name=answer.type, retry_after=answer.retry_after)
    answer.id = id
    return (answer,)
