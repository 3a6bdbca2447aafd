"""A grpc.aio server that answers every unary call with the bytes it got: the floor. Run with PORT."""

import sys

import grpc
import grpc.aio
import uvloop


class Echo(grpc.GenericRpcHandler):
    """Handles every method."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(_echo)


async def _echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return request


async def main() -> None:
    """Serve until the end."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main())
