"""Run as a program: an OTLP receiver that prints its ports of HTTP and gRPC, and then each span and metric that it gets as a line of JSON."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


def show(path: str, body: bytes) -> bytes:
    """Print what came in a request of this path, and return the response, which says that it was taken. An empty one says the same of metrics."""
    if path == "/v1/metrics":
        for of in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            _print(path, of, [metric_of(each) for scope in of.scope_metrics for each in scope.metrics])
    else:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            _print(path, resource, [described(span) for scope in resource.scope_spans for span in scope.spans])
    return ExportTraceServiceResponse().SerializeToString()


def _print(path: str, resource: Any, found: list[dict[str, Any]]) -> None:
    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
    about = {"path": path, "service": attributes["service.name"], "resource": attributes}
    for each in found:
        print(json.dumps({**about, **each}), flush=True)


class Receiver(BaseHTTPRequestHandler):
    """Takes what exporters post."""

    def do_POST(self) -> None:
        """Print what came."""
        answer = show(self.path, self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class Calls(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # it has no parameters when it runs
    """Takes what exporters send by gRPC."""

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Return what takes the call."""
        path = "/v1/metrics" if "Metrics" in details.method else "/v1/traces"
        return grpc.unary_unary_rpc_method_handler(lambda body, _: show(path, body))


def described(span: Any) -> dict[str, Any]:
    """Return what tests look at."""
    return {
        "name": span.name, "trace": span.trace_id.hex(), "span": span.span_id.hex(), "parent": span.parent_span_id.hex(),
        "start": span.start_time_unix_nano, "end": span.end_time_unix_nano, "kind": span.kind, "code": span.status.code,
        "state": span.trace_state,
        "links": [[link.trace_id.hex(), link.span_id.hex()] for link in span.links],
        "attributes": {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes},
    }  # fmt: skip


def metric_of(metric: Any) -> dict[str, Any]:
    """Return a metric with its points by labels: numbers, or histograms with counts, bounds, sum and the traces of exemplars."""
    kind = metric.WhichOneof("data")
    return {
        "name": metric.name, "unit": metric.unit, "kind": kind,
        "points": [
            {
                "labels": {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in point.attributes},
                **(
                    {"counts": list(point.bucket_counts), "bounds": list(point.explicit_bounds), "sum": point.sum,
                     "traces": [each.trace_id.hex() for each in point.exemplars]}
                    if kind == "histogram" else {"value": point.as_double}
                ),
            }
            for point in getattr(metric, kind).data_points
        ],
    }  # fmt: skip


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    calls = grpc.server(ThreadPoolExecutor(1), [Calls()])
    print(server.server_port, calls.add_insecure_port("127.0.0.1:0"), flush=True)
    calls.start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)
