"""Servers that do nothing, the floor of what a request costs: an ASGI application for uvicorn, and with PORT as argument a grpc.aio server that
answers every unary call with the bytes it got."""

import sys


async def app(scope, receive, send):
    await receive()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"1")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"9"})


async def echo_calls(port):
    import grpc
    import grpc.aio

    async def echo(request, context):
        return request

    class Echo(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.unary_unary_rpc_method_handler(echo)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    import uvloop

    uvloop.run(echo_calls(sys.argv[1]))
