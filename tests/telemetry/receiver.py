"""Run as a program: an OTLP receiver that prints its port, and then each span that it gets as a line of JSON."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Receiver(BaseHTTPRequestHandler):
    """Takes what exporters post."""

    def do_POST(self) -> None:
        """Print the spans, and say that they were taken."""
        body = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    print(json.dumps({"path": self.path, "service": service, **described(span)}), flush=True)
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def described(span: Any) -> dict[str, Any]:
    """Return what tests look at."""
    return {
        "name": span.name, "trace": span.trace_id.hex(), "span": span.span_id.hex(), "parent": span.parent_span_id.hex(),
        "start": span.start_time_unix_nano, "end": span.end_time_unix_nano, "kind": span.kind, "code": span.status.code,
        "state": span.trace_state,
        "links": [[link.trace_id.hex(), link.span_id.hex()] for link in span.links],
        "attributes": {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes},
    }  # fmt: skip


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    print(server.server_port, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)
