"""A model behind the Open Inference Protocol over HTTP, its tensors as JSON or as raw bytes."""

from collections.abc import Sequence
from typing import Any

from weir.bench.targets.http import HttpOptions, HttpTarget, example_request, is_counted, request_bytes
from weir.bench.targets.payloads import Door, said_requests
from weir.messages import OCTETS
from weir.wire import kserve_binary, kserve_json
from weir.wire.inference import InferenceRequest

_HEADER_LENGTH = "Inference-Header-Content-Length"


class KserveTarget(HttpTarget):
    """Sends inference requests: `data` as JSON, whatever travels (see tensors.said_requests), or made from the metadata."""

    def __init__(
        self, url: str, door: Door, data: str | Sequence[Any] | None = None, options: HttpOptions | None = None
    ) -> None:
        super().__init__(url.partition("#")[0], None, options, name=url)
        self._door = door
        self._said = None if data is None else said_requests(data, door)

    async def _made(self) -> list[bytes]:
        options = self._options
        said = self._said or [await example_request(self._dialler, self._door, options.rows, options.timeout)]
        return [self._written(request) for request in said]

    def _written(self, request: InferenceRequest) -> bytes:
        headers = dict(self._options.headers)
        if not self._door.binary:
            return request_bytes("POST", self._address, headers, kserve_json.write_request(request))
        request.parameters = {**request.parameters, "binary_data_output": True}
        written = kserve_binary.write_request(request)
        headers |= {_HEADER_LENGTH: str(written.header_length), "Content-Type": OCTETS}
        return request_bytes("POST", self._address, headers, b"".join(written.parts))

    async def _served_model(self) -> str | None:
        model = self._door.model
        return model if await is_counted(self._dialler, model, self._options.timeout) else None
