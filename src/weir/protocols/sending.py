"""Writing an Answer through an ASGI server."""

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from weir.protocols.bodies import discard_body
from weir.protocols.response import HttpResponse


def inner_path(scope: Scope) -> str:
    """Return the path of a request below the path that the application is mounted at."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


async def send_answer(send: Send, answer: HttpResponse, *, more: bool = False) -> None:
    """Send `answer`, whole; with `more` the server keeps the request open until an empty body follows."""
    await send(_head(answer))
    await send({"type": "http.response.body", "body": answer.body, "more_body": more})


async def send_early(
    scope: Scope, receive: Receive, send: Send, answer: HttpResponse, *, closing: bool, within: float
) -> None:
    """Send `answer` before the body of the request has been read; with `closing`, end the connection over it, after
    reading on for at most `within` seconds."""
    if not closing:
        return await send_answer(send, answer)
    if scope["http_version"].startswith("1"):  # HTTP/2 ends the stream instead and forbids the header
        answer.headers.append((b"connection", b"close"))
    await send_answer(send, answer, more=True)
    await discard_body(receive, within)
    await send({"type": "http.response.body", "body": b""})


def _head(answer: HttpResponse) -> Message:
    length = (b"content-length", b"%d" % len(answer.body))
    return {"type": "http.response.start", "status": answer.status, "headers": [*answer.headers, length]}


def as_response(answer: HttpResponse) -> Response:
    """Return `answer` as what Starlette's endpoints return."""
    made = Response(answer.body, answer.status)
    made.raw_headers.extend(answer.headers)
    return made
