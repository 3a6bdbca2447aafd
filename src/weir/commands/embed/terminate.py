"""`weir embed terminate`: stops a text server, over HTTP or ZeroMQ."""

from pathlib import Path
from typing import Annotated

import typer

_URL = "http://localhost:8000"
_PORT = 5555  # of bert-as-service


def terminate(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help=f"The server: http://HOST:PORT, or tcp://HOST:PORT for ZeroMQ (default: {_URL}).")
    ] = None,
    ip: Annotated[str | None, typer.Option("--ip", "-ip", help="Instead of a URL: the host of a server over ZeroMQ.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", "--port-in", "--port-data", "-port", "-port-in", "-port-data", help=f"Its port for requests (default: {_PORT}).", min=1, max=65535)
    ] = None,
    port_out: Annotated[
        int | None, typer.Option("--port-out", "--port-result", "-port-out", "-port-result", help="Its port for responses (default: the request port plus 1).", min=1, max=65535)
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="File with the server's control token or API key. A server without a control token accepts this command only from its own machine. ZeroMQ cannot send a token.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its response.", min=0.001)] = 5.0,
    timeout_ms: Annotated[float | None, typer.Option("-timeout", hidden=True, min=1)] = None,  # a flag of bert-serving-terminate
) -> None:  # fmt: skip
    """Stop a server after it has finished the requests that it accepted.

    The server requires its control token; without one, it accepts this command only from its own machine. The flags of
    bert-serving-terminate work too, with one dash; -timeout is in milliseconds.
    """
    from weir.embedding import EmbeddingServer
    from weir.errors import SettingsError
    from weir.protocols.access import read_token

    over_zeromq = ip is not None or port is not None
    if url is not None and over_zeromq:
        raise SettingsError(f"{url}, --ip, --port: give either a URL, or --ip and --port")
    if over_zeromq:
        host = ip or "localhost"
        url = f"tcp://{f'[{host}]' if ':' in host else host}:{port or _PORT}"
    token = None if token_file is None else read_token(str(token_file)).decode()
    seconds = timeout if timeout_ms is None else timeout_ms / 1000
    EmbeddingServer.shutdown(url or _URL, token=token, port_out=port_out, timeout=seconds)
    typer.echo(f"{url or _URL}: finishes what it has accepted, and stops")
