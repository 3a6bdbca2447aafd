"""Who answers for a model at the doors in place of its line.

A product that makes many requests to the line of one sets itself as the `deputy` of a service: texts are cut into tokens before they wait.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from starlette.types import Receive, Scope

from weir.model import Tensor
from weir.protocols.native import RequestHead
from weir.protocols.response import HttpResponse
from weir.wire.inference import InferenceRequest, InferenceResponse

if TYPE_CHECKING:
    from weir.serving.service import Service


class Deputy(Protocol):
    """Answers the requests for a service, at the doors that are not its own."""

    @property
    def inputs(self) -> Sequence[Tensor]:
        """What the metadata says of requests. Others may be taken besides."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """What the metadata says of answers."""

    async def infer(
        self, service: "Service", request: InferenceRequest, *, door: str, within: float | None, trace: Any
    ) -> InferenceResponse:
        """Answer a request of the Open Inference Protocol within so many seconds; see inferring.infer."""

    async def answer(
        self, ask: RequestHead, body: bytes, scope: Scope, receive: Receive, trace: Any
    ) -> HttpResponse | None:
        """Answer a request of the native door, its body decompressed, errors too; None if the client leaves."""
